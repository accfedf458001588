"""The Gibbs sampler against closed forms, against a sum over all labels, and against the prior it must leave alone."""

import importlib
import itertools
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.special import gammaln, multigammaln

from lit_epgan.likelihood_free.simulator import GaussianMixture
from tests.processes import ROOT


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("exact_mixture")


Array = NDArray[np.float64]


def niw(x: Array, model: GaussianMixture) -> tuple[float, float, Array, Array]:
    """kappa, nu, m and S of one component's posterior, written about the data's mean (Gelman et al. 2013, 3.6)."""
    n, d = x.shape
    away = x.mean(0) - model.mean if n else np.zeros(d)
    kappa, nu = model.mean_precision + n, model.dof + n
    scatter = (x - x.mean(0)).T @ (x - x.mean(0)) if n else np.zeros((d, d))
    pull = model.mean_precision * n / kappa
    return kappa, nu, model.mean + n / kappa * away, model.scale * np.eye(d) + scatter + pull * np.outer(away, away)


def test_one_component_has_the_closed_posterior(exact: ModuleType) -> None:
    model = GaussianMixture(1, 2, mean=1.0, mean_precision=0.5, dof=5.0, scale=2.0)
    x = np.random.default_rng(1).normal([2.0, -1.0], [1.0, 3.0], (12, 2))
    found = exact.gibbs(torch.from_numpy(x), model, chains=4, draws=2000, burn_in=0).pooled()
    kappa, nu, m, s = niw(x, model)
    for j in range(2):
        t = stats.t(nu - 1, m[j], math.sqrt(s[j, j] / (kappa * (nu - 1))))
        assert stats.kstest(found["means"][:, 0, j], t.cdf).pvalue > 0.001
        inverse_gamma = stats.invgamma((nu - 1) / 2, scale=s[j, j] / 2)
        assert stats.kstest(found["covariances"][:, 0, j, j], inverse_gamma.cdf).pvalue > 0.001
    np.testing.assert_allclose(found["covariances"][:, 0].mean(0), s / (nu - 3), atol=0.15)


def log_evidence(x: Array, model: GaussianMixture) -> float:
    """log p(x) of one component's records, but for a constant in n (Murphy 2007, equation 266)."""
    kappa, nu, _, s = niw(x, model)
    d = model.dimensions
    return float(multigammaln(nu / 2, d) - nu / 2 * np.linalg.slogdet(s)[1] - d / 2 * math.log(kappa))


def test_two_components_agree_with_the_sum_over_all_labels(exact: ModuleType) -> None:
    model = GaussianMixture(2, 1, concentration=1.5, mean=0.5, mean_precision=0.2, scale=0.7)
    x = np.array([[-1.2], [-0.7], [0.1], [0.9], [1.0], [2.4]])
    log_p, centre, squares = [], [], []
    for labels in itertools.product([0, 1], repeat=6):
        own = [x[np.array(labels) == k] for k in (0, 1)]
        a = np.array([model.concentration + len(each) for each in own])
        log_p.append(gammaln(a).sum() + sum(log_evidence(each, model) for each in own))
        centre.append(sum(a[k] / a.sum() * niw(own[k], model)[2][0] for k in (0, 1)))
        squares.append((a * (a + 1)).sum() / (a.sum() * (a.sum() + 1)))
    p = np.exp(np.array(log_p) - max(log_p))
    p /= p.sum()
    found = exact.gibbs(torch.from_numpy(x), model, chains=200, draws=200, burn_in=50).pooled()
    weights, means = found["weights"], found["means"][..., 0]
    assert float((weights * means).sum(1).mean()) == pytest.approx(p @ centre, abs=0.01)
    assert float(weights.square().sum(1).mean()) == pytest.approx(p @ squares, abs=0.003)


def test_sweeps_and_new_data_in_turn_leave_the_simulators_prior_as_it_is(exact: ModuleType) -> None:
    """Geweke 2004: theta from the prior, then data | theta and theta | data in turn; theta is still from the prior."""
    model = GaussianMixture(2, 2, concentration=0.7, mean=1.0, mean_precision=0.5, dof=6.0, scale=1.5)
    chains, n, rng = 3000, 20, np.random.default_rng(2)
    prior = model.values(model.prior(chains, torch.Generator().manual_seed(3)))
    state = exact.draw_parameters(np.zeros((chains, 0, 2)), np.zeros((chains, 0), int), model, rng)
    for sweep in range(31):
        now = {"weights": state.weights, "means": state.means, "covariances": state.covariances()}
        if sweep in (0, 30):
            for mine, other in zip(functions(now), functions({k: v.numpy() for k, v in prior.items()}), strict=True):
                assert stats.ks_2samp(mine, other).pvalue > 0.001
        labels = (rng.random((chains, n, 1)) > state.weights.cumsum(-1)[:, None]).sum(-1).clip(max=1)
        rows = np.arange(chains)[:, None]
        noise = rng.standard_normal((chains, n, 2, 1))
        x = state.means[rows, labels] + (state.roots[rows, labels] @ noise)[..., 0]
        state = exact.draw_parameters(x, exact.draw_labels(x, state, rng), model, rng)


def functions(values: dict[str, Array]) -> list[Array]:
    """What is compared: parameters, and how those of a draw go together."""
    weights, means, covariances = values["weights"], values["means"], values["covariances"]
    apart = means[:, 0] - means[:, 1]
    log_det = np.linalg.slogdet(covariances)[1]
    return [
        weights[:, 0],
        means[:, 0, 1],
        covariances[:, 1, 0, 0],
        covariances[:, 1, 0, 1],
        np.linalg.norm(apart, axis=-1),
        log_det.sum(1),
        (weights[:, 0] - weights[:, 1]) * (log_det[:, 0] - log_det[:, 1]),
        ((means - 1.0) ** 2).sum((1, 2)),
    ]


def test_three_components_are_found_by_every_chain_and_named_alike(exact: ModuleType) -> None:
    rng = np.random.default_rng(5)
    centres = np.array([[-9.0, 3.0], [0.0, -9.0], [8.0, 3.0]])
    x = torch.from_numpy(np.concatenate([rng.normal(c, 1.0, (60, 2)) for c in centres]))
    found = exact.gibbs(x, GaussianMixture(), chains=4, draws=300, burn_in=50)
    assert found.r_hat < 1.02
    assert found.effective > 600
    np.testing.assert_allclose(found.pooled()["means"].mean(0), centres, atol=0.4)


def test_a_draws_components_are_ordered_together(exact: ModuleType) -> None:
    values = {"weights": torch.tensor([[0.1, 0.9]]), "means": torch.tensor([[[2.0, 5.0], [1.0, 6.0]]])}
    found = exact.ordered(values)
    assert found["weights"].tolist() == [[pytest.approx(0.9), pytest.approx(0.1)]]
    assert found["means"].tolist() == [[[1.0, 6.0], [2.0, 5.0]]]


@pytest.fixture
def diagnostics(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("chain_diagnostics")


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9, -0.5])
def test_an_autoregression_is_worth_what_theory_says(diagnostics: ModuleType, rho: float) -> None:
    """Of x' = rho x + noise, N draws are worth N (1 - rho) / (1 + rho)."""
    rng = np.random.default_rng(6)
    chains = np.empty((4, 5000, 3))
    chains[:, 0] = rng.standard_normal((4, 3)) / math.sqrt(1 - rho**2)
    for t in range(1, 5000):
        chains[:, t] = rho * chains[:, t - 1] + rng.standard_normal((4, 3))
    effective = diagnostics.effective_sample_size(chains)
    np.testing.assert_allclose(effective, 20_000 * (1 - rho) / (1 + rho), rtol=0.15)
    assert diagnostics.split_r_hat(chains).max() < 1.01


def test_chains_apart_or_adrift_are_told(diagnostics: ModuleType) -> None:
    chains = np.random.default_rng(7).standard_normal((4, 1000, 1))
    apart = chains + np.array([0.0, 0.0, 0.0, 1.0])[:, None, None]
    adrift = chains + np.linspace(0, 2, 1000)[:, None]
    assert diagnostics.split_r_hat(apart)[0] > 1.05
    assert diagnostics.split_r_hat(adrift)[0] > 1.05
    assert diagnostics.effective_sample_size(apart)[0] < 100
