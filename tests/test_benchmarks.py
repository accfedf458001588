"""Every benchmark runs, at a size that says nothing about speed, and writes its table."""

import importlib
import logging
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scipy import stats

from tests.processes import ROOT, run_words

pytestmark = pytest.mark.slow

SMALL = {
    "claims.py": ["--studies", "graffl_boost"],
    "frozen_backbone.py": ["--frozen", "1", "--rounds", "2", "--repeats", "1"],
    "canary_audit.py": ["--canaries", "20", "--guesses", "10", "--times", "2", "--groups", "2", "--seeds", "1"],
    "correlated_noise.py": ["--rounds", "6", "--groups", "3"],
    "client_switch.py": ["--sizes", "1", "--rounds", "1"],
    "local_step.py": ["--steps", "20", "--repeats", "1"],
    "simulations.py": [
        *("--models", "MLP 3k", "--clients", "10", "--rounds", "2", "--repeats", "1"),
        *("--simulators", "plain driver", "plain driver, vectorized"),
    ],
    "cost_curves.py": ["--small", "--seeds", "0", "--samples", "200", "--methods", "EP, generator sites (B)"],
    "start_up.py": ["--commands", "2", "--repeats", "1"],
    "scale.py": ["--clients", "20", "--cohort", "4", "--width", "10", "--rounds", "4"],
    "institution_costs.py": ["--small", "--reports", "2", "--algorithms", "tied EP"],
    "many_clients.py": ["--clients", "10", "--rounds", "4"],
    "lite0_batches.py": ["--images", "4", "--batches", "2", "4", "--repeats", "1"],
    "fednp_sites.py": ["--clients", "5", "--repeats", "2", "--rounds", "1", "--updates", "1"],
    "tilted_moments.py": ["--elements", "2000", "--repeats", "1"],
    "speech.py": ["--minutes", "1", "--words", "20", "--hidden", "8", "--steps", "2"],
    "sru.py": ["--width", "8", "--batch", "4", "--frames", "3", "--repeats", "1"],
    "probgan_update.py": ["--width", "8", "--batch", "4", "--generators", "2", "--steps", "4", "--repeats", "1"],
    "stacked_ensembles.py": ["--width", "8", "--batch", "4", "--generators", "2", "--steps", "4", "--repeats", "1"],
    "inverted_pixels.py": ["--rounds", "2", "--seeds", "1", "--writers", "60"],
    "price_of_privacy.py": [
        *("--epsilons", "8", "--seeds", "1", "--writers", "20", "--rounds", "2", "--cohort", "5", "--rates", "1"),
        *("--local-steps", "2", "--server-steps", "2", "--processes", "1"),
    ],
    "memorisation.py": [
        *("--seeds", "1", "--rounds", "2", "--warmup-steps", "5", "--local-steps", "2", "--noise", "1"),
        *("--samples", "50", "--compared", "100", "--draws", "2", "--herding-steps", "2", "--search-steps", "2"),
    ],
    "fedavg_gan_power.py": [
        *("--writers", "40", "--shares", "0.5", "--rounds", "1", "--server-steps", "1", "--runs", "1"),
        *("--epsilons", "8", "--processes", "1"),
    ],
    "what_the_server_sees.py": ["--algorithms", "FedAvg", "GRAFFL's search", "generator sites"],
    "killed_institutions.py": ["--rounds", "5", "--institutions", "3", "--steps", "2"],
    "joined_tokens.py": ["--rounds", "1", "--word-rounds", "1"],
    "joined_tokens_power.py": ["--draws", "2", "--clean-draws", "2"],
    "private_peers.py": ["--seeds", "2"],
    "joined_tokens_guarantee.py": [
        *("--rounds", "1", "--users", "705", "--shares", "1", "--epsilons", "8", "--seeds", "1", "--processes", "1"),
    ],
    "inspection_power.py": ["--users", "20", "--pool", "30", "--epochs", "1", "--draws", "2"],
    "kills.py": ["--kills", "1", "--two-ranks", "0", "--rounds", "2"],
    "gpu_simulation.py": [
        *("--device", "cpu", "--models", "MLP 3k", "--clients", "100", "--rounds", "2", "--repeats", "1"),
    ],
    "gpu.py": ["--width", "8", "--batch", "4", "--generators", "2", "--steps", "4", "--accelerator", "cpu"],
    "disturbed_study.py": ["--disturbances", "1", "--rounds", "2", "--pause", "3"],
    "graffl_calibration.py": ["--draws", "1", "--steps", "2", "--workers", "1", "--particles", "60"],
    "graffl_exact.py": ["--seeds", "1", "--records", "900", "--noise", "0", "--particles", "260", "--draws", "20"],
    "graffl_oracle.py": ["--records", "20", "--particles", "400", "--simulations", "8000"],
    "ep_step.py": ["--width", "8", "--batch", "16", "--steps", "4", "--repeats", "1", "--generators", "2"],
}

# ten minutes each, and root's rights for network namespaces: test_kits.py, test_flare.py and test_remote.py do parts;
# the last but one reads results, and has a test of its own; the last runs what test_configs.py runs
BY_HAND = {"hospital_walk.py", "same_model.py", "federating_pays.py", "digests.py"}


def test_time_in_which_kernels_ran_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two streams, one within the other's kernel, one across its end, and one apart."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    covered = importlib.import_module("gpu").covered
    assert covered([(5.0, 6.0), (0.0, 2.0), (0.5, 1.0), (1.5, 3.0)]) == 4.0
    assert covered([]) == 0


def test_a_side_of_a_claim_is_the_tables_own_where_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    claims = importlib.import_module("claims")
    home = claims.Side("many", "fedavg", "accuracy")
    sides = [tuple(claims.side(text, home)) for text in ("ep", "few/ep", "/ep/rounds", "few/ep/rounds")]
    assert sides[0] == ("many", "ep", "accuracy")
    assert sides[1:] == [("few", "ep", "accuracy"), ("many", "ep", "rounds"), ("few", "ep", "rounds")]


def test_claims_stand_in_two_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holm's correction of two comparisons with the baseline, and of one pair alone; columns are paired."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    claims = importlib.import_module("claims")
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


def test_the_picture_of_where_federating_pays_has_the_seeds_that_all_points_have(tmp_path: Path) -> None:
    """Seed 3 lacks a setting, so only 1 and 2 count; the distance is the setting's number plus a tenth of the seed."""
    methods = ("fedavg", "generator_sites", "embedding_sites", "union", "herded", "another")
    files = {"digits": {"": 4}, "digits_weak": {"few": 1, "records_60": 2, "clients_20": 3, "clients_50": 5, "late": 9}}
    for name, settings in files.items():
        lines = [
            f"{setting},{method},{seed},{distance + seed / 10}"
            for setting, distance in settings.items()
            for method in methods
            for seed in (1, 2, 3)
            if (setting, seed) != ("few", 3)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["variant,method,seed,fd", *lines]) + "\n")
    script, image = str(ROOT / "benchmarks" / "federating_pays.py"), tmp_path / "image.png"
    printed = run_words([sys.executable, script, "--results", str(tmp_path), "--picture", str(image)])
    rows = [line.split("|")[1:3] for line in printed.splitlines() if line.startswith(("| 1", "| 2"))]
    cells = {name.strip(): cell.strip() for name, cell in rows}
    assert cells == {
        "10 clients, 20 records each": "1.15 ± 0.071",
        "10 clients, 60 records each": "2.15 ± 0.071",
        "10 clients, 144 records each": "4.15 ± 0.071",
        "20 clients": "3.15 ± 0.071",
    }
    assert image.stat().st_size > 1000


def test_every_script_is_tried() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(SMALL) | BY_HAND


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """What a script sets for a process of its own is put back."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pfl")]
    levels, environment, threads, modules = (
        [own.level for own in loggers],
        dict(os.environ),
        torch.get_num_threads(),
        {*sys.modules},
    )
    yield
    for own, level in zip(loggers, levels, strict=True):
        own.setLevel(level)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    table = tmp_path / "table.md"
    monkeypatch.chdir(tmp_path)
    script = ROOT / "benchmarks" / name
    words = [str(script), *SMALL[name], "--output", str(table)]
    if "multiprocessing" in script.read_text():  # its processes start from the script as the main module
        printed = run_words([sys.executable, "-m", "tests.script", *words])
    else:  # imports take most of a small benchmark's time, and are made here
        monkeypatch.syspath_prepend(str(script.parent))
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(str(script), run_name="__main__")
        printed = capsys.readouterr().out
    assert table.read_text() in printed


def test_what_is_found_ends_where_a_larger_value_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """At epsilon 2 half of 50 users are found by chance, 100 are not: the fewest are 200."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from detection import least

    powers = {(200, 0.5, 1.0): 0.5, (200, 0.1, 1.0): 0.99, (100, 0.5, 1.0): 0.99, (50, 0.5, 1.0): 0.99}
    powers |= {(200, 0.5, 2.0): 0.99, (200, 0.1, 2.0): 0.96, (100, 0.5, 2.0): 0.9, (50, 0.5, 2.0): 0.99}
    lines = [line for line in least(powers, 0.5).splitlines() if line.startswith("| ")]
    assert lines == ["| epsilon | 1 | 2 |", "| smallest share | none | 0.1 |", "| fewest users | none | 200 |"]
