"""DP-FedAvg-GAN on a group's selected examples: discriminators at the users, the generator on the server."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_epgan.errors import UserError
from lit_epgan.federated.fedavg_gan import FedAvgGAN
from lit_epgan.inspection.federated_generator import FederatedGenerator, nothing
from lit_epgan.inspection.images import picture
from lit_epgan.inspection.selected import selected_images
from lit_epgan.inspection.statistics import image_statistics
from lit_epgan.inspection.view import Panel, Users
from lit_epgan.modules import GAN, UniformPrior
from lit_epgan.randomness import generator_for


class FederatedGAN(FederatedGenerator):
    """A GAN for each group, trained by DP-FedAvg-GAN (Augenstein et al. 2020, algorithm 1) on the selected examples.

    ``FederatedGenerator`` says what one user can move.

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

    kind, reported, method = "GAN", "discriminator", "DP-FedAvg-GAN"
    server = "The generators are trained on the server against these discriminators, and see no image."
    reading = "The lower pictures are samples of a generator that never saw an image of theirs."
    skips_refused = True  # a GAN of few users would show nothing

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
        _check_gan(gan)
        algorithm = FedAvgGAN(server_steps, batch_size)
        price = noise_multiplier, target_epsilon, users_per_round, users
        super().__init__(gan, algorithm, rounds, bound, *price, local_steps, batch_size, samples)
        self.gan = gan

    def check_users(self, private: Mapping[str, Dataset]) -> None:
        """Refuse users whose number, or the shape of whose images, is another than was said; both are public.

        Args:
            private: each user's records, by name.

        Raises:
            UserError: naming what was said, and what it is.
        """
        super().check_users(private)
        made = tuple(self.gan.sample(1, generator_for("shape")).shape[1:])
        shape = next((tuple(own[0][0].shape) for own in private.values() if len(own)), made)  # type: ignore[arg-type]
        if made != shape:
            raise UserError(f"generator.gan makes images {made}, and the users' are {shape}: give it that shape")

    def selected(self, users: Users, seed: int) -> dict[str, list[Tensor]]:
        """Images (n, *shape)."""
        found = selected_images(users.records(), users.selection, seed)
        none = next(iter(found.values()))[0][:0]  # of users after the last block that has a record
        return {name: own + [none] * (len(users.private) - len(own)) for name, own in found.items()}

    def batch(self, own: Tensor, rows: Tensor) -> list[Tensor]:
        """Images alone."""
        return [own[rows]]

    def loss(self, module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """That of the network whose turn it is."""
        return turn_loss(module, batch)

    def optimizer(self, module: Any) -> torch.optim.Optimizer:
        """One for both networks."""
        return one_optimizer(module)

    def numbers(self) -> int:
        """The discriminator's."""
        return sum(parameter.numel() for parameter in self.gan.discriminator.parameters())

    def shown(self, panel: Panel, module: GAN) -> Panel:
        """With a picture of samples, and their statistics."""
        made = module.sample(self.samples, generator_for("samples"))
        lines = ["samples of the group's GAN"]
        lines += [f"{each.title} {float(each.of(made).mean()):+.2f}" for each in image_statistics(0.0)]
        return replace(panel, samples=picture(made), made=lines)

    def kept(self, module: GAN) -> dict[str, Tensor]:
        """The generator's."""
        state: dict[str, Tensor] = module.generator.state_dict()
        return state


def turn_loss(gan: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The loss () of the network whose turn it is; 0 of a user that has nothing to tell.

    Args:
        gan: the module.
        batch: real images (n, *shape), first of all.
    """
    assert isinstance(gan, GAN)
    (player,) = gan.turns
    return gan.player_loss(player, batch) if len(batch[0]) else nothing(getattr(gan, player))


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
