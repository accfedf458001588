"""Weights & Biases without a key: a real offline run, whose file is read back."""

import os
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import wandb

from lit_epgan.runs import MetricsFile
from lit_epgan.study.process import Process, start
from lit_epgan.study.run import CLI
from tests.wandb_history import history, offline_files

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
    """Kill the process and all that it started as soon as ``metrics.csv`` tells of the round."""
    process, table = fit(folder, *options), MetricsFile(str(folder))
    deadline = time.monotonic() + 120
    while number not in table.finished(number + 1):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_the_history_of_a_killed_run_is_that_of_one_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows, in the same order, the pictures among them, in the one file that is uploaded."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.setup().ensure_service()  # as a test before this one may have left it
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    to_the_end(whole)
    killed_in_round(1, killed)
    to_the_end(killed, "--ckpt_path", "last")
    ((expected,), (found,)) = offline_files(whole), offline_files(killed)
    assert history(found) == history(expected)
    pictures = [row for row in history(found) if any(name.startswith("pictures/density") for name in row)]
    assert len(pictures) == ROUNDS
    assert len(list(found.parent.glob("files/media/images/pictures/*.png"))) == ROUNDS
    (aside,) = (killed / "wandb" / "superseded").glob("*/*.wandb")
    assert aside.name == found.name, "the resumed run has another id"
    rows = [row for row in history(found) if row not in pictures]
    logged = pd.read_csv(killed / "metrics.csv", float_precision="round_trip").rename(
        columns={"step": "trainer/global_step"}
    )
    in_table = [{name: value for name, value in row.items() if value == value} for row in logged.to_dict("records")]
    assert [{name: value for name, value in row.items() if name != "_step"} for row in rows] == in_table
