"""Epsilons against two other accountants, where the conventions agree: users by coins, one added or removed.

Whoever is added or removed moves the sum by S, as one does who is emptied.
"""

import functools

import pytest

from lit_epgan.privacy import Releases, spent

pytestmark = pytest.mark.slow

DELTA = 1e-5
SETTINGS = [(1.0, 0.1, 10), (2.0, 0.05, 500)]  # z, the probability, releases


@functools.cache
def by_coins(z: float, rate: float, count: int) -> float:
    return spent([Releases(z, count, "poisson", rate)], DELTA).epsilon


@pytest.mark.parametrize(("z", "rate", "count"), SETTINGS)
def test_prv_accountant(z: float, rate: float, count: int) -> None:
    """Gopi, Lee and Wutschitz 2021: its bounds hold ours between them, and its estimate is ours."""
    prv = pytest.importorskip("prv_accountant", reason="pip install prv-accountant")
    mechanism = prv.PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=rate)
    accountant = prv.PRVAccountant(
        prvs=[mechanism], max_self_compositions=[count], eps_error=0.01, delta_error=DELTA / 1000
    )
    lower, estimate, upper = accountant.compute_epsilon(DELTA, num_self_compositions=[count])
    ours = by_coins(z, rate, count)
    assert lower < ours < upper
    assert ours == pytest.approx(estimate, abs=1e-3)


@pytest.mark.parametrize(("z", "rate", "count"), SETTINGS)
def test_opacus(z: float, rate: float, count: int) -> None:
    """Ours are at most what either of its accountants says; its bound by Renyi divergences is the looser one."""
    accountants = pytest.importorskip("opacus.accountants", reason="pip install opacus")
    by_losses, by_renyi = accountants.PRVAccountant(), accountants.RDPAccountant()
    by_losses.history = by_renyi.history = [(z, rate, count)]
    ours = by_coins(z, rate, count)
    assert ours == pytest.approx(by_losses.get_epsilon(DELTA, eps_error=0.01), abs=0.011)
    assert ours < by_renyi.get_epsilon(DELTA) < 1.25 * ours


def test_everyone_costs_less_than_by_renyi_divergences() -> None:
    """The exact epsilon of the Gaussian mechanism, against Opacus's bound on it."""
    by_renyi = pytest.importorskip("opacus.accountants", reason="pip install opacus").RDPAccountant()
    by_renyi.history = [(5.0, 1.0, 20)]
    ours = spent([Releases(5.0, 20)], DELTA).epsilon
    assert ours < by_renyi.get_epsilon(DELTA) < 1.1 * ours
