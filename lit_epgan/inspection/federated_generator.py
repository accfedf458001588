"""A generative model of a group's selected examples, trained by all users: the price, the cohorts and the noise."""

import copy
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_epgan.engine import Algorithm, Everyone, FixedSize, PlainFederation
from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.release import membership
from lit_epgan.inspection.selections import Selection
from lit_epgan.inspection.user_records import Records
from lit_epgan.inspection.view import Findings, Panel, Users
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed, generator_for, isolated
from lit_epgan.privacy.accountant import Relation, Releases, noise_multiplier_for
from lit_epgan.privacy.central import CentralNoise, SecretCohorts
from lit_epgan.privacy.payments import check_settings

LARGE = 20.0  # epsilons that protect nobody


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
    """

    kind: ClassVar[str]  # what the module is, in a sentence
    reported: ClassVar[str]  # what of it the users send
    method: ClassVar[str]  # how it is trained
    server: ClassVar[str]  # a sentence on what the server does beside it
    reading: ClassVar[str]  # a sentence on how its samples are to be read
    skips_refused: ClassVar[bool]  # whether a group of which the view refuses to show anything has none

    def __init__(
        self,
        module: LightningModule,
        algorithm: Algorithm,
        rounds: int,
        bound: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        users_per_round: int | None = None,
        users: int | None = None,
        *,
        local_steps: int,
        batch_size: int,
        samples: int,
    ) -> None:
        check_settings("generator", bound, noise_multiplier, target_epsilon, 1e-5, "zero_out", None)
        at_least(1, "generator", rounds=rounds, local_steps=local_steps, batch_size=batch_size, samples=samples)
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

    def optimizer(self, module: Any) -> torch.optim.Optimizer:
        """Of the module's parameters; its first step must not move one without a gradient, or with one of zeros."""
        return module.configure_optimizers()

    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @abstractmethod
    def shown(self, panel: Panel, module: Any) -> Panel:
        """The group's panel with what its module makes."""

    def kept(self, module: Any) -> dict[str, Tensor]:
        """The state that makes the samples, for a file."""
        return dict(module.state_dict())

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
        """Refuse users whose number, or the kind of whose data, is another than was said; both are public."""
        if self.users not in (None, len(private)):
            raise UserError(f"generator.users is {self.users}, and the data have {len(private)}: give this number")

    def train(self, held: Sequence[Any], deviation: float, seed: int, noise_seed: int | None = None) -> Any:
        """A group's module, trained on what every user holds, also one outside the group, with noise of ``deviation`` S
        on a round's sum. ``seed`` is of cohorts and steps, one for all groups, whose price supposes the same cohorts;
        it has to stay a secret. ``noise_seed`` repeats the noise, for studies."""
        module = copy.deepcopy(self.module)

        def batches(user: int, round_: int) -> Iterator[Any]:
            own = held[user]
            order = torch.randperm(len(own), generator=generator_for(seed, round_, user, "order"))
            rows = order.split(self.batch_size)  # one empty batch of a user outside: it reports zeros
            return (self.batch(own, some) for some in islice(rows, self.local_steps))

        sampler = Everyone() if self.users_per_round is None else SecretCohorts(FixedSize(self.users_per_round), seed)
        with isolated():
            federation = PlainFederation(
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
            federation.run(self.rounds)
        return federation.module

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
    return sum(parameter.sum() for parameter in network.parameters()) * torch.zeros(())


def add_generators(
    settings: FederatedGenerator,
    users: Users,
    ask: Ask,
    look: Callable[[], Findings],
    say: Callable[[str], None] = lambda sentence: None,
) -> Findings:
    """What ``look`` finds, and beside it what a generator makes for each group, but for those that it may skip.

    The generators' rounds are announced in the ledger before anything is asked, and paid for, all of them, before the
    first. ``look`` asks what the view asks, by ``ask``, whose ``rounds`` are the generators'. ``say`` takes a sentence
    on what is being done. UserError: the budget would be passed.
    """
    assert ask.rounds is not None
    deviation = ask.rounds.noise_multiplier * math.sqrt(users.selection.together)  # a user may be in several groups
    known, trained = ask.queries.noise_seed, {}
    with ask.queries.account(ask.rounds, f"{ask.what}, {settings.kind}s", ask.group) as release:
        findings = look()
        refused = {panel.title for panel in findings.panels if panel.refused and settings.skips_refused}
        names = [name for name in users.selection.groups if name not in refused]
        if not names:
            findings.released.append(
                f"No {settings.kind}: no group is large enough. Its rounds are not charged in the ledger."
            )
            return findings
        release(ask.rounds.count)  # all of them, whatever happens to this process
        # cohorts are secret
        seed = secrets.randbits(63) if known is None else derive_seed(known, f"{settings.kind}s")
        held = settings.selected(users, seed)
        for name in names:
            say(f"Training the {settings.kind} of the group “{name}”: {settings.rounds} rounds.")
            noise_seed = None if known is None else derive_seed(known, name)
            trained[name] = settings.train(held[name], deviation, seed, noise_seed)
    length = settings.noise_length(deviation, len(users.private))
    notes = ["the noise hides what users teach: expect nothing to be seen"] if settings.lasting(length) > 1 else []
    for place, panel in enumerate(findings.panels):
        if panel.title in trained:
            shown = settings.shown(panel, trained[panel.title])
            findings.panels[place] = replace(shown, made=[*shown.made, *notes])
    findings.kept["generators"] = {name: settings.kept(module) for name, module in trained.items()}
    findings.released[-1:-1] = _told(
        settings, ask, users, deviation, length
    )  # before the sentence that says: nothing else
    findings.reading += f" {settings.reading}"
    return findings


def _told(settings: FederatedGenerator, ask: Ask, users: Users, deviation: float, length: float) -> list[str]:
    """What the generators' rounds have released, and under which guarantee, in sentences."""
    assert ask.rounds is not None
    t, kind, part = users.selection.together, settings.kind, settings.reported
    asked = settings.users_per_round or len(users.private)
    price, lasting = ask.queries.price(ask.rounds), settings.lasting(length)
    groups = "one group at most" if t == 1 else f"{t} groups at most"
    return [
        f"For each group the {part}s of {settings.rounds} rounds of {settings.method}: in a round {asked} of "
        f"{len(users.private)} users are asked, the same ones for all groups. A user trains a group's {part} on "
        "the selected examples of that group alone, and reports zeros outside of it.",
        f"Each report is clipped to {settings.bound:g}, and noise of standard deviation "
        f"{deviation * settings.bound:.3g} is added to every number of the sum, which is divided by {asked}. "
        f"{settings.server}",
        f"A user is in {groups}, so the groups share one price: the {kind}s by themselves cost "
        f"{price}; the sum by itself {ask.queries.price(ask.releases)}."
        + (f" Such an epsilon protects nobody: these {kind}s are a simulation." if price.epsilon > LARGE else ""),
        f"In each round the noise is {length:.2g} times as long as the sum of all reports can be."
        + (f" All rounds add up, and their noise is {lasting:.2g} times as long." if settings.rounds > 1 else ""),
    ]


def examples_taken(users: Iterable[Records], selection: Selection, seed: int) -> Iterator[tuple[Records, Tensor]]:
    """The records block by block, and which are taken for which group, bool (n, groups).

    An example of weight w is taken with probability w. A user in more groups than ``Selection.together`` counts in the
    first ones only.
    """
    for number, records in enumerate(users):
        weights = selection.weights(records).double().clamp(0, 1)
        _, inside = membership(records, weights, selection.at_least)
        inside &= inside.cumsum(1) <= selection.together
        drawn = torch.rand(weights.shape, generator=generator_for(seed, "examples", number), dtype=torch.float64)
        yield records, (drawn < weights) & inside[records.user]
