"""q = p0 prod_k g_k with a Gaussian site of each client: who keeps which factor, and how they travel."""

from collections.abc import Mapping

from torch import Tensor

from lit_epgan.engine import Broadcast, Report, Total
from lit_epgan.inference.gaussian import GaussianFactor


class GaussianSites:
    """The server keeps q, every client its own site factor; sites travel as changes, which sum.

    An absent client's site stays in the product, for only changes are sent. All tensors are natural parameters.

    Args:
        prefix: of the tensors' names, in messages and in states.
        factor: the family: diagonal, or with a full precision matrix.
    """

    def __init__(self, prefix: str = "", factor: type[GaussianFactor] = GaussianFactor) -> None:
        self._factor = factor
        self.precision, self.precision_mean = f"{prefix}precision", f"{prefix}precision_mean"

    def start(self, state: dict[str, Tensor], prior: GaussianFactor) -> None:
        """q = p0, unless the server's ``state`` has a q."""
        if self.precision not in state:
            state[self.precision], state[self.precision_mean] = prior.precision, prior.precision_mean

    def of(self, tensors: Mapping[str, Tensor]) -> GaussianFactor:
        """The factor in a state, a broadcast or a report: q from the server's, its own from a client's."""
        return self._factor(tensors[self.precision], tensors[self.precision_mean])

    def own(self, state: Mapping[str, Tensor], like: Tensor) -> GaussianFactor:
        """A client's site, in the precision of ``like``; uniform before its first report."""
        if self.precision not in state:
            return self._factor.uniform(like)
        return self._factor(state[self.precision].to(like), state[self.precision_mean].to(like))

    def known(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a client has a site already."""
        return self.precision in state

    def keep(self, state: dict[str, Tensor], site: GaussianFactor) -> None:
        """Make ``site`` the client's."""
        state[self.precision], state[self.precision_mean] = site.precision, site.precision_mean

    def broadcast(self, state: Mapping[str, Tensor]) -> Broadcast:
        """q as it is sent."""
        return {name: state[name] for name in (self.precision, self.precision_mean)}

    def report(self, factor: GaussianFactor) -> Report:
        """A factor, or a change of one, as it is sent."""
        return {self.precision: factor.precision, self.precision_mean: factor.precision_mean}

    def update(self, state: dict[str, Tensor], total: Total) -> None:
        """q <- q prod_k (change of g_k), in place."""
        for name in (self.precision, self.precision_mean):
            state[name] += total[name].view_as(state[name])
