"""A simulator: a model that data can be drawn from, with a prior, and nothing else: no likelihood and no gradient."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import Distribution, Transform, biject_to

from lit_epgan.errors import UserError
from lit_epgan.randomness import isolated


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

    Raises:
        UserError: there is no parameter, or one that is discrete.
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
        """n draws theta (n, p) from the prior."""
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
        """``records`` of each row's parameters."""
        return self.records(self.values(theta), records, generator)

    def values(self, theta: Tensor) -> dict[str, Tensor]:
        """The parameters by name."""
        return {name: self._maps[name](part) for name, part in self._parts(theta).items()}

    def _parts(self, theta: Tensor) -> dict[str, Tensor]:
        parts = theta.split([shape.numel() for shape in self._shapes.values()], 1)
        return {n: part.reshape(-1, *shape) for (n, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _to_the_line(name: str, prior: Distribution) -> Transform:
    """From unconstrained coordinates to the prior's support.

    Raises:
        UserError: the support is discrete.
    """
    try:
        return biject_to(prior.support)
    except NotImplementedError as error:
        raise UserError(f"the prior of {name!r} is {type(prior).__name__}, whose support cannot be mapped to the real "
                        "line: take a continuous distribution") from error  # fmt: skip
