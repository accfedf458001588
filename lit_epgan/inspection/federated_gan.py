"""DP-FedAvg-GAN on a group's selected examples: discriminators at the users, the generator on the server."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_epgan.engine import Everyone, FixedSize, PlainFederation
from lit_epgan.errors import UserError
from lit_epgan.federated.fedavg_gan import FedAvgGAN
from lit_epgan.modules import GAN, UniformPrior
from lit_epgan.privacy.accountant import noise_multiplier_for
from lit_epgan.privacy.central import CentralNoise
from lit_epgan.privacy.releases import Relation, Releases
from lit_epgan.privacy.settings import check_settings
from lit_epgan.randomness import generator_for, isolated


class FederatedGAN:
    """A GAN for each group, trained by DP-FedAvg-GAN (Augenstein et al. 2020, algorithm 1) on the selected examples.

    All users are asked alike, whatever group they are in: a cohort is drawn from all, the same one for all groups. A
    user outside a group reports zeros, and the divisor is the cohort's size, as both are public. A user is in at most
    t groups (``Selection.together``), so one user moves a round's sums of all groups together, as one vector, by at
    most sqrt(t) S. With noise N(0, (z S)^2 t I) on them a round is one release with noise multiplier z.

    Args:
        gan: the module; every group starts with a copy.
        rounds: of training.
        bound: S, the largest norm of a discriminator's change.
        noise_multiplier: z; give it or ``target_epsilon``.
        target_epsilon: of all rounds of all groups together, at the price's delta; the smallest z is taken.
        users_per_round: drawn without replacement; null for everyone.
        users: how many there are, a public number; with ``users_per_round`` the price depends on it.
        local_steps: of a user in a round, at most, in one pass over the selected examples.
        server_steps: of the generator in a round.
        batch_size: of all steps.
        samples: images that are shown of each group.

    Raises:
        UserError: a number is out of its range, or the GAN keeps what a private run cannot.
    """

    def __init__(
        self,
        gan: GAN,
        rounds: int,
        bound: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        users_per_round: int | None = None,
        users: int | None = None,
        local_steps: int = 6,
        server_steps: int = 6,
        batch_size: int = 32,
        samples: int = 100,
    ) -> None:
        check_settings("generator", bound, noise_multiplier, target_epsilon, 0.5, "zero_out", None)
        if min(rounds, local_steps, samples) < 1:
            raise UserError("generator.rounds, generator.local_steps and generator.samples are at least 1")
        if users_per_round is not None and not 1 <= users_per_round <= (users or 0):
            raise UserError(
                f"generator.users_per_round is {users_per_round}, and generator.users {users}: the price depends on "
                "both, and a round asks at least one user and at most all"
            )
        _check_gan(gan)
        self.algorithm = FedAvgGAN(server_steps, batch_size)
        self.gan, self.rounds, self.bound, self.samples = gan, rounds, bound, samples
        self.noise_multiplier, self.target_epsilon = noise_multiplier, target_epsilon
        self.users_per_round, self.users = users_per_round, users
        self.local_steps, self.batch_size = local_steps, batch_size

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
        """Refuse users whose number, or the shape of whose images, is another than was said; both are public.

        Args:
            private: each user's records, by name.

        Raises:
            UserError: naming what was said, and what it is.
        """
        if self.users not in (None, len(private)):
            raise UserError(f"generator.users is {self.users}, and the data have {len(private)}: give this number")
        made = tuple(self.gan.sample(1, generator_for("shape")).shape[1:])
        shape = next((tuple(own[0][0].shape) for own in private.values() if len(own)), made)  # type: ignore[arg-type]
        if made != shape:
            raise UserError(f"generator.gan makes images {made}, and the users' are {shape}: give it that shape")

    def train(self, images: Sequence[Tensor], deviation: float, seed: int, noise_seed: int | None = None) -> GAN:
        """A group's GAN.

        Args:
            images: of every user, also outside the group, the selected ones (n, *shape), n >= 0.
            deviation: of the noise on a round's sum, in S.
            seed: of cohorts and steps; it has to stay a secret where the price counts on cohorts.
            noise_seed: repeats the noise, for studies.
        """
        with isolated():
            federation = self.federation(images, deviation, seed, noise_seed)
            federation.run(self.rounds)
        gan = federation.module
        assert isinstance(gan, GAN)
        return gan

    def federation(
        self, images: Sequence[Tensor], deviation: float, seed: int, noise_seed: int | None = None
    ) -> PlainFederation:
        """The group's federation before its first round; see ``train``."""

        gan = copy.deepcopy(self.gan)

        def batches(user: int, round_: int) -> Iterator[list[Tensor]]:
            own = images[user]
            order = torch.randperm(len(own), generator=generator_for(seed, round_, user, "order"))
            rows = order.split(self.batch_size)  # one empty batch of a user outside: it reports zeros
            return ([own[some]] for some in islice(rows, self.local_steps))

        return PlainFederation(
            self.algorithm,
            gan,
            turn_loss,
            lambda _: one_optimizer(gan),
            batches,
            [1.0] * len(images),  # not the true number: it tells who is in the group
            seed,
            Everyone() if self.users_per_round is None else FixedSize(self.users_per_round),
            CentralNoise(self.bound, deviation, noise_seed=noise_seed),
        )

    def noise_length(self, deviation: float, users: int) -> float:
        """How long a round's noise on the sum is, in lengths of the longest sum of all that are asked."""
        numbers = sum(parameter.numel() for parameter in self.gan.discriminator.parameters())
        return deviation * math.sqrt(numbers) / (self.users_per_round or users)


def turn_loss(gan: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The loss () of the network whose turn it is; 0 of a user that has nothing to tell.

    Args:
        gan: the module.
        batch: real images (n, *shape), first of all.
    """
    assert isinstance(gan, GAN)
    (player,) = gan.turns
    if not len(batch[0]):
        nothing: Tensor = sum(parameter.sum() for parameter in getattr(gan, player).parameters()) * torch.zeros(())
        return nothing
    return gan.player_loss(player, batch)


def one_optimizer(gan: GAN) -> torch.optim.Optimizer:
    """The generator's optimizer with the discriminator's parameters beside its own, at their own learning rate.

    A network whose turn it is not has no gradient, so a step leaves it as it is.
    """
    optimizers = gan.configure_optimizers()
    assert isinstance(optimizers, list)
    for group in optimizers[1].param_groups:
        optimizers[0].add_param_group(group)
    return optimizers[0]


def _check_gan(gan: GAN) -> None:
    """A user outside a group must report exact zeros, and whatever a Trainer would do between steps is not done."""
    kept = {
        "average": (gan.average is None, "null"),
        "lr_decay": (gan.lr_decay is None, "null"),
        "r1": (gan.r1 == 0, "0"),
        "noise": (gan.noise == 0, "0"),
        "optimizer": (gan.optimizer in ("sgd", "adam"), "sgd or adam"),
        "prior": (type(gan.prior) is UniformPrior, "null"),
    }
    for name, (fits, wanted) in kept.items():
        if not fits:
            raise UserError(f"generator.gan.{name} must be {wanted} in an inspection")
