"""Every client's metrics after ``validate`` and ``test``: the table printed, the picture, the file."""

import io
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image
from rich.console import Console
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import ClientMetrics, ClientReport, FederationCallback
from lit_epgan.callbacks.client_report import DRAWN, PRINTED, WORST, clients_picture, print_clients, worst_first
from lit_epgan.cli.main import main
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.metrics.over_clients import ClientResults
from lit_epgan.runs.loggers import best_of, headlines
from tests.federations import federation, fit
from tests.test_client_metrics import evaluator
from tests.test_personal_evaluation import HeldOut, data, held_out


def results(clients: int = 3) -> ClientResults:
    """AUC is better the higher, loss the lower, and of ``share`` nobody knows; the last client has no AUC."""
    names = [f"ward-{k}" for k in range(clients)]
    values = [0.5 + 0.4 * math.sin(k) for k in range(clients)]
    auc = dict(enumerate(values[:-1]))
    loss = {k: 2 * value for k, value in enumerate(values)}
    ways = {"auc": True, "loss": False, "share": None}
    return ClientResults(names, {k: 1000 + k for k in range(clients)}, {"auc": auc, "loss": loss, "share": loss}, ways)


def printed(found: ClientResults) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    print_clients(found, console)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_leaves_table_picture_and_file(stage, tmp_path, capsys):
    callbacks = [FederationCallback(), ClientMetrics(lower_is_better=["*_loss"]), ClientReport()]
    trainer = evaluator(*callbacks, default_root_dir=tmp_path)
    getattr(trainer, stage)(HeldOut(), datamodule=data(), verbose=False)
    metric = "test_loss" if stage == "test" else "val_loss"
    table = pd.read_csv(tmp_path / f"{stage}_clients.csv", index_col="client", keep_default_na=False)
    logged = [float(trainer.callback_metrics[f"{metric}/client/{name}"]) for name in held_out()]
    assert table.index.tolist() == ["client-0", "client-2"]
    assert table["records"].tolist() == [5, 11]
    assert table[metric].to_numpy() == pytest.approx(np.array(logged), rel=1e-5)
    assert table["worst_in"].tolist() == [metric if value == max(logged) else "" for value in logged]
    with Image.open(tmp_path / "pictures" / f"{stage}_clients.png") as picture:
        assert min(picture.size) > 200
    out = capsys.readouterr().out
    assert f"{max(logged):.4g} worst" in out
    assert f"{stage}_clients.csv" in out


def test_a_fit_leaves_nothing_and_headlines_are_one_of_each_family(tmp_path):
    fit(HeldOut(), data(), 1, tmp_path, callbacks=[ClientReport()])
    common = federation(test_dataset=held_out()["client-0"])
    evaluator(FederationCallback(), ClientReport(), default_root_dir=tmp_path).test(HeldOut(), common, verbose=False)
    assert list(tmp_path.iterdir()) == []
    names = ["val_loss", "accuracy", "val_accuracy", "fid_digits_val", "is_digits", "fid_digits"]
    names += ["loss", "wer_low", "wer"]
    assert headlines(names) == ["fid_digits", "is_digits", "wer", "accuracy", "val_loss"]


def test_the_worst_client_is_marked_in_each_metric():
    lines = printed(results())
    rows = {line.split()[0]: line.split() for line in lines if line.strip().startswith("ward-")}
    assert rows["ward-0"][1:] == ["1,000", "0.5", "worst", "1", "1"]
    assert rows["ward-1"][1:] == ["1,001", "0.8366", "1.673", "1.673"]
    assert rows["ward-2"][1:] == ["1,002", "not", "defined", "1.727", "worst", "1.727"]
    (mean,) = [line.split()[3:] for line in lines if "mean over clients" in line]
    assert mean == ["0.6683", "1.467", "1.467"]


def test_six_metrics_headings_are_whole_in_80_columns():
    names = ("accuracy", "cross_entropy", "auroc", "average_precision", "calibration_error", "majority")
    found = ClientResults(["north"], {0: 62}, {name: {0: 0.79031} for name in names}, dict.fromkeys(names, True))
    shown = io.StringIO()
    print_clients(found, Console(file=shown, width=80))
    assert {"accuracy", "entropy", "precision", "calibration", "majority"} <= set(shown.getvalue().split())


def test_of_many_clients_the_worst_are_printed_and_drawn():
    found = results(200)
    lines = printed(found)
    shown = [line.split()[0] for line in lines if line.strip().startswith("ward-")]
    assert shown == [found.names[k] for k in worst_first(found, "auc")[:PRINTED]]
    assert any("of 200 clients with the worst auc" in line for line in lines)
    panels = [axes for axes in clients_picture(found).axes if axes.get_visible()]
    assert [len(axes.get_yticks()) for axes in panels] == [DRAWN] * 3
    assert f"{DRAWN} of 199 clients" in panels[0].get_xlabel()


def test_nan_is_worst_and_a_metric_with_a_direction_chooses_who_is_printed():
    found = results(200)
    found.values = {name: found.values[name] for name in ("share", "loss")}
    found.higher_is_better = {"share": None, "loss": False}
    assert any("of 200 clients with the worst loss" in line for line in printed(found))
    found = results()
    found.values["loss"][1] = math.nan
    assert worst_first(found, "loss") == [1, 2, 0]
    assert found.worst()["loss"] == 1


def test_the_picture_has_the_worst_on_top_and_red():
    panels = clients_picture(results()).axes
    for axes, (metric, first) in zip(panels, [("auc", "ward-0"), ("loss", "ward-2"), ("share", "ward-0")], strict=True):
        assert axes.get_title() == metric
        assert axes.get_yticklabels()[0].get_text() == first
        low, high = axes.get_ylim()
        assert low > high  # row 0 is on top
        colours = [to_hex(colour) for colour in axes.collections[0].get_facecolors()]
        assert (colours[0] == WORST) == (metric != "share")
        assert WORST not in colours[1:]


def test_the_documentations_example_runs(folder, capsys):
    """docs/evaluation.md's, as it stands: the islands' rule is another one, and the table says who is the worst."""
    text = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) == 14
    torch.manual_seed(0)
    exec(compile(example, "docs/evaluation.md", "exec"), {})
    table = pd.read_csv("test_clients.csv", index_col="client", keep_default_na=False)
    assert table["records"].tolist() == [100, 100, 100]
    worst = {"north": "", "south": "calibration_error", "islands": "accuracy cross_entropy auroc average_precision"}
    assert table["worst_in"].to_dict() == worst
    assert table.loc["islands", "accuracy"] < 0.7 < table.loc["north", "accuracy"]
    out = capsys.readouterr().out
    named = re.findall(r"^\| `M(/[a-z_]+)`", text, re.MULTILINE)
    assert len(named) == 5
    assert all(f"accuracy{name}" in out for name in named)


class Wards(FederatedDataModule):
    def load(self) -> ClientData:
        sets = {name: TensorDataset(torch.randn(20, 2), torch.arange(20) % 2) for name in ("north", "south")}
        return ClientData(sets, test=sets)


CONFIG = """
model:
  class_path: lit_epgan.modules.Classifier
  init_args:
    backbone: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 4}}
    head: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 2}}
data: {class_path: tests.test_client_report.Wards}
federation: {class_path: lit_epgan.callbacks.FederationCallback, init_args: {local: ["head.*"]}}
trainer:
  {max_epochs: 1, accelerator: cpu, logger: false, callbacks: [{class_path: lit_epgan.callbacks.RoundCheckpoint}]}
"""


def test_the_command_line_reports_by_itself(folder, tmp_path, capsys):
    (tmp_path / "wards.yaml").write_text(CONFIG)
    for command in ("fit", "test"):
        assert main([command, "--config", "wards.yaml"]) == 0
    table = pd.read_csv(tmp_path / "runs" / "wards" / "test_clients.csv", index_col="client")
    assert table.index.tolist() == ["north", "south"]
    assert capsys.readouterr().out.count("Metrics by client") == 1
    assert main(["test", "--config", "wards.yaml", "--trainer.callbacks+", "lit_epgan.callbacks.ClientReport"]) == 0
    assert capsys.readouterr().out.count("Metrics by client") == 1


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("fid", "min"),
        ("fid_digits", "min"),
        ("is_digits", "max"),
        ("wer_dev", "min"),
        ("val_accuracy", "max"),
        ("test_auroc", "max"),
        ("val_loss", "min"),
        ("loss", None),
        ("loss/generator", None),
        ("island", None),  # no family's name
        ("fidelity", None),
        ("union/fid_digits", None),
        ("accuracy/client/ward-a", None),
        ("client/steps", None),
    ],
)
def test_a_headline_metric_is_known_by_its_name(name, best):
    assert best_of(name) == best
