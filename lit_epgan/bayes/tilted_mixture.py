"""A Gaussian mixture prior whose components are tilted by sigma(f_j theta): its gradients and its sites.

Component j of J is a diagonal Gaussian cavity N(m_j, s_j) over theta (d,), multiplied in every coordinate by the
pseudo-likelihood sigma(f_j theta) of one number f_j, and replaced by the Gaussian of the same moments, N(m'_j, s'_j):

    p(theta) = sum_j pi_j N(theta; m'_j, s'_j)                                     EP-GAN, equations 5 - 11 and 46
    r_j = pi_j N(theta; m'_j, s'_j) / p(theta)
    d(-log p) / d theta = sum_j r_j (theta - m'_j) / s'_j = theta P - H, P = sum_j r_j / s'_j, H = sum_j r_j m'_j / s'_j
    d(-log p) / d f_j = -r_j sum_i d log N(theta_i; m'_ji(f_j), s'_ji(f_j)) / d f_j
    d(-log p) / d log pi_j = -r_j

so that theta's gradient, which every step needs, costs two passes over d numbers and no graph. f's sum over i runs over
every n-th coordinate from a random one on, n times: an unbiased estimate, whose graph does not grow with d.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lit_epgan.bayes.gaussian import GaussianFactor

# (mean, variance, f) -> (log Z, mean, variance) of N(mean, variance) sigma(f theta), in every coordinate
Moments = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
SAMPLE = 1 << 13  # coordinates that f's gradient is taken from


def proper_moments(moments: Moments, mean: Tensor, variance: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tilted mean and variance, and where (boolean) they are moments at all.

    A sigmoid is log-concave, so the true tilted variance lies in (0, variance] and a site's precision is never
    negative. Approximations leave that range: a larger variance is set to the cavity's, and where it is not positive or
    nothing is finite, the coordinate is not tilted. So every product of the prior with some of the sites is proper.
    """
    _, tilted_mean, tilted_variance = moments(mean, variance, f)
    good = (tilted_variance > 0) & (tilted_mean.abs() < math.inf)  # half the price of isfinite
    tilted_variance = torch.where(good, torch.minimum(tilted_variance, variance), variance)
    return torch.where(good, tilted_mean, mean), tilted_variance, good


@torch.no_grad()
def tilted_sites(cavity: GaussianFactor, f: Tensor, moments: Moments) -> tuple[GaussianFactor, int]:
    """The site factors tilted / cavity (J, d), with f (J,), and in how many coordinates the moments were none, so that
    the site is 1."""
    site = GaussianFactor.uniform(cavity.precision)
    left_out = 0
    for j, slope in enumerate(f):  # one at a time: this is no training step, and temporaries are as long as theta
        old = GaussianFactor(cavity.precision[j], cavity.precision_mean[j])
        mean, variance, good = proper_moments(moments, old.mean, old.variance, slope)
        new = GaussianFactor.from_moments(mean, variance) / old
        site.precision[j] = torch.where(good, new.precision.clamp_min(0), 0)
        site.precision_mean[j] = torch.where(good, new.precision_mean, 0)
        left_out += int((~good).sum())
    return site, left_out


class TiltedMixture:
    """The mixture for one proper cavity N(m_j, s_j), (J, d); ``tilt`` gives it the f and the weights that hold until
    the next ``tilt``."""

    def __init__(self, cavity: GaussianFactor, moments: Moments) -> None:
        self._mean, self._variance, self._moments = cavity.mean, cavity.variance, moments
        self.tilted = cavity
        self._log_normaliser: Tensor | None = None

    @torch.no_grad()
    def tilt(self, theta: Tensor, f: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Tilt the components by f and log weights (J,); the gradients (J,) of -log p(theta), theta (d,), with respect
        to both."""
        mean, variance, _ = proper_moments(self._moments, self._mean, self._variance, f[:, None])
        self.tilted, self._log_normaliser = GaussianFactor.from_moments(mean, variance), None
        self._log_weights = log_weights
        share = self._responsibilities(theta)
        return -share * self._slopes(theta, f), -share

    def log_densities(self, theta: Tensor) -> Tensor:
        """log N(theta; m'_j, s'_j), (J,)."""
        if self._log_normaliser is None:
            q = self.tilted
            self._log_normaliser = (q.precision_mean.square() / q.precision - q.precision.log()).sum(1)
        exponent = self.tilted.precision @ theta.square() - 2 * (self.tilted.precision_mean @ theta)
        return -0.5 * (exponent + self._log_normaliser + math.log(2 * math.pi) * len(theta))

    def attraction(self, theta: Tensor) -> GaussianFactor:
        """P and H (d,) at theta: the components' geometric mean, weighted by their responsibilities."""
        if len(self.tilted.precision) == 1:
            return GaussianFactor(self.tilted.precision[0], self.tilted.precision_mean[0])
        share = self._responsibilities(theta)
        return GaussianFactor(share @ self.tilted.precision, share @ self.tilted.precision_mean)

    def _responsibilities(self, theta: Tensor) -> Tensor:
        if len(self.tilted.precision) == 1:  # and no density needs to be known
            return torch.ones_like(self._log_weights)
        return responsibilities(self._log_weights, self.log_densities(theta))

    def _slopes(self, theta: Tensor, f: Tensor) -> Tensor:
        """d log N(theta; m'_j(f_j), s'_j(f_j)) / d f_j, (J,)."""
        every = -(-self._mean.numel() // SAMPLE) or 1
        sample = slice(int(torch.randint(every, ())) if every > 1 else 0, None, every)
        old_mean, old_variance = self._mean[:, sample], self._variance[:, sample]
        with torch.enable_grad():
            # one f for each coordinate: a derivative that is no number stays in the coordinate where it arose
            each = f[:, None].expand_as(old_mean).clone().requires_grad_()
            mean, variance, good = proper_moments(self._moments, old_mean, old_variance, each)
            log_density = -0.5 * ((theta[sample] - mean).square() / variance + variance.log())
            (slopes,) = torch.autograd.grad(log_density.sum(), each)
        return every * torch.where(good, slopes, 0).sum(1)


def responsibilities(log_weights: Tensor, log_z: Tensor) -> Tensor:
    """r_j = pi_j Z_j / sum_i pi_i Z_i, (..., J), of log pi, up to a constant, and log Z, both (..., J).

    With Z_j = N(theta; m_j, s_j) they are the components' shares in the density at theta; with the normalisers of the
    tilted components, the weights of the tilted mixture.
    """
    return torch.softmax(log_weights + log_z, -1)


def gumbel_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Logarithms (..., J) of a relaxed draw of one component from softmax(logits), differentiable with respect to the
    logits.

    log softmax((logits + g) / tau), g_j ~ Gumbel(0, 1) from torch's global stream: the draw is a vertex of the simplex
    as tau -> 0, and its centre as tau -> infinity. In logarithms, because a density needs those and small weights
    underflow. Jang, Gu and Poole 2016, "Categorical reparameterization with Gumbel-softmax", equation 2.
    """
    gumbel = -torch.empty_like(logits).exponential_().log()
    return torch.log_softmax((logits + gumbel) / temperature, -1)
