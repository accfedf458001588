"""The progress bar: what it shows, what it writes, and that it costs almost nothing."""

import io
import json
import math
import random
import re
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lit_epgan.callbacks import FederationCallback, progress
from lit_epgan.callbacks.progress import FederatedProgressBar, Position, describe
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.runs.loggers import MetricsFile
from tests.modules import Regression
from tests.refusals import assert_refused


def clients(n=3, validated=False):
    data = {f"site-{k}": torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1)) for k in range(n)}
    return FederatedDataModule.from_datasets(data, batch_size=4, val_dataset=data["site-0"] if validated else None)


def fit(folder, bar, rounds=3, logger=False, module=None):
    off = dict.fromkeys(["enable_checkpointing", "enable_model_summary"], False)
    callbacks = [FederationCallback(), bar]
    trainer = Trainer(
        accelerator="cpu", logger=logger, max_epochs=rounds, callbacks=callbacks, default_root_dir=folder, **off
    )
    validated = module is not None
    module = module or Regression()
    module.log = lambda name, value, **how: type(module).log(
        module, name, value, **{**how, "prog_bar": name == "train_loss"}
    )
    trainer.fit(module, datamodule=clients(validated=validated))


def test_share_done_counts_rounds_clients_and_steps_and_is_described_in_words():
    assert Position(round=1, rounds=4).done == 0
    # second of four rounds, third of five clients, 6 of its 10 steps done: 1 + (2 + .6) / 5
    assert Position(2, 4, "c", 3, 5, 6, 10).done == pytest.approx(1.52)
    assert Position(2, 4, "c", 3, 5, 6, 0).done == pytest.approx(1.4)
    assert Position(5, 4).done == 4
    assert describe(Position(3, 25, "site-7", 4, 10, 12, 20)) == "round 3/25 · client site-7 (4/10) · step 12/20"
    assert describe(Position(3, 25)) == "round 3/25"


def test_lines_are_not_more_frequent_than_asked_but_the_last_is_always_there(tmp_path, capsys):
    fit(tmp_path, FederatedProgressBar(line_seconds=1e9), rounds=6)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert [line.split()[1] for line in lines] == ["1/6", "6/6"]


def test_the_file_says_where_the_run_is(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(progress, "write_text", lambda path, text: written.append((path, json.loads(text))))
    fit(tmp_path, FederatedProgressBar(refresh_seconds=0), rounds=2)
    assert {path for path, _ in written} == {tmp_path / "progress.json"}
    seen = [(now["round"], now["client"], now["client_position"], now["clients"], now["step"]) for _, now in written]
    in_order = [(r, f"site-{k}", k + 1, 3, s) for r in (1, 2) for k in range(3) for s in (1, 2)]
    assert (seen[:-1], written[-1][1]["done"]) == (in_order, 2)
    done = [now["done"] for _, now in written]
    assert done == sorted(done)


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda: Console(file=screen, force_terminal=True, width=140))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True, write=screen.write, flush=lambda: None))
    fit(tmp_path, FederatedProgressBar(refresh_seconds=0))
    assert "client site-2 (3/3) · step 2/2" in screen.getvalue()
    assert "train_loss" in screen.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("client", ["client-13", "St. Mary's hospital, ward 7", "\u6771\u4eac\u75c5\u9662" * 5])
def test_counts_bar_and_time_stay_on_a_narrow_terminal(tmp_path, monkeypatch, width, client):
    """Metrics stay whole or go, the headline metric last; at 80 columns a long client's name is cut."""
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda: Console(file=screen, force_terminal=True, width=width))
    bar = FederatedProgressBar()
    bar._bar, bar._shape = progress._new_bar()
    bar._task = bar._bar.add_task("", total=101, completed=0, where="", losses="")
    metrics = {"fid_digits": 3.25, "loss/discriminator": 0.4409, "loss/generator": 0.4284}
    monkeypatch.setattr(bar, "_shown", lambda trainer: metrics)
    bar._bar.start()
    bar._refresh(SimpleNamespace(default_root_dir=tmp_path), Position(45, 101, client, 4, 10, 12, 20))
    bar._bar.stop()
    line = Text.from_ansi([shown for shown in screen.getvalue().splitlines() if "round" in shown][-1]).plain
    assert cell_len(line) <= width
    for kept in ("round 45/101", "(4/10)", "step 12/20", "0:00:00 left -:--:--"):
        assert kept in line
    assert ("\u2026" in line) == (width == 80 and client != "client-13")
    assert len(re.findall("[\u2501\u257a\u2578]", line)) >= 10
    shown = line.split("-:--:--")[1].split()
    assert shown == [word for name, value in metrics.items() for word in (name, str(value))][: len(shown) // 2 * 2]
    assert ("fid_digits" in shown) == (width == 120 and client == "client-13")


def test_a_rounds_line_begins_with_the_headline_metric(tmp_path, capsys):
    class Measured(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("val_accuracy", 0.5 + 0.125 * self.current_epoch)

    fit(tmp_path, FederatedProgressBar(line_seconds=0), rounds=2, module=Measured())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert [line.split("  ")[:2] for line in lines] == [
        ["round 1/2", "val_accuracy 0.5"],
        ["round 2/2", "val_accuracy 0.625"],
    ]
    assert all("train_loss" in line for line in lines)


def test_a_disabled_bar_is_silent(tmp_path, capsys):
    bar = FederatedProgressBar(refresh_seconds=0, line_seconds=0)
    bar.disable()
    fit(tmp_path, bar)
    assert "round" not in capsys.readouterr().out
    assert not (tmp_path / "progress.json").exists()


def test_a_step_between_refreshes_looks_at_nothing():
    bar = FederatedProgressBar(refresh_seconds=1e9)
    bar._next_refresh = later = time.monotonic() + 1e9
    bar.on_train_batch_end(SimpleNamespace(), torch.nn.Module(), None, None, 7)  # it has nothing to be looked at
    assert bar._next_refresh == later


def log_round(logger, epoch):
    step = 20 * (epoch + 1)
    logger.log_metrics({"loss": 1 / (epoch + 3), "epoch": epoch}, step - 10)
    if epoch % 2:
        logger.log_metrics({"fid": 0.1 * epoch, "epoch": epoch}, step)
    if epoch >= 4:
        logger.log_metrics({"late, quoted": float("nan"), "epoch": epoch}, step)


def uninterrupted(folder, rounds):
    logger = MetricsFile(str(folder))
    logger.rewind(0)
    for epoch in range(rounds):
        log_round(logger, epoch)
    return logger.path.read_bytes()


@pytest.mark.parametrize("finished", range(7))
def test_killed_and_resumed_gives_the_same_bytes(tmp_path, finished):
    expected = uninterrupted(tmp_path / "whole", 8)
    killed = MetricsFile(str(tmp_path / "killed"))
    for epoch in range(finished + 1):  # round `finished` was logged, but no checkpoint holds it
        log_round(killed, epoch)
    resumed = MetricsFile(str(tmp_path / "killed"))
    resumed.rewind(finished)
    for epoch in range(finished, 8):
        log_round(resumed, epoch)
    assert resumed.path.read_bytes() == expected


def test_cut_anywhere_it_resumes_to_the_same_bytes(tmp_path):
    expected = uninterrupted(tmp_path / "whole", 8)
    draw = random.Random(0)
    path = tmp_path / "cut" / "metrics.csv"
    uninterrupted(tmp_path / "cut", 6)
    content = path.read_bytes()
    end_of_round_2 = content.index(b"\n3,") + 1
    for length in draw.sample(range(end_of_round_2, len(content)), 40):
        path.write_bytes(content[:length])
        logger = MetricsFile(str(path.parent))
        logger.rewind(3)
        for epoch in range(3, 8):
            log_round(logger, epoch)
        assert path.read_bytes() == expected


def test_finished_rounds_come_back_as_they_were_logged(tmp_path):
    logger = MetricsFile(str(tmp_path))
    rows = [{"a": 1 / 3, "epoch": 0}, {"b": math.inf}, {"a": -math.inf, "c": 7, "epoch": 1}, {"a": 0.0, "epoch": 2}]
    for step, row in enumerate(rows):
        logger.log_metrics(row, step)
    logger.log_metrics({"a": math.nan, "epoch": 2})
    with_steps = [{**row, "step": step} for step, row in enumerate(rows)]
    assert logger.finished(2) == {0: with_steps[:2], 1: with_steps[2:3]}
    assert isinstance(logger.finished(2)[1][0]["c"], int)
    last = logger.finished(3)[2][1]
    assert last.keys() == {"a", "epoch"}
    assert math.isnan(last["a"])
    assert MetricsFile(str(tmp_path / "none")).finished(3) == {}


def test_a_row_without_a_round_belongs_to_the_row_before_and_a_round_has_one_row(tmp_path):
    logger = MetricsFile(str(tmp_path))
    for row in ({"a": 1.0, "epoch": 0}, {"b": 2.0}, {"a": 3.0, "epoch": 1}, {"b": 4.0}):
        logger.log_metrics(row, 0)
    logger.rewind(1)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,a,b\n0,0,1.0,\n,0,,2.0\n"
    # Of the same step, unless the name is there: what was logged is never lost
    tmp_path /= "steps"
    logger = MetricsFile(str(tmp_path))
    for name, epoch, step in zip("abcbaab", (0, 0, 0, 0, 0, 1, 1), (4, 9, 9, 9, 9, 9, 9), strict=True):
        logger.log_metrics({name: 1, "epoch": epoch}, step)
    rows = ["0,4,1,,", "0,9,,1,1", "0,9,1,1,", "1,9,1,1,"]
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["epoch,step,a,b,c", *rows]
    resumed = MetricsFile(str(tmp_path))
    resumed.log_metrics({"c": 2, "epoch": 1}, 9)  # another process's row is left as it is
    assert (tmp_path / "metrics.csv").read_text().splitlines()[-2:] == ["1,9,1,1,", "1,9,,,2"]


def test_a_new_run_begins_an_empty_file_and_without_rewind_it_appends_what_reads_back_exactly(tmp_path):
    MetricsFile(str(tmp_path)).log_metrics({"a": 1.0, "epoch": 0}, 0)
    logger = MetricsFile(str(tmp_path))
    logger.rewind(0)
    logger.log_metrics({"b": 2.0, "epoch": 0}, 5)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,b\n0,5,2.0\n"
    values = [2.0, 1 / 3, 1e-300, 123456789.125]
    for i, value in enumerate(values[1:], start=1):
        MetricsFile(str(tmp_path)).log_metrics({"b": value, "epoch": i}, i)
    assert pd.read_csv(tmp_path / "metrics.csv", float_precision="round_trip")["b"].tolist() == values


def test_lightnings_own_checkpoints_stand_in_the_runs_folder(tmp_path):
    """Of a run without RoundCheckpoint; once they were to lie in a folder of the file's own name."""
    off = dict.fromkeys(["enable_progress_bar", "enable_model_summary"], False)
    few = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}
    trainer = Trainer(accelerator="cpu", logger=MetricsFile(str(tmp_path)), **few, **off)
    trainer.fit(BoringModel())
    assert len(list((tmp_path / "checkpoints").glob("*.ckpt"))) == 1


def test_a_table_removed_under_a_run_begins_with_its_columns_again_and_one_without_is_refused(tmp_path):
    table = MetricsFile(tmp_path)
    table.log_metrics({"epoch": 0, "loss": 1.0}, 1)
    table.path.unlink()
    table.log_metrics({"epoch": 1, "loss": 0.5}, 2)
    assert table.path.read_text() == "epoch,step,loss\n1,2,0.5\n"
    (tmp_path / "metrics.csv").write_text("4,1299,8.5\n4,1299,8.6\n")
    assert_refused("no column epoch; put the file away", MetricsFile(tmp_path).rewind, 5)
