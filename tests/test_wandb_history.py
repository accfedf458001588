"""What the Weights & Biases logger logs, again and of a killed run: real offline files, which are read back."""

import os
import runpy
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import wandb
from PIL import Image

from lit_epgan.callbacks.progress import FederatedProgressBar
from lit_epgan.cli.study_plan import Method
from lit_epgan.cli.study_run import CLI, Run
from lit_epgan.cli.study_runner import start
from lit_epgan.runs import MetricsFile, WandbHistory
from lit_epgan.runs.run_folder import round_picture
from tests.processes import ROOT, until
from tests.test_progress import fit
from tests.wandb_history import configuration, history, offline_files, summary, title


@pytest.fixture(autouse=True)
def no_other_run(monkeypatch):
    """What another test of this process has left open or set would be taken over."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    close()
    yield
    close()


def close():
    """End the run and W&B's process, which may write the file's end after ``finish`` has returned."""
    wandb.finish()
    wandb.teardown()


def logger(folder, **options):
    return WandbHistory(save_dir=folder, project="test", id="abc", **options)


def table_of(folder, rounds):
    """Two rows a round, and a picture in the second one."""
    table = MetricsFile(str(folder))
    for epoch in range(rounds):
        table.log_metrics({"loss": 1 / (epoch + 3), "epoch": epoch}, 10 * epoch + 4)
        table.log_metrics({"fid": float("inf"), "epoch": epoch}, 10 * epoch + 9)
    picture = round_picture(folder, "samples", 1)
    picture.parent.mkdir()
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(picture)
    return table


def older_file(folder, name="offline-run-20260101_000000-abc", run_id="abc"):
    file = folder / "wandb" / name / f"run-{run_id}.wandb"
    file.parent.mkdir(parents=True)
    file.write_bytes(b":W&B\xe1\xbe\0")
    return file


def numbers(file):
    names = ("_step", "round", "epoch", "trainer/global_step", "loss", "fid")
    return [tuple(row.get(name) for name in names) for row in history(file)]


def test_numbers_and_pictures_of_a_round_are_one_row_at_the_rounds_step(tmp_path):
    one = logger(tmp_path)
    for epoch, (loss, fid) in enumerate([(0.5, 3.0), (0.25, 1.0), (0.125, 2.0)]):
        image = wandb.Image(np.zeros((4, 4, 3), dtype=np.uint8))
        one.log_metrics({"pictures/samples": [image], "epoch": epoch}, 10 * epoch + 9)  # type: ignore[arg-type]
        one.log_metrics({"fid": fid, "epoch": epoch}, 10 * epoch + 9)
        one.log_metrics({"loss": loss}, 10 * epoch + 9)  # a row without a round belongs to the row before it
    close()
    (file,) = offline_files(tmp_path)
    assert numbers(file) == [(1, 1, 0, 9, 0.5, 3.0), (2, 2, 1, 19, 0.25, 1.0), (3, 3, 2, 29, 0.125, 2.0)]
    assert all(row["pictures/samples/count"] == 1 for row in history(file))
    assert summary(file)["fid"] == {"last": 2.0, "min": 1.0}
    assert summary(file)["loss"] == 0.125


def test_an_evaluation_has_no_rounds(tmp_path):
    one = logger(tmp_path, job_type="test", name="digits, test", group="study")
    one.log_hyperparams({"seed_everything": 3, "data": {"init_args": {"beta": 0.5}}})
    one.log_hyperparams({"beta": 0.1, "_instantiator": "lightning.pytorch.cli.instantiate_module"})
    one.log_metrics({"fid": 3.0, "epoch": 0}, 0)
    close()
    (file,) = offline_files(tmp_path)
    (row,) = history(file)
    assert not {"round", "epoch"} & row.keys()
    assert summary(file)["fid"] == 3.0
    assert title(file) == ("digits, test", "study", "test")
    told = {name: value for name, value in configuration(file).items() if name != "_wandb"}
    assert told == {"seed_everything": 3, "data": {"init_args": {"beta": 0.5}}}


def test_a_finished_round_is_handed_over_by_the_federation(tmp_path):
    one = logger(tmp_path)
    one.log_metrics({"loss": 0.5, "epoch": 0}, 9)
    assert one.experiment.step == 1
    one.end_round()
    one.end_round()
    assert one.experiment.step == 2  # W&B takes nothing more for the first
    ended: list[int] = []

    class Rounds(MetricsFile):
        def end_round(self) -> None:
            ended.append(max(self.finished(9), default=-1))

    fit(tmp_path, FederatedProgressBar(), rounds=3, logger=Rounds(str(tmp_path)))
    assert ended == [-1, 0, 1]


def test_finished_rounds_are_logged_again_and_older_files_set_aside(tmp_path):
    """Rows of round 2, which is trained again, are left out; another run's folder stays."""
    table_of(tmp_path, 3)
    older, other = older_file(tmp_path), older_file(tmp_path, "offline-run-20260101_000000-xyz", "xyz")
    twin = older_file(tmp_path, f"superseded/{older.parent.name}")
    one = logger(tmp_path)
    one.rewind(2)
    one.rewind(2)  # another fit of this process
    one.log_metrics({"loss": 0.5, "epoch": 2}, 24)
    close()
    assert not older.exists()
    assert twin.exists()
    assert (twin.parent.with_name(f"{twin.parent.name}.1") / twin.name).exists()
    (newest,) = [file for file in offline_files(tmp_path) if file != other]
    inf = float("inf")
    assert numbers(newest) == [(1, 1, 0, 9, 1 / 3, inf), (2, 2, 1, 19, 1 / 4, inf), (3, 3, 2, 24, 0.5, None)]
    assert [row["_step"] for row in history(newest) if "pictures/samples/count" in row] == [2]
    assert len(list(newest.parent.glob("files/media/images/pictures/*.png"))) == 1


def test_what_a_killed_runs_service_writes_late_is_set_aside_at_the_end(tmp_path):
    table_of(tmp_path, 1)
    one = logger(tmp_path)
    one.rewind(1)
    late = older_file(tmp_path)
    one.finalize("success")
    close()
    assert not late.exists()
    assert [file.parent.name for file in offline_files(tmp_path)] == [Path(one.experiment.dir).parent.name]


def test_without_a_table_older_files_stay(tmp_path):
    older = older_file(tmp_path)
    one = logger(tmp_path)
    with pytest.warns(UserWarning, match=r"metrics.csv holds no finished round") as warned:
        one.rewind(2)
    assert len(warned) == 1
    assert older.exists()


def test_a_new_run_has_nothing_to_log_again_and_disabled_it_does_nothing(tmp_path, recwarn, monkeypatch):
    table_of(tmp_path, 1)
    one = logger(tmp_path)
    one.rewind(0)
    close()
    assert not list(recwarn)
    (file,) = offline_files(tmp_path)
    assert history(file) == []
    monkeypatch.setenv("WANDB_MODE", "disabled")
    older = older_file(tmp_path)
    logger(tmp_path).rewind(2)
    assert older.exists()


def test_a_server_gets_the_rounds_that_it_does_not_know(tmp_path):
    """A run resumed online, as W&B presents it: here is no server."""
    table_of(tmp_path, 4)
    logged: list[tuple[int, dict[str, Any]]] = []
    known = {"disabled": False, "resumed": True, "step": 7, "starting_step": 7, "summary": {"epoch": 1}, "id": "abc"}
    folder = str(tmp_path / "wandb" / "run-20260101_000000-abc" / "files")
    online = SimpleNamespace(dir=folder, define_metric=lambda *args, **options: None, **known)
    online.log = lambda row, step, commit=None: logged.append((step, row))
    one = logger(tmp_path)
    one._experiment = online  # type: ignore[assignment]
    one.rewind(4)
    assert [(step, row["epoch"]) for step, row in logged] == [(3, 2), (3, 2), (4, 3), (4, 3)]


def test_the_docs_picture_is_drawn_from_a_runs_own_file(tmp_path):
    one = logger(tmp_path)
    for epoch in range(2):
        image = wandb.Image(np.zeros((4, 4, 3), dtype=np.uint8))
        one.log_metrics({"pictures/samples": [image], "fid": 2.0 - epoch, "epoch": epoch}, 9)  # type: ignore[arg-type]
    close()
    (file,) = offline_files(tmp_path)
    runpy.run_path(str(ROOT / "docs" / "wandb_picture.py"))["draw"](file, tmp_path / "run.png")
    assert Image.open(tmp_path / "run.png").size == (640, 320)


ROUNDS = 4
FIT = [*CLI, "fit", "--config", "toy.yaml", "--data.points", "64", "--data.batch_size", "16", "--data.local_steps", "2"]
FIT += ["--data.warmup_steps", "2", "--trainer.max_epochs", str(ROUNDS)]


def begun(folder, *options):
    log = folder.with_name(f"{folder.name}.log")
    return start([*FIT, "--trainer.default_root_dir", str(folder), *options], log, append=True)


def to_the_end(folder, *options):
    code = begun(folder, *options).wait(120)
    assert code == 0, folder.with_name(f"{folder.name}.log").read_text()


def killed_in_round(number, folder, *options):
    process, table = begun(folder, *options), MetricsFile(str(folder))
    until(lambda: number in table.finished(number + 1), 120)
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
