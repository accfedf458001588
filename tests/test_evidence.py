"""What was measured once still runs: evidence and benchmarks at their smallest, and what their numbers rest on."""

import contextlib
import gc
import importlib
import itertools
import logging
import math
import multiprocessing
import multiprocessing.spawn
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.special import gammaln, multigammaln
from torch import Tensor

from evidence import chain_diagnostics, claims, detection, exact_mixture, full_product, one_run_audit, same_model
from lit_epgan.bayes.simulator import GaussianMixture
from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import Run, cli_command, runs_of
from lit_epgan.engine import Algorithm
from lit_epgan.federated import EmbeddingSites, ExpectationPropagation, GeneratorSites
from tests.federations import federation, fit
from tests.modules import Regression
from tests.parsed import Parsed
from tests.processes import ROOT
from tests.test_embedding_sites import FAST, Cloud, data, nearest

SCRIPTS = sorted(path.stem for path in (ROOT / "evidence").glob("*.py") if "__main__" in path.read_text())
STUDIES = sorted((ROOT / "evidence" / "studies").glob("*.yaml"))
CHEAP = {
    "claims": ["--studies", "graffl_boost"],
    "correlated_noise": ["--rounds", "6", "--groups", "3"],
    "canary_audit": ["--canaries", "20", "--guesses", "10", "--times", "2", "--groups", "2", "--seeds", "1"],
    "generator_posteriors": [
        *("--seeds", "300", "--tuning", "300", "--temperatures", "1e-3", "--samples", "100"),
        *("--fit", "trainer.max_epochs=2", "data.warmup_steps=2", "data.local_steps=1"),
    ],
    "federating_pays": ["--picture", "picture.png"],
    "real_images": ["--seeds", "300"],
    "tilted_moments": ["--elements", "2000", "--repeats", "1"],
    "sru": ["--width", "8", "--batch", "4", "--frames", "3", "--repeats", "1"],
    "lite0_batches": ["--images", "4", "--batches", "2", "4", "--repeats", "1"],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(folder, name, monkeypatch, capsys):
    """The cheap ones write their tables; the others are imported, with all that they need of the package."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    words = [*CHEAP[name], "--output", "table.md"] if name in CHEAP else ["--help"]
    monkeypatch.setattr(sys, "argv", [name, *words])
    threads = torch.get_num_threads()
    with contextlib.nullcontext() if name in CHEAP else pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(f"evidence.{name}", run_name="__main__")
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert (Path("table.md").read_text() if name in CHEAP else "--output") in printed


@pytest.fixture(scope="module")
def parsed():
    return Parsed()


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_is_accepted(path, tmp_path, parsed, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "evidence"))  # of ablations.yaml
    plans = read_studies(path)
    assert all(runs_of(plan, tmp_path) for plan in plans)
    for plan in plans:
        assert parsed.fit(cli_command(Run(plan.trained[-1], 0, tmp_path))[4:]).model


def test_claims_are_the_tables_and_detection_ends():
    home = claims.Side("many", "fedavg", "accuracy")
    assert claims.side("digits:/union", home) == ("digits:", "union", "accuracy")
    sides = [tuple(claims.side(text, home)) for text in ("ep", "few/ep", "/ep/rounds", "few/ep/rounds")]
    assert sides[0] == ("many", "ep", "accuracy")
    assert sides[1:] == [("few", "ep", "accuracy"), ("many", "ep", "rounds"), ("few", "ep", "rounds")]
    # at epsilon 2 half of 50 users are found by chance, 100 are not: the fewest are 200
    powers = {(200, 0.5, 1.0): 0.5, (200, 0.1, 1.0): 0.99, (100, 0.5, 1.0): 0.99, (50, 0.5, 1.0): 0.99}
    powers |= {(200, 0.5, 2.0): 0.99, (200, 0.1, 2.0): 0.96, (100, 0.5, 2.0): 0.9, (50, 0.5, 2.0): 0.99}
    lines = [line for line in detection.least(powers, 0.5).splitlines() if line.startswith("| ")]
    assert lines == ["| epsilon | 1 | 2 |", "| smallest share | none | 0.1 |", "| fewest users | none | 200 |"]


def test_claims_stand_in_two_families():
    """Holm's correction of two comparisons with the baseline, and of one pair alone; columns are paired."""
    home = claims.Side("", "base", "x")
    of, other = home._replace(method="a"), home._replace(method="b")
    runs = {home: {0: 1.0, 1: 1.2, 2: 1.1}, of: {0: 2.0, 1: 2.3, 2: 2.1}, other: {0: 1.0, 1: 1.3, 2: 1.1}}
    runs[home._replace(column="y")] = {0: 1.5, 1: 1.7, 2: 1.7}
    first, second = claims.lines("welch", runs, [(of, home), (other, home)], home)
    p = stats.ttest_ind([2.0, 2.3, 2.1], [1.0, 1.2, 1.1], equal_var=False).pvalue
    assert first[5:7] == ["< 0.001" if each < 1e-3 else f"{each:.2g}" for each in (p, 2 * p)]
    assert second[5] == second[6]
    ((*_, alone, corrected, _),) = claims.lines("welch", runs, [(home._replace(column="y"), home)], home)
    assert alone == corrected == f"{stats.ttest_rel([1.5, 1.7, 1.7], [1.0, 1.2, 1.1]).pvalue:.2g}"


Array = NDArray[np.float64]


def niw(x: Array, model: GaussianMixture) -> tuple[float, float, Array, Array]:
    """kappa, nu, m and S of one component's posterior, written about the data's mean (Gelman et al. 2013, 3.6)."""
    n, d = x.shape
    away = x.mean(0) - model.mean if n else np.zeros(d)
    kappa, nu = model.mean_precision + n, model.dof + n
    scatter = (x - x.mean(0)).T @ (x - x.mean(0)) if n else np.zeros((d, d))
    pull = model.mean_precision * n / kappa
    return kappa, nu, model.mean + n / kappa * away, model.scale * np.eye(d) + scatter + pull * np.outer(away, away)


def test_one_component_has_the_closed_posterior():
    model = GaussianMixture(1, 2, mean=1.0, mean_precision=0.5, dof=5.0, scale=2.0)
    x = np.random.default_rng(1).normal([2.0, -1.0], [1.0, 3.0], (12, 2))
    found = exact_mixture.gibbs(torch.from_numpy(x), model, chains=4, draws=2000, burn_in=0).pooled()
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


def test_two_components_agree_with_the_sum_over_all_labels():
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
    found = exact_mixture.gibbs(torch.from_numpy(x), model, chains=200, draws=200, burn_in=50).pooled()
    weights, means = found["weights"], found["means"][..., 0]
    assert float((weights * means).sum(1).mean()) == pytest.approx(p @ centre, abs=0.01)
    assert float(weights.square().sum(1).mean()) == pytest.approx(p @ squares, abs=0.003)


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9, -0.5])
def test_an_autoregression_is_worth_what_theory_says(rho):
    """Of x' = rho x + noise, N draws are worth N (1 - rho) / (1 + rho)."""
    rng = np.random.default_rng(6)
    chains = np.empty((4, 5000, 3))
    chains[:, 0] = rng.standard_normal((4, 3)) / math.sqrt(1 - rho**2)
    for t in range(1, 5000):
        chains[:, t] = rho * chains[:, t - 1] + rng.standard_normal((4, 3))
    effective = chain_diagnostics.effective_sample_size(chains)
    np.testing.assert_allclose(effective, 20_000 * (1 - rho) / (1 + rho), rtol=0.15)
    assert chain_diagnostics.split_r_hat(chains).max() < 1.01


def test_chains_apart_or_adrift_are_told():
    chains = np.random.default_rng(7).standard_normal((4, 1000, 1))
    apart = chains + np.array([0.0, 0.0, 0.0, 1.0])[:, None, None]
    adrift = chains + np.linspace(0, 2, 1000)[:, None]
    assert chain_diagnostics.split_r_hat(apart)[0] > 1.05
    assert chain_diagnostics.split_r_hat(adrift)[0] > 1.05
    assert chain_diagnostics.effective_sample_size(apart)[0] < 100


def at_least(correct: int, guesses: int, chance: float) -> float:
    """By all outcomes of so many guesses, each right with the same chance."""
    outcomes = itertools.product([0, 1], repeat=guesses)
    return sum(chance ** sum(o) * (1 - chance) ** (guesses - sum(o)) for o in outcomes if sum(o) >= correct)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("delta", [0.0, 0.01])
def test_the_p_value_is_the_papers(epsilon, delta):
    q, canaries = 1 / (1 + math.exp(-epsilon)), 9
    for correct in range(9):
        beta = at_least(correct, 8, q)
        more = [(at_least(correct - i, 8, q) - beta) / i for i in range(1, correct + 1)]
        expected = min(1.0, beta + 2 * canaries * delta * max(more, default=0.0))
        assert one_run_audit.p_value(8, correct, canaries, epsilon, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.3, 1.5])
def test_what_is_private_is_not_refuted_more_often_than_the_p_value_says(epsilon):
    """Randomised response that gives each canary away with probability delta, and one that gives all away at once."""
    q, delta = 1 / (1 + math.exp(-epsilon)), 0.02
    for correct in range(9):
        p = one_run_audit.p_value(8, correct, 8, epsilon, delta)
        assert at_least(correct, 8, delta + (1 - delta) * q) <= p * (1 + 1e-12)
        assert delta + (1 - delta) * at_least(correct, 8, q) <= p * (1 + 1e-12)


def test_the_lower_bound_is_where_the_p_value_passes_the_confidence():
    bound = one_run_audit.lower_bound(100, 90, 500, 1e-5)
    before, after = (one_run_audit.p_value(100, 90, 500, at, 1e-5) for at in (bound, bound + 2e-3))
    assert before < 0.05 < after
    assert one_run_audit.lower_bound(100, 52, 500, 1e-5) == pytest.approx(0, abs=2e-3)
    assert one_run_audit.lower_bound(200, 200, 500, 0.0) == pytest.approx(-math.log(0.05 ** (-1 / 200) - 1), abs=2e-3)
    expected = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([1e-3]), "none": torch.zeros(0)}
    found = {"a": torch.tensor([1.5, -4.0]), "b": torch.tensor([1.1e-3]), "none": torch.zeros(0)}
    assert same_model.difference(found, expected) == pytest.approx(0.5 / 4)
    assert not same_model.met([0.0, same_model.difference({}, expected)])


def alone(algorithm: Algorithm) -> Tensor:
    torch.manual_seed(0)
    module = Regression()
    fit(module, federation(sizes=(40,)), rounds=3, algorithm=algorithm)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_with_the_own_site_in_the_product_a_client_sees_itself():
    """The product of nobody's sites pulls nowhere; the product of all sites is the client's own."""
    free = alone(ExpectationPropagation(prior_scale=0.0))
    assert torch.equal(alone(ExpectationPropagation(prior_scale=300.0)), free)
    assert torch.equal(alone(full_product.FullExpectationPropagation(prior_scale=0.0)), free)
    assert not torch.allclose(alone(full_product.FullExpectationPropagation(prior_scale=300.0)), free, atol=1e-3)
    # nothing, or as much as it has of all records: 40, 60 and 100 of 200
    shares = pytest.approx([0.2, 0.3, 0.5], abs=0.12)
    assert max(of_its_own(GeneratorSites("generator", own_rows=4))) < 0.02
    assert of_its_own(full_product.FullGeneratorSites("generator", own_rows=4)) == shares
    assert max(of_its_own(EmbeddingSites(own_rows=4, **FAST))) < 0.05  # weights of herded points
    assert of_its_own(full_product.FullEmbeddingSites(own_rows=4, **FAST)) == shares


def of_its_own(algorithm: Algorithm) -> list[float]:
    module = Cloud()
    fit(module, data(), rounds=2, algorithm=algorithm)
    seen = [s for s in module.seen if s.round == 1]
    names = sorted({s.client for s in seen})
    rows = [nearest(torch.cat([s.x[4:] for s in seen if s.client == name])) for name in names]
    return [float((each == k).double().mean()) for k, each in enumerate(rows)]


SMALL = {
    "complexity.py": [],
    "frozen_backbone.py": ["--frozen", "1", "--rounds", "2", "--repeats", "1"],
    "local_step.py": ["--steps", "10", "--repeats", "1"],
    "simulations.py": [
        *("--models", "MLP 3k", "--clients", "10", "--rounds", "2", "--repeats", "1"),
        *("--simulators", "plain driver", "plain driver, vectorized"),
    ],
    "start_up.py": ["--commands", "2", "--repeats", "1"],
    "scale.py": ["--clients", "20", "--cohort", "4", "--width", "10", "--rounds", "3"],
    "institution_costs.py": ["--small", "--reports", "2", "--algorithms", "tied EP"],
    "half_messages.py": ["--seeds", "1", "--rounds", "1", "--algorithms", "FedAvg"],
    "many_clients.py": ["--clients", "10", "--rounds", "3"],
    "speech.py": ["--minutes", "0.2", "--words", "8", "--hidden", "8", "--steps", "2"],
    "killed_institutions.py": ["--rounds", "5", "--institutions", "3", "--steps", "2"],
    "private_peers.py": ["--seeds", "2"],
    "kills.py": ["--kills", "1", "--two-ranks", "0", "--rounds", "2", "--configurations", "1"],
    "private_kills.py": ["--kills", "1", "--kinds", "1", "--rounds", "2"],
    "gpu_simulation.py": [
        *("--device", "cpu", "--models", "MLP 3k", "--clients", "100", "--rounds", "2", "--repeats", "1")
    ],
    "gpu.py": [
        *("--width", "4", "--batch", "2", "--generators", "2", "--heads", "1", "--steps", "2", "--clients", "1"),
        *("--accelerator", "cpu"),
    ],
    "ep_step.py": [
        *("--width", "4", "--batch", "2", "--steps", "4", "--repeats", "1", "--generators", "1", "--heads", "1"),
        *("--objective", "lsgan"),
    ],
}
SHORT = {"private_task": {"EPOCHS": 1, "RECORDS": 256, "ROUNDS": 2, "WRITERS": 8, "COHORT": 4}}  # what no option says


def test_every_script_is_tried_and_time_counted_once(monkeypatch):
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    # what test_configs.py runs; what private_kills.py starts; what takes minutes, as a federation of test_kits.py does
    assert scripts - {"digests.py", "observed.py", "institution_faults.py"} == set(SMALL)
    # of two streams, one within the other's kernel, one across its end, and one apart
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    covered = importlib.import_module("gpu").covered
    assert covered([(5.0, 6.0), (0.0, 2.0), (0.5, 1.0), (1.5, 3.0)]) == 4.0
    assert covered([]) == 0


@pytest.fixture
def undisturbed():
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pfl")]
    levels, environment = [own.level for own in loggers], dict(os.environ)
    threads, modules = torch.get_num_threads(), {*sys.modules}
    yield
    gc.unfreeze()
    for own, level in zip(loggers, levels, strict=True):
        own.setLevel(level)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(folder, tmp_path, monkeypatch, capsys, name):
    table = tmp_path / "table.md"
    script = ROOT / "benchmarks" / name
    monkeypatch.syspath_prepend(str(script.parent))
    for module, constants in SHORT.items():
        for constant, value in constants.items():
            monkeypatch.setattr(importlib.import_module(module), constant, value)
    if "multiprocessing" in script.read_text():  # imports take most of its time: its processes are forks of this one
        forks = multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
        gc.freeze()  # what is here already is no garbage of theirs
    # nor does what the package starts import the script first
    prepared = multiprocessing.spawn.get_preparation_data
    monkeypatch.setattr(
        "multiprocessing.spawn.get_preparation_data",
        lambda name: {key: value for key, value in prepared(name).items() if key != "init_main_from_path"},
    )
    monkeypatch.setattr(sys, "argv", [str(script), *SMALL[name], "--output", str(table)])
    runpy.run_path(str(script), run_name="__main__")
    assert table.read_text() in capsys.readouterr().out
