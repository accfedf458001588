"""The exact posterior of the Bayesian Gaussian mixture, of data pooled in one place: a Gibbs sampler.

All of it is conjugate (Gelman et al. 2013, sections 3.6 and 22.2); chains run side by side as one array.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evidence.chain_diagnostics import effective_sample_size, split_r_hat
from lit_epgan.bayes.simulator import GaussianMixture

Array = NDArray[np.float64]


@dataclass
class Parameters:
    """A mixture for each chain: weights (c, K), means (c, K, d), and roots (c, K, d, d) with Sigma = root root^T."""

    weights: Array
    means: Array
    roots: Array

    def covariances(self) -> Array:
        """Sigma (c, K, d, d)."""
        return self.roots @ self.roots.mT


@dataclass(frozen=True)
class Posterior:
    """Draws of several chains, components in the order of their means' first coordinate.

    Attributes:
        values: ``weights`` (chains, draws, K), ``means`` (..., K, d), ``covariances`` (..., K, d, d).
        r_hat: the largest of any parameter.
        effective: the least effective sample size of any parameter.
    """

    values: dict[str, Tensor]
    r_hat: float
    effective: float

    def pooled(self) -> dict[str, Tensor]:
        """The values of all chains in one row: (chains x draws, ...)."""
        return {name: value.flatten(0, 1) for name, value in self.values.items()}


def gibbs(
    data: Tensor, model: GaussianMixture, chains: int = 4, draws: int = 2000, burn_in: int = 500, seed: int = 0
) -> Posterior:
    """Draws from p(weights, means, covariances | data).

    Args:
        data: (n, d).
        model: its prior.
        chains: begun apart, each from seeds of its own (k-means++).
        draws: of each chain, all of them kept.
        burn_in: sweeps before the first draw.
        seed: of the chains' random numbers.
    """
    rng = np.random.default_rng(seed)
    x = np.broadcast_to(data.double().numpy(), (chains, *data.shape))
    state = draw_parameters(x, seeded(x, model.components, rng), model, rng)
    kept = []
    for sweep in range(burn_in + draws):
        state = draw_parameters(x, draw_labels(x, state, rng), model, rng)
        if sweep >= burn_in:
            kept.append((state.weights, state.means, state.covariances()))
    stacked = (torch.from_numpy(np.stack(each, 1)) for each in zip(*kept, strict=True))
    values = ordered(dict(zip(("weights", "means", "covariances"), stacked, strict=True)))
    flat = torch.cat([value.flatten(2) for value in values.values()], 2).numpy()
    if model.components == 1:
        flat = flat[..., 1:]  # the only weight is 1 always
    return Posterior(values, float(split_r_hat(flat).max()), float(effective_sample_size(flat).min()))


def ordered(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same draws (..., K, ...) with their components in the order of their means' first coordinate."""
    order = values["means"][..., 0].argsort(-1)
    axis = order.dim() - 1

    def rows(value: Tensor) -> Tensor:
        index = order.reshape(*order.shape, *[1] * (value.dim() - order.dim()))
        return value.gather(axis, index.expand_as(value))

    return {name: rows(value) for name, value in values.items()}


def draw_labels(x: Array, state: Parameters, rng: np.random.Generator) -> NDArray[np.int64]:
    """Each record's component (c, n), P(z = k) proportional to pi_k N(x; mu_k, Sigma_k); x is (c, n, d)."""
    inverse = np.linalg.inv(state.roots)
    score = np.log(state.weights)[:, None] + np.linalg.slogdet(inverse)[1][:, None]
    white = x[:, None] @ inverse.mT - (inverse @ state.means[..., None]).mT
    score = score - 0.5 * np.square(white).sum(-1).swapaxes(1, 2)
    return np.asarray((score + rng.gumbel(size=score.shape)).argmax(-1))


def draw_parameters(
    x: Array, labels: NDArray[np.int64], model: GaussianMixture, rng: np.random.Generator
) -> Parameters:
    """Weights from their Dirichlet and components from their normal-inverse-Wishart, given labels (c, n)."""
    own = labels[..., None] == np.arange(model.components)
    counts = own.sum(1)
    gamma = np.maximum(rng.standard_gamma(model.concentration + counts), 1e-300)
    sums = own.mT.astype(float) @ x
    squares = np.stack([(x * own[..., k : k + 1]).mT @ x for k in range(model.components)], 1)
    d, kappa, m = model.dimensions, model.mean_precision + counts, model.mean
    centre = (model.mean_precision * m + sums) / kappa[..., None]
    scale = model.scale * np.eye(d) + model.mean_precision * m**2 * np.ones((d, d)) + squares
    scale -= kappa[..., None, None] * centre[..., None] * centre[..., None, :]
    roots = _inverse_wishart_root(model.dof + counts, scale, rng)
    noise = rng.standard_normal((*centre.shape, 1)) / np.sqrt(kappa)[..., None, None]
    return Parameters(gamma / gamma.sum(-1, keepdims=True), centre + (roots @ noise)[..., 0], roots)


def seeded(x: Array, components: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Labels (c, n) by the nearest of K records that are drawn far apart (k-means++; Arthur and Vassilvitskii 2007)."""
    chains, n, _ = x.shape
    far = np.ones((chains, n))
    distances = []
    for _ in range(components):
        chosen = (np.log(np.maximum(far, 1e-300)) + rng.gumbel(size=far.shape)).argmax(1)
        distances.append(np.square(x - x[np.arange(chains), chosen][:, None]).sum(-1))
        far = np.min(distances, 0)
    return np.argmin(distances, 0)


def _inverse_wishart_root(dof: Array, scale: Array, rng: np.random.Generator) -> Array:
    """R = L A^-T, scale = L L^T, A A^T ~ Wishart(dof, I) by Bartlett: R R^T ~ InverseWishart(dof, scale)."""
    d = scale.shape[-1]
    bartlett = np.tril(rng.standard_normal(scale.shape), -1)
    bartlett[..., np.arange(d), np.arange(d)] = np.sqrt(rng.chisquare(dof[..., None] - np.arange(d)))
    return np.asarray(np.linalg.solve(bartlett, np.linalg.cholesky(scale).mT).mT)
