"""GAN objectives: what the discriminator and the generator minimise, and the two gradient penalties.

Scores D(x) are float tensors (batch, heads); a head is one discriminator. Losses are means over heads of (weighted)
means over rows; where N generators make as many rows each, that is the average of the losses of all N x M pairs of a
generator and a discriminator, under every objective. (ProbGAN's published code averages the scores of the heads first,
which is the same for the Wasserstein objective only.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import at_least_single, no_autocast

ObjectiveName = Literal["wgan-gp", "lsgan", "non-saturating"]
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """Losses of a score: l_real(D(x)) and l_fake(D(G(z))) for the discriminator, l_gen(D(G(z))) for the generator.

    In single precision at least, also of scores under autocast.
    """

    real: Loss
    fake: Loss
    generator: Loss

    def discriminator_loss(self, real: Tensor, fake: Tensor, weight: Tensor | None = None) -> Tensor:
        """L_D = sum_i w_i l_real(D(x_i)) + mean_i l_fake(D(G(z_i))) of scores (batch, heads) and (any batch, heads),
        and weights of the real rows (batch,) that sum to one; without them every row weighs 1 / batch."""
        return weighted_mean(self.real(at_least_single(real)), weight) + self.fake(at_least_single(fake)).mean()

    def generator_loss(self, fake: Tensor) -> Tensor:
        """L_G = mean_i l_gen(D(G(z_i))) of scores ``fake`` (batch, heads)."""
        return self.generator(at_least_single(fake)).mean()


def _half_square_to_one(scores: Tensor) -> Tensor:
    return (scores - 1).square() * 0.5


OBJECTIVES: dict[str, Objective] = {
    # Gulrajani et al. 2017; its penalty is `gradient_penalty`
    "wgan-gp": Objective(real=torch.neg, fake=lambda scores: scores, generator=torch.neg),
    # Mao et al. 2017 with a = 0, b = c = 1
    "lsgan": Objective(_half_square_to_one, lambda scores: scores.square() * 0.5, _half_square_to_one),
    # Goodfellow et al. 2014; -log sigmoid(s) = softplus(-s)
    "non-saturating": Objective(lambda scores: F.softplus(-scores), F.softplus, lambda scores: F.softplus(-scores)),
}


def objective(name: str) -> Objective:
    """The objective called ``name``. UserError: there is none of that name; the message lists those there are."""
    if name not in OBJECTIVES:
        raise UserError(f"objective {name!r} does not exist: choose one of {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def weighted_mean(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """sum_i w_i values_i, then the mean over what trails; ``values`` (batch, ...), ``weight`` (batch,) sums to one."""
    if weight is None:
        return values.mean()
    with no_autocast(values.device):
        return (weight @ values.flatten(1)).mean() if values.dim() > 1 else weight @ values


def squared_gradient_norms(scores: Tensor, inputs: Tensor) -> Tensor:
    """|| grad_x D(x_i) ||^2 (batch,) of every row, over *all* dimensions of a sample, where D is the mean of the heads;
    itself differentiable. ``scores`` (batch, heads) have the graph of ``inputs`` (batch, ...), which require a
    gradient."""
    heads = scores.numel() // len(scores)
    total = scores.sum() if heads == 1 else scores.sum() / heads
    (gradient,) = torch.autograd.grad(total, inputs, create_graph=True)
    return gradient.square().flatten(1).sum(1)


def scores_and_slopes(discriminator: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """D(x) (batch, heads), and || grad_x D(x_i) ||^2 (batch,) as ``squared_gradient_norms`` has them.

    For whoever works by ``torch.func``, where ``torch.autograd.grad`` is not to be had; BatchNorm is not, here.
    """
    scores, pull = torch.func.vjp(discriminator, inputs)[:2]
    (gradient,) = pull(torch.full_like(scores, len(scores) / scores.numel()))
    return scores, gradient.square().flatten(1).sum(1)


def gradient_penalty(
    discriminator: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, weight: Tensor | None = None
) -> Tensor:
    """sum_i w_i (|| grad D(x_i) ||_2 - 1)^2 at x_i = e_i real_i + (1 - e_i) fake_i, e_i ~ U(0, 1) for each *sample*.

    Gulrajani et al. 2017, eq. 3, without its coefficient. (ProbGAN's published code takes the norm per pixel, over
    channels only.)

    Args:
        real: float tensor (batch, ...).
        fake: generated rows (any batch, ...); where there are not as many, each real row meets one drawn at random.
        weight: weights of the real rows (batch,), which their mixtures inherit.
    """
    mixed = mixtures(real, fake).requires_grad_()
    return slope_penalty(squared_gradient_norms(discriminator(mixed), mixed), weight)


def mixtures(real: Tensor, fake: Tensor) -> Tensor:
    """x_i = e_i real_i + (1 - e_i) fake_i (batch, ...), without a graph; see ``gradient_penalty``."""
    if len(fake) != len(real):
        fake = fake[torch.randint(len(fake), (len(real),), device=fake.device)]
    share = torch.rand(len(real), *[1] * (real.dim() - 1), device=real.device, dtype=real.dtype)
    return torch.lerp(fake.detach().to(real.dtype), real.detach(), share)


def slope_penalty(squared_norms: Tensor, weight: Tensor | None = None) -> Tensor:
    """sum_i w_i (|| grad D(x_i) ||_2 - 1)^2 of squared norms (batch,)."""
    # sqrt has no derivative at zero: a flat discriminator would give NaN
    return weighted_mean(((squared_norms + 1e-12).sqrt() - 1).square(), weight)


def r1_penalty(scores: Tensor, real: Tensor, weight: Tensor | None = None) -> Tensor:
    """1/2 sum_i w_i || grad_x D(x_i) ||^2 on real rows (Mescheder et al. 2018, eq. 9), without its coefficient;
    ``scores`` (batch, heads) have the graph of ``real`` (batch, ...), which requires a gradient, and weights (batch,)
    sum to one."""
    return weighted_mean(squared_gradient_norms(scores, real), weight) * 0.5
