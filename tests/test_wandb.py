"""Weights & Biases without a key: a real offline run, whose file is read back."""

import os
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import wandb

from lit_epgan.cli.study_plan import Method
from lit_epgan.cli.study_run import CLI, Run
from lit_epgan.cli.study_runner import Process, start
from lit_epgan.runs import MetricsFile
from tests.wandb_history import configuration, history, offline_files, summary, title

ROUNDS = 4
FIT = [*CLI, "fit", "--config", "toy.yaml", "--data.points", "64", "--data.batch_size", "16", "--data.local_steps", "2"]
FIT += ["--data.warmup_steps", "2", "--trainer.max_epochs", str(ROUNDS)]


def fit(folder: Path, *options: str) -> Process:
    log = folder.with_name(f"{folder.name}.log")
    return start([*FIT, "--trainer.default_root_dir", str(folder), *options], log, append=True)


def to_the_end(folder: Path, *options: str) -> None:
    code = fit(folder, *options).wait(120)
    assert code == 0, folder.with_name(f"{folder.name}.log").read_text()


def killed_in_round(number: int, folder: Path, *options: str) -> None:
    process, table = fit(folder, *options), MetricsFile(str(folder))
    deadline = time.monotonic() + 120
    while number not in table.finished(number + 1):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_the_history_of_a_killed_run_is_that_of_one_never_stopped(tmp_path, monkeypatch):
    """The same rows, in the same order, the pictures among them, in the one file that is uploaded."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.setup().ensure_service()  # as a test before this one may have left it
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    to_the_end(whole)
    killed_in_round(1, killed)
    to_the_end(killed, "--ckpt_path", "last")
    ((expected,), (found,)) = offline_files(whole), offline_files(killed)
    assert history(found) == history(expected)
    assert [(row["_step"], row["round"], row["pictures/density/count"]) for row in history(found)] == [
        (number, number, 1) for number in range(1, ROUNDS + 1)
    ]
    assert len(list(found.parent.glob("files/media/images/pictures/*.png"))) == ROUNDS
    (aside,) = (killed / "wandb" / "superseded").glob("*/*.wandb")
    assert aside.name == found.name, "the resumed run has another id"
    other = ("_step", "round", "pictures/")
    rows = [{k: v for k, v in row.items() if not k.startswith(other)} for row in history(found)]
    logged = pd.read_csv(killed / "metrics.csv", float_precision="round_trip").rename(
        columns={"step": "trainer/global_step"}
    )
    assert rows == logged.to_dict("records"), "one row a round, in the file as in W&B"


@pytest.mark.slow
def test_a_run_says_what_it_is_and_an_evaluation_is_a_run_of_its_own(tmp_path, monkeypatch):
    """As a study names it; then without a study."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.setup().ensure_service()
    folder, method = tmp_path / "run", Method("sites", "Sites", [])
    named = Run(method, 7, tmp_path, "far", "toy").variables
    log = tmp_path / "log"
    words = [*FIT, "--trainer.default_root_dir", str(folder), "--seed_everything", "7"]
    assert start(words, log, append=False, variables=named).wait(120) == 0, log.read_text()
    (trained,) = offline_files(folder)
    assert title(trained) == ("sites, seed 7", "toy/far", "fit")
    told = configuration(trained)
    assert told["seed_everything"] == 7
    assert told["federation"]["init_args"]["algorithm"]["class_path"].endswith("GeneratorSites")
    assert (told["data"]["init_args"]["layout"], told["data"]["init_args"]["points"]) == ("four", 64)
    assert told["model"]["init_args"]["objective"] == "lsgan"
    before = history(trained)
    words[len(CLI)] = "test"
    assert start(words, log, append=False).wait(120) == 0, log.read_text()
    assert history(trained) == before
    (evaluated,) = [file for file in offline_files(folder) if file != trained]
    assert evaluated.name != trained.name, "wandb sync would add it to the training run"
    assert title(evaluated) == ("run, GeneratorSites, seed 7, test", "", "test")
    assert not any("round" in row for row in history(evaluated))
    assert summary(evaluated)["coverage"] == before[-1]["coverage"]
