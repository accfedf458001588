"""Simulators: models that data can be drawn from, with a prior, and nothing else: no likelihood and no gradient."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Transform, biject_to

from lit_epgan.lib.bounds import at_least, within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import isolated

MOST_COMPONENTS = 6  # 720 ways to name them


class Simulator(ABC):
    """What inference without likelihoods knows of a model.

    Parameters are rows of unconstrained coordinates, float64 (n, size), so that proposals may move them anywhere.

    Attributes:
        size: p, the number of coordinates.
        dimensions: d, of a record.
    """

    size: int
    dimensions: int

    @abstractmethod
    def prior(self, n: int, generator: torch.Generator) -> Tensor:
        """n draws theta (n, p) from the prior."""

    @abstractmethod
    def log_prior(self, theta: Tensor) -> Tensor:
        """The log density (n,) of the prior at theta (n, p), in these coordinates."""

    @abstractmethod
    def simulate(self, theta: Tensor, records: int, generator: torch.Generator) -> Tensor:
        """For each row of theta (n, p) a data set: float32 (n, records, d). Its records are independent."""

    @abstractmethod
    def values(self, theta: Tensor) -> dict[str, Tensor]:
        """The parameters in their own units, by name, each (n, ...), of theta (n, p)."""

    def symmetries(self) -> Tensor:
        """Permutations (S, p), int64, of the coordinates that leave the model as it is; the first changes nothing."""
        return torch.arange(self.size)[None]


class Independent(Simulator):
    """A simulator with independent priors: a subclass gives ``records``, and is complete.

    Args:
        priors: by a parameter's name, its distribution; a number or a vector of any support that torch can map to the
            real line: ``{"rate": Gamma(2.0, 1.0), "share": Beta(1.0, 1.0)}``.
        dimensions: d, of a record.
    """

    def __init__(self, priors: Mapping[str, Distribution], dimensions: int) -> None:
        if not priors:
            raise UserError(f"{type(self).__name__} has no parameter: give at least one prior")
        self.priors, self.dimensions = dict(priors), dimensions
        self._maps = {name: _to_the_line(name, p) for name, p in priors.items()}
        with isolated():
            self._shapes = {name: self._maps[name].inv(p.sample()).shape for name, p in priors.items()}
        self.size = sum(shape.numel() for shape in self._shapes.values())

    @abstractmethod
    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        """Data sets (n, records, d) for parameters by name, each (n, ...)."""

    def prior(self, n: int, generator: torch.Generator) -> Tensor:
        with isolated():  # torch's distributions draw from the global stream alone
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            drawn = {name: p.sample((n,)).double() for name, p in self.priors.items()}
        return torch.cat([self._maps[name].inv(value).reshape(n, -1) for name, value in drawn.items()], 1)

    def log_prior(self, theta: Tensor) -> Tensor:
        """log p(value) + log |d value / d theta|, summed over the parameters: (n,)."""
        total = theta.new_zeros(len(theta))
        for name, part in self._parts(theta).items():
            value = self._maps[name](part)
            jacobian = self._maps[name].log_abs_det_jacobian(part, value)
            total += (self.priors[name].log_prob(value).reshape(len(theta), -1).sum(1)
                      + jacobian.reshape(len(theta), -1).sum(1))  # fmt: skip
        return total

    def simulate(self, theta: Tensor, records: int, generator: torch.Generator) -> Tensor:
        return self.records(self.values(theta), records, generator)

    def values(self, theta: Tensor) -> dict[str, Tensor]:
        return {name: self._maps[name](part) for name, part in self._parts(theta).items()}

    def _parts(self, theta: Tensor) -> dict[str, Tensor]:
        parts = theta.split([shape.numel() for shape in self._shapes.values()], 1)
        return {n: part.reshape(-1, *shape) for (n, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _to_the_line(name: str, prior: Distribution) -> Transform:
    """From unconstrained coordinates to the prior's support."""
    try:
        return biject_to(prior.support)
    except NotImplementedError as error:
        raise UserError(f"the prior of {name!r} is {type(prior).__name__}, whose support cannot be mapped to the real "
                        "line: take a continuous distribution") from error  # fmt: skip


class GaussianMixture(Simulator):
    """p(x) = sum_k pi_k N(x; mu_k, Sigma_k), with the conjugate priors

        pi ~ Dirichlet(alpha, ..., alpha)
        Sigma_k ~ InverseWishart(nu, s I),   mu_k | Sigma_k ~ N(m, Sigma_k / kappa)

    A component's coordinates are (log gamma_k, mu_k, log diagonal of L_k, L_k below it), Sigma_k = L_k L_k^T and
    pi_k = gamma_k / sum gamma with gamma_k ~ Gamma(alpha, 1), which makes pi Dirichlet. So naming the components
    anew permutes coordinates, and the prior is a product over components.

    Args:
        components: K.
        dimensions: d.
        concentration: alpha.
        mean: m, of each coordinate.
        mean_precision: kappa; small, and the means are wide apart.
        dof: nu, above d - 1; by default d + 2, the least integer for which Sigma_k has a mean, s I / (nu - d - 1).
        scale: s.
    """

    def __init__(
        self,
        components: int = 3,
        dimensions: int = 2,
        concentration: float = 1.0,
        mean: float = 0.0,
        mean_precision: float = 0.01,
        dof: float | None = None,
        scale: float = 1.0,
    ) -> None:
        if not 1 <= components <= MOST_COMPONENTS:
            raise UserError(f"components is {components}; a mixture here has 1 to {MOST_COMPONENTS}, since all of "
                            "their orders are compared")  # fmt: skip
        at_least(1, self, dimensions=dimensions)
        dof = dimensions + 2.0 if dof is None else dof
        if not dof > dimensions - 1:
            raise UserError(f"dof is {dof}; an inverse Wishart of {dimensions} dimensions needs more than "
                            f"{dimensions - 1}")  # fmt: skip
        within("(0, inf)", self, concentration=concentration, mean_precision=mean_precision, scale=scale)
        self.components, self.dimensions = components, dimensions
        self.concentration, self.mean, self.mean_precision = concentration, mean, mean_precision
        self.dof, self.scale = dof, scale
        self._below = torch.tril_indices(dimensions, dimensions, -1)
        self._each = 1 + 2 * dimensions + self._below.shape[1]
        self.size = components * self._each

    def prior(self, n: int, generator: torch.Generator) -> Tensor:
        """n draws theta (n, p); covariances by Bartlett's decomposition of the Wishart distribution."""
        k, d = self.components, self.dimensions
        rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        gamma = torch.from_numpy(rng.standard_gamma(self.concentration, (n, k)))
        bartlett = torch.from_numpy(np.tril(rng.standard_normal((n, k, d, d)), -1))
        chi = torch.from_numpy(np.sqrt(rng.chisquare(self.dof - np.arange(d), (n, k, d))))
        root = (bartlett + torch.diag_embed(chi)) / math.sqrt(self.scale)  # of the precision
        inverse = torch.linalg.solve_triangular(root, torch.eye(d, dtype=root.dtype), upper=False)
        factor = torch.linalg.cholesky(inverse.mT @ inverse)
        noise = torch.from_numpy(rng.standard_normal((n, k, d, 1)))
        means = self.mean + (factor @ noise)[..., 0] / math.sqrt(self.mean_precision)
        return self.coordinates(gamma.clamp_min(1e-300), means, factor)

    def coordinates(self, weights: Tensor, means: Tensor, factor: Tensor) -> Tensor:
        """theta (n, p) of weights (n, K) up to a factor, means (n, K, d) and Cholesky factors (n, K, d, d)."""
        below = factor[..., self._below[0], self._below[1]]
        diagonal = factor.diagonal(dim1=-2, dim2=-1).log()
        return torch.cat([weights.log()[..., None], means, diagonal, below], -1).flatten(1)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Gamma, inverse Wishart and normal densities with the coordinates' Jacobians: (n,)."""
        d = self.dimensions
        log_gamma, means, factor = self._parts(theta)
        diagonal = factor.diagonal(dim1=-2, dim2=-1).log()
        weights = self.concentration * log_gamma - log_gamma.exp() - math.lgamma(self.concentration)
        inverse = torch.linalg.solve_triangular(factor, torch.eye(d, dtype=theta.dtype).expand_as(factor), upper=False)
        ones = torch.arange(1, d + 1, dtype=theta.dtype)
        wishart = (
            0.5 * self.dof * d * math.log(self.scale / 2)
            - float(torch.special.multigammaln(torch.tensor(0.5 * self.dof, dtype=torch.float64), d))
            - (self.dof + d + 1) * diagonal.sum(-1)
            - 0.5 * self.scale * inverse.square().sum((-2, -1))
            + d * math.log(2)
            + ((d + 2 - ones) * diagonal).sum(-1)
        )
        away = (inverse @ (means - self.mean)[..., None])[..., 0].square().sum(-1)
        normal = (
            0.5 * d * math.log(self.mean_precision / (2 * math.pi))
            - diagonal.sum(-1)
            - 0.5 * self.mean_precision * away
        )
        return (weights + wishart + normal).sum(-1)

    def simulate(self, theta: Tensor, records: int, generator: torch.Generator) -> Tensor:
        """Data sets (n, records, d), float32."""
        n, k, d = len(theta), self.components, self.dimensions
        log_gamma, means, factor = self._parts(theta)
        edges = log_gamma.softmax(-1).cumsum(-1)[:, :-1].float()
        uniform = torch.rand(n, records, generator=generator)
        own = torch.searchsorted(edges.contiguous(), uniform) + k * torch.arange(n)[:, None]
        noise = torch.randn(n, records, d, generator=generator)
        x = means.float().reshape(n * k, d)[own]
        roots = factor.float().reshape(n * k, d, d)
        for i in range(d):  # a column of L at a time: no (n, records, d, d)
            x[..., i:].addcmul_(roots[:, i:, i][own], noise[..., i : i + 1])
        return x

    def values(self, theta: Tensor) -> dict[str, Tensor]:
        """``weights`` (n, K), ``means`` (n, K, d), ``covariances`` (n, K, d, d)."""
        log_gamma, means, factor = self._parts(theta)
        return {"weights": log_gamma.softmax(-1), "means": means, "covariances": factor @ factor.mT}

    def symmetries(self) -> Tensor:
        """Every order of the components: (K!, p)."""
        blocks = torch.arange(self.size).reshape(self.components, self._each)
        return torch.stack([blocks[list(order)].flatten() for order in itertools.permutations(range(self.components))])

    def _parts(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log gamma (n, K), means (n, K, d) and Cholesky factors (n, K, d, d)."""
        d = self.dimensions
        blocks = theta.reshape(len(theta), self.components, self._each)
        log_gamma, means, diagonal, below = blocks.split([1, d, d, self._below.shape[1]], -1)
        factor = torch.diag_embed(diagonal.exp())
        factor[..., self._below[0], self._below[1]] = below
        return log_gamma[..., 0], means, factor
