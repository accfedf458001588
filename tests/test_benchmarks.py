"""Every benchmark runs, at a size that says nothing about speed, and writes its table."""

import gc
import importlib
import logging
import multiprocessing
import os
import runpy
import sys

import pytest
import torch

from tests.processes import ROOT

pytestmark = pytest.mark.slow

SMALL = {
    "complexity.py": [],
    "frozen_backbone.py": ["--frozen", "1", "--rounds", "2", "--repeats", "1"],
    "local_step.py": ["--steps", "20", "--repeats", "1"],
    "simulations.py": [
        *("--models", "MLP 3k", "--clients", "10", "--rounds", "2", "--repeats", "1"),
        *("--simulators", "plain driver", "plain driver, vectorized"),
    ],
    "start_up.py": ["--commands", "2", "--repeats", "1"],
    "scale.py": ["--clients", "20", "--cohort", "4", "--width", "10", "--rounds", "4"],
    "institution_costs.py": ["--small", "--reports", "2", "--algorithms", "tied EP"],
    "many_clients.py": ["--clients", "10", "--rounds", "4"],
    "speech.py": ["--minutes", "1", "--words", "20", "--hidden", "8", "--steps", "2"],
    "killed_institutions.py": ["--rounds", "5", "--institutions", "3", "--steps", "2"],
    "private_peers.py": ["--seeds", "2"],
    "kills.py": ["--kills", "1", "--two-ranks", "0", "--rounds", "2"],
    "private_kills.py": ["--kills", "1", "--kinds", "1", "--rounds", "2"],
    "gpu_simulation.py": [
        *("--device", "cpu", "--models", "MLP 3k", "--clients", "100", "--rounds", "2", "--repeats", "1")
    ],
    "gpu.py": ["--width", "8", "--batch", "4", "--generators", "2", "--steps", "4", "--accelerator", "cpu"],
    "ep_step.py": ["--width", "8", "--batch", "16", "--steps", "4", "--repeats", "1", "--generators", "2"],
}
SHORT = {"private_task": {"EPOCHS": 1, "ROUNDS": 2, "WRITERS": 68, "COHORT": 34}}  # what no option says


def test_time_in_which_kernels_ran_is_counted_once(monkeypatch):
    """Of two streams, one within the other's kernel, one across its end, and one apart."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    covered = importlib.import_module("gpu").covered
    assert covered([(5.0, 6.0), (0.0, 2.0), (0.5, 1.0), (1.5, 3.0)]) == 4.0
    assert covered([]) == 0


def test_every_script_is_tried():
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    # what test_configs.py runs; what private_kills.py starts; what takes minutes, as a federation of test_kits.py does
    assert scripts - {"digests.py", "observed.py", "institution_faults.py"} == set(SMALL)


@pytest.fixture
def undisturbed():
    """What a script sets for a process of its own is put back."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pfl")]
    levels, environment, threads, modules = (
        [own.level for own in loggers],
        dict(os.environ),
        torch.get_num_threads(),
        {*sys.modules},
    )
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


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(tmp_path, monkeypatch, capsys, name):
    table = tmp_path / "table.md"
    monkeypatch.chdir(tmp_path)
    script = ROOT / "benchmarks" / name
    monkeypatch.syspath_prepend(str(script.parent))
    for module, constants in SHORT.items():
        for constant, value in constants.items():
            monkeypatch.setattr(importlib.import_module(module), constant, value)
    if "multiprocessing" in script.read_text():  # imports take most of its time: its processes are forks of this one
        forks = multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
        gc.freeze()  # what is here already is no garbage of theirs
    monkeypatch.setattr(sys, "argv", [str(script), *SMALL[name], "--output", str(table)])
    runpy.run_path(str(script), run_name="__main__")
    assert table.read_text() in capsys.readouterr().out
