"""What a GAN's hyperparameters must be."""

import math
from collections.abc import Sequence
from typing import Protocol

from torch import nn

from lit_epgan.errors import UserError
from lit_epgan.modules.optimizers import OptimizerName
from lit_epgan.networks.average import has_batch_norm


class Hyperparameters(Protocol):
    """What a GAN says of its settings."""

    lr: float
    lr_discriminator: float
    betas: tuple[float, float]
    r1: float
    r1_every: int
    gp: float
    lr_decay: float | None
    generated: int | None
    optimizer: OptimizerName
    noise: float
    friction: float
    temperature: float


def check_hyperparameters(gan: Hyperparameters, average: float | None, generator: nn.Module) -> None:
    """Refuse what cannot be, NaN included.

    Raises:
        UserError: the first hyperparameter that cannot be, with what it must be.
    """
    rows = 2 if has_batch_norm(generator) else 1
    numbers = {
        "lr": (gan.lr, 0 < gan.lr < math.inf, "positive"),
        "lr_discriminator": (gan.lr_discriminator, 0 < gan.lr_discriminator < math.inf, "positive"),
        "betas": (gan.betas, all(0 <= beta < 1 for beta in gan.betas), "two numbers in [0, 1)"),
        "r1": (gan.r1, 0 <= gan.r1 < math.inf, "zero or positive"),
        "r1_every": (gan.r1_every, gan.r1_every >= 1, "at least 1"),
        "gp": (gan.gp, 0 <= gan.gp < math.inf, "zero or positive"),
        "average": (average, average is None or 0 <= average < 1, "in [0, 1), or null for no average"),
        "lr_decay": (gan.lr_decay, gan.lr_decay is None or 0 <= gan.lr_decay <= 1, "in [0, 1], or null"),
        "generated": (gan.generated, gan.generated is None or gan.generated >= rows, f"at least {rows}, or null"),
        "optimizer": (gan.optimizer, gan.optimizer in ("adam", "sghmc", "sgd"), "adam, sghmc or sgd"),
        "noise": (gan.noise, 0 <= gan.noise < math.inf, "zero or positive"),
        "friction": (gan.friction, 0 < gan.friction <= 1, "in (0, 1]"),
        "temperature": (gan.temperature, 0 <= gan.temperature < math.inf, "zero or positive"),
    }
    for name, (value, good, wanted) in numbers.items():
        if not good:
            raise UserError(f"the model's {name} is {value}, but must be {wanted}.")


def agreed_latent_dim(given: int | None, generator: nn.Module) -> int:
    """The noise's dimension: what is given, or what the generator says of itself.

    Raises:
        UserError: neither is there, or they differ.
    """
    own = getattr(generator, "latent_dim", None)
    dimension = own if given is None else given
    if dimension is None:
        raise UserError("the generator does not say its latent_dim: give the model's latent_dim.")
    if own not in (None, dimension) or dimension < 1:
        raise UserError(f"the model's latent_dim is {dimension}, but its generator takes {own}: leave it out.")
    return int(dimension)


def check_shape(data: Sequence[int] | None, generated: Sequence[int]) -> None:
    """Refuse data that the generator does not imitate.

    Raises:
        UserError: one record's shape is another than one sample's.
    """
    if data is not None and tuple(data) != tuple(generated):
        raise UserError(
            f"the data have the shape {tuple(data)}, the generator makes {tuple(generated)}: change the networks' "
            "data_shape, or channels and image_size, or the data's (of a folder: --data.color and --data.image_size)."
        )
