"""Gaussian factors as they are kept and sent: q by the server, a site by each client; both in natural parameters."""

from collections.abc import Mapping

from torch import Tensor

from lit_epgan.bayes.gaussian import GaussianFactor


def tensors_of(factor: GaussianFactor, prefix: str = "") -> dict[str, Tensor]:
    """A factor's tensors by name, for a state or a broadcast; ``prefix``: of the names."""
    return {f"{prefix}precision": factor.precision, f"{prefix}precision_mean": factor.precision_mean}


def factor_of(tensors: Mapping[str, Tensor], prefix: str = "") -> GaussianFactor:
    """The diagonal factor that ``tensors_of`` has put into a state or a broadcast."""
    return GaussianFactor(tensors[f"{prefix}precision"], tensors[f"{prefix}precision_mean"])


def own_site(state: Mapping[str, Tensor], like: Tensor, prefix: str = "") -> GaussianFactor:
    """A client's site in its state, in the precision of ``like`` and where that is; uniform before its first report."""
    if f"{prefix}precision" not in state:
        return GaussianFactor.uniform(like)
    kept = factor_of(state, prefix)
    return GaussianFactor(kept.precision.to(like), kept.precision_mean.to(like))
