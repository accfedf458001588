"""Clients, classes and files with names as nobody should give them: shown as they are, wherever they are shown."""

import csv
import io
import json
import logging
import os
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from rich.console import Console

from lit_epgan.callbacks import FederatedProgressBar, PartitionReport, RoundCheckpoint, curve_fit, progress
from lit_epgan.callbacks.partition_report import partition_picture, print_partition, with_names
from lit_epgan.cli.main import main
from lit_epgan.cli.process import printable_messages
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import csv_cell, printable
from lit_epgan.runs.loggers import MetricsFile
from tests.federations import client_sets, federation, fit
from tests.modules import Regression
from tests.names import names

pytestmark = pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
FOLDERS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


def write_rounds(logger, columns, rounds):
    for epoch in rounds:
        for place, column in enumerate(columns):
            logger.log_metrics({column: (epoch + 1) / (place + 3), "epoch": epoch}, epoch)


@FOLDERS
@given(st.lists(names, max_size=3, unique_by=printable), st.data())
def test_a_metrics_file_cut_anywhere_resumes_to_the_same_bytes(tmp_path, some, data):
    columns = [f"loss/client/{name}" for name in some] + ["loss"]
    whole, cut = (MetricsFile(str(tmp_path / name)) for name in ("whole", "cut"))
    for logger in (whole, cut):
        logger.rewind(0)
    write_rounds(whole, columns, range(4))
    write_rounds(cut, columns, range(2))
    kept = len(cut.path.read_bytes())
    write_rounds(cut, columns, range(2, 3))
    content = cut.path.read_bytes()
    cut.path.write_bytes(content[: data.draw(st.integers(kept, len(content)))])
    resumed = MetricsFile(str(tmp_path / "cut"))
    resumed.rewind(2)
    write_rounds(resumed, columns, range(2, 4))
    assert resumed.path.read_bytes() == whole.path.read_bytes()
    table = pd.read_csv(whole.path, float_precision="round_trip")
    assert list(table) == ["epoch", "step", *map(printable, columns)]
    assert table["loss"].dropna().tolist() == [(epoch + 1) / (len(some) + 3) for epoch in range(4)]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\u2028", "\x85", "\x0b"])
def test_a_cell_between_quotes_may_hold_any_line_end(tmp_path, end):
    """As in a file from elsewhere, or of an earlier version; wherever its last row was cut off."""
    table = io.StringIO(newline="")
    columns = ["epoch", "step", f'a"{end}b', "x"]
    writer = csv.writer(table, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([columns, [0, 1, "2.0", ""], [1, 2, "3.0", end], [1, 2, "3.0", f'"{end}"']])
    path, content = tmp_path / "metrics.csv", table.getvalue().encode()
    first = content.index(b'"1","2"')
    second = content.rindex(b'"1","2"')
    for length in range(first, len(content) + 1):
        path.write_bytes(content[:length])
        MetricsFile(str(tmp_path)).log_metrics({"x": 4.0, "epoch": 2}, 3)
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        whole = (length >= second) + (length == len(content))
        assert rows[0] == [printable(column) for column in columns]
        assert [row[0] for row in rows[1:]] == ["0", *["1"] * whole, "2"]


def partition_of(clients):
    counts = np.arange(2 * len(clients)).reshape(len(clients), 2) + 1
    return pd.DataFrame(
        counts, index=pd.Index(clients, name="client", dtype=object), columns=pd.Index([0, 1], name="class")
    )


@settings(max_examples=40)
@given(st.lists(names.filter(lambda name: len(name) < 60), min_size=1, max_size=4, unique=True))
@example(["[/]", "a\\"])
def test_the_printed_partition_shows_them(clients):
    screen = io.StringIO()
    print_partition(partition_of(clients), Path("[/]"), Console(file=screen, width=900))
    rows = [line for line in screen.getvalue().split("\n") if line.strip()][-len(clients) :]
    for client, row in zip(clients, rows, strict=True):
        assert row[1:].startswith(printable(client).rstrip())


def test_a_partition_that_is_not_printed_names_its_file():
    screen = io.StringIO()
    print_partition(partition_of([str(k) for k in range(99)]), Path("runs/[/]/a\x1b[1m.csv"), Console(file=screen))
    assert r"[/]/a\x1b[1m.csv" in screen.getvalue().replace("\n", "")


@settings(max_examples=3)
@given(st.lists(names, min_size=1, max_size=3, unique=True), st.lists(names, min_size=2, max_size=2))
@example(["$x^$", "$\\frac$", "very long" * 500], ["$x^$", "\ud800"])
def test_the_picture_of_the_partition_draws_them(clients, classes):
    figure = partition_picture(with_names(partition_of(clients), classes))
    FigureCanvasAgg(figure).draw()
    written = [label for axes in figure.axes[1:2] for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    for label, name in zip(written, [*clients, *classes], strict=True):
        shown = printable(name)
        drawn = shown if len(shown) <= 30 else f"{shown[:30]}…"
        assert label._preprocess_math(label.get_text()) == (drawn, False)


def test_a_legend_holds_every_name(monkeypatch):
    """Matplotlib leaves out what begins with an underscore, unless told."""
    monkeypatch.setattr(curve_fit, "pixels_of", lambda figure: figure)
    line, some = torch.linspace(0, 1, 5)[:, None], ["$x^$", "\ud800", "_a"]
    figure = curve_fit.draw(dict.fromkeys(some, (line, line)), line, dict.fromkeys(some, line[:, 0]), line[:, 0], "")
    FigureCanvasAgg(figure).draw()
    drawn = [text._preprocess_math(text.get_text()) for text in figure.axes[0].get_legend().get_texts()]
    assert drawn == [(printable(name), False) for name in [*some, "server"]]


@settings(max_examples=40)
@given(names, names)
@example("[/]", "[/]")
def test_the_bar_shows_them(client, metric):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=8000, color_system=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "Console", lambda: console)
        bar, _ = progress._new_bar()
    where = progress.describe(progress.Position(1, 2, client, 1, 2, 1, 2))
    bar.add_task("", where=where, losses=progress._losses({metric: 0.5}))
    console.print(bar.get_renderable())
    shown = printable(client)
    name = shown if shown.startswith("client") else f"client {shown}"
    assert ("round 1/2" + (f" · {name} (1/2) · step 1/2" if client else "")) in screen.getvalue()
    assert f"{printable(metric)} 0.5" in screen.getvalue()


def federated(folder, clients, rounds, resume):
    sizes = (9, 5, 8, 4)[: len(clients)]
    sets = dict(zip(clients, client_sets(sizes), strict=True))
    data = federation(sizes=sizes, client_names=clients, val_dataset=sets)
    data.data.labels = {name: torch.arange(4) % 2 for name in clients}
    torch.manual_seed(0)
    callbacks = [RoundCheckpoint(), PartitionReport(), FederatedProgressBar(refresh_seconds=0)]
    options = {"logger": MetricsFile(str(folder)), "enable_checkpointing": True, "enable_progress_bar": True}
    options["ckpt_path"] = folder / "checkpoints" / "last.ckpt" if resume else None
    fit(Regression(), data, rounds, folder, optimizer_state="keep", callbacks=callbacks, **options)
    return (folder / "metrics.csv").read_bytes()


@pytest.mark.slow
@settings(max_examples=1)
@given(st.lists(names, min_size=2, max_size=2, unique_by=printable))
@example(["a\u2028b", "[/]", "\udcff", "=1+1"])
def test_a_federation_of_them_runs_and_resumes(tmp_path_factory, clients):
    folder = tmp_path_factory.mktemp("run")
    whole = federated(folder / "whole", clients, 2, resume=False)
    federated(folder / "parts", clients, 1, resume=False)
    assert federated(folder / "parts", clients, 2, resume=True) == whole
    table = pd.read_csv(folder / "whole" / "metrics.csv")
    assert {f"val_loss/client/{printable(name)}" for name in clients} <= set(table)
    with (folder / "whole" / "partition.csv").open(newline="", encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)][1:] == [csv_cell(name) for name in clients]
    loaded = torch.load(folder / "whole" / "checkpoints" / "last.ckpt", weights_only=True)
    assert next(v for v in loaded["callbacks"].values() if "client_names" in v)["client_names"] == clients
    assert json.loads((folder / "whole" / "progress.json").read_text())["round"] == 3


def images(root, rng):
    for split in (b"train", b"val", b"test"):
        for client in (b"caf\xe9", b"[bold] $x^$"):
            for label in (b"one\xff", b"=two"):
                folder = os.path.join(root, split, client, label)
                os.makedirs(folder)
                with open(os.path.join(folder, b"\xfe.png"), "wb") as file:
                    Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(file, "png")


@pytest.mark.slow
def test_folders_whose_names_are_not_utf_8(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        images(os.fsencode(tmp_path / "images"), np.random.default_rng(0))
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    head = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 64, "out_features": 2}}
    logger = [{"class_path": name} for name in ("lit_epgan.runs.MetricsFile", "lightning.pytorch.loggers.WandbLogger")]
    words = ["--config", "digits_classifier.yaml", "--data", "lit_epgan.datamodules.FolderDataModule"]
    words += ["--data.path", "images", "--data.image_size", "8", "--data.color", "grayscale"]
    words += ["--model.head", json.dumps(head), "--trainer.logger", json.dumps(logger)]
    assert main(["fit", *words, "--trainer.max_epochs", "1"]) == 0
    assert main(["fit", *words, "--trainer.max_epochs", "2", "--ckpt_path", "last"]) == 0
    run = tmp_path / "runs" / "digits_classifier"
    assert {r"accuracy/client/caf\udce9", "accuracy/client/[bold] $x^$"} <= set(pd.read_csv(run / "metrics.csv"))
    assert (run / "pictures" / "partition.png").is_file()


def test_what_is_said_is_one_line_and_does_nothing_to_a_terminal(monkeypatch, capsys, caplog):
    def refuse(args: list[str]) -> int:
        raise UserError("client a\u2028b\x1b[31m\nerror: is empty")

    monkeypatch.setattr("lit_epgan.cli.main._run", refuse)
    assert main(["fit"]) == 2
    assert capsys.readouterr().err == "error: client a\\u2028b\\x1b[31m\\nerror: is empty\n"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_: print(category.__name__, message)  # type: ignore[assignment]
        with printable_messages():
            warnings.warn("client \x1b[31m sits out\nfor good", stacklevel=1)
            logging.getLogger("x").warning("client %s sits out", "\x1b[31m")
        warnings.warn("as it was: \x1b", stacklevel=1)
    assert capsys.readouterr().out == "UserWarning client \\x1b[31m sits out\nfor good\nUserWarning as it was: \x1b\n"
    assert caplog.messages == [r"client \x1b[31m sits out"]
