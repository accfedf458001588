"""A generative model of a group's selected examples, trained by all users: the price, the cohorts and the noise."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_epgan.engine import Algorithm, Everyone, FixedSize, PlainFederation
from lit_epgan.errors import UserError
from lit_epgan.inspection.view import Panel, Users
from lit_epgan.privacy.accountant import noise_multiplier_for
from lit_epgan.privacy.central import CentralNoise
from lit_epgan.privacy.releases import Relation, Releases
from lit_epgan.privacy.secret_cohorts import SecretCohorts
from lit_epgan.privacy.settings import check_settings
from lit_epgan.randomness import generator_for, isolated


class FederatedGenerator(ABC):
    """A module for each group, trained under differential privacy on the selected examples; it makes others like them.

    All users are asked alike, whatever group they are in: a cohort is drawn from all, the same one for all groups. A
    user outside a group reports zeros, and the divisor is the cohort's size, as both are public. A user is in at most
    t groups (``Selection.together``), so one user moves a round's sums of all groups together, as one vector, by at
    most sqrt(t) S. With noise N(0, (z S)^2 t I) on them a round is one release with noise multiplier z.

    Args:
        module: every group starts with a copy.
        algorithm: of the rounds.
        rounds: of training.
        bound: S, the largest norm of a report.
        noise_multiplier: z; give it or ``target_epsilon``.
        target_epsilon: of all rounds of all groups together, at the price's delta; the smallest z is taken.
        users_per_round: drawn without replacement; None for everyone.
        users: how many there are, a public number; with ``users_per_round`` the price depends on it.
        local_steps: of a user in a round, at most, in one pass over the selected examples.
        batch_size: of a user's steps.
        samples: that are made of each group.

    Attributes:
        kind: what the module is, in a sentence.
        reported: what of it the users send.
        method: how it is trained.
        server: a sentence on what the server does beside it.
        reading: a sentence on how its samples are to be read.
        skips_refused: whether a group of which the view refuses to show anything has none.

    Raises:
        UserError: a number is out of its range.
    """

    kind: ClassVar[str]
    reported: ClassVar[str]
    method: ClassVar[str]
    server: ClassVar[str]
    reading: ClassVar[str]
    skips_refused: ClassVar[bool]

    def __init__(
        self,
        module: LightningModule,
        algorithm: Algorithm,
        rounds: int,
        bound: float,
        noise_multiplier: float | None,
        target_epsilon: float | None,
        users_per_round: int | None,
        users: int | None,
        local_steps: int,
        batch_size: int,
        samples: int,
    ) -> None:
        check_settings("generator", bound, noise_multiplier, target_epsilon, 0.5, "zero_out", None)
        if min(rounds, local_steps, batch_size, samples) < 1:
            raise UserError(
                "generator.rounds, generator.local_steps, generator.batch_size and generator.samples are at least 1"
            )
        if users_per_round is not None and not 1 <= users_per_round <= (users or 0):
            raise UserError(
                f"generator.users_per_round is {users_per_round}, and generator.users {users}: the price depends on "
                "both, and a round asks at least one user and at most all"
            )
        self.module, self.algorithm, self.rounds, self.bound, self.samples = module, algorithm, rounds, bound, samples
        self.noise_multiplier, self.target_epsilon = noise_multiplier, target_epsilon
        self.users_per_round, self.users = users_per_round, users
        self.local_steps, self.batch_size = local_steps, batch_size

    @abstractmethod
    def selected(self, users: Users, seed: int) -> dict[str, list[Any]]:
        """Of each group, by name, what each user trains on, also one outside; ``seed`` draws where weights are odd."""

    @abstractmethod
    def batch(self, own: Any, rows: Tensor) -> Any:
        """A batch of these rows, int64 (n,), of what a user trains on; its first entry has n rows, n >= 0."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        """The loss () of a step; ``nothing`` of a batch without a row."""

    @abstractmethod
    def optimizer(self, module: Any) -> torch.optim.Optimizer:
        """Of the module's parameters; its first step must not move one without a gradient, or with one of zeros."""

    @abstractmethod
    def numbers(self) -> int:
        """How many numbers a report has."""

    @abstractmethod
    def shown(self, panel: Panel, module: Any) -> Panel:
        """The group's panel with what its module makes."""

    @abstractmethod
    def kept(self, module: Any) -> dict[str, Tensor]:
        """The state that makes the samples, for a file."""

    def releases(self, delta: float, relation: Relation) -> Releases:
        """What all rounds of all groups release together; z is found for ``target_epsilon`` where that is given."""
        kind = Releases(1.0, self.rounds)
        if self.users_per_round is not None and self.users is not None:
            rate = self.users_per_round / self.users
            kind = Releases(1.0, self.rounds, "fixed", rate, self.users)
        z = self.noise_multiplier
        if z is None:
            assert self.target_epsilon is not None
            asked = self.target_epsilon
            z = noise_multiplier_for(asked, delta, lambda z: [kind.with_noise(z, self.rounds)], relation)
        return kind.with_noise(z, self.rounds)

    def check_users(self, private: Mapping[str, Dataset]) -> None:
        """Refuse users whose number, or the kind of whose data, is another than was said; both are public.

        Args:
            private: each user's records, by name.

        Raises:
            UserError: naming what was said, and what it is.
        """
        if self.users not in (None, len(private)):
            raise UserError(f"generator.users is {self.users}, and the data have {len(private)}: give this number")

    def train(self, held: Sequence[Any], deviation: float, seed: int, noise_seed: int | None = None) -> Any:
        """A group's module.

        Args:
            held: what every user, also one outside the group, trains on.
            deviation: of the noise on a round's sum, in S.
            seed: of cohorts and steps, one for all groups, whose price supposes the same cohorts; it has to stay a
                secret.
            noise_seed: repeats the noise, for studies.
        """
        with isolated():
            federation = self.federation(held, deviation, seed, noise_seed)
            federation.run(self.rounds)
        return federation.module

    def federation(
        self, held: Sequence[Any], deviation: float, seed: int, noise_seed: int | None = None
    ) -> PlainFederation:
        """The group's federation before its first round; see ``train``."""
        module = copy.deepcopy(self.module)

        def batches(user: int, round_: int) -> Iterator[Any]:
            own = held[user]
            order = torch.randperm(len(own), generator=generator_for(seed, round_, user, "order"))
            rows = order.split(self.batch_size)  # one empty batch of a user outside: it reports zeros
            return (self.batch(own, some) for some in islice(rows, self.local_steps))

        sampler = Everyone() if self.users_per_round is None else SecretCohorts(FixedSize(self.users_per_round), seed)
        return PlainFederation(
            self.algorithm,
            module,
            self.loss,
            lambda _: self.optimizer(module),
            batches,
            [1.0] * len(held),  # not the true number: it tells who is in the group
            seed,
            sampler,
            CentralNoise(self.bound, deviation, noise_seed=noise_seed),
        )

    def lasting(self, length: float) -> float:
        """How long the noise of all rounds together is, where each round's has this ``noise_length``.

        What T rounds teach adds up, T times as long; their noises are independent, sqrt(T) times as long.
        """
        return length / math.sqrt(self.rounds)

    def noise_length(self, deviation: float, users: int) -> float:
        """How long a round's noise on the sum is, in lengths of the longest sum of all that are asked."""
        return deviation * math.sqrt(self.numbers()) / (self.users_per_round or users)


def nothing(network: nn.Module) -> Tensor:
    """0 (), whose gradients are zeros: the loss of a user that has nothing to tell."""
    total: Tensor = sum(parameter.sum() for parameter in network.parameters()) * torch.zeros(())
    return total
