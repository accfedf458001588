"""``predict`` on a model that answers records: a table of what it answers, or a sentence that says what is missing."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import PredictionWriter
from lit_epgan.cli.main import main
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.images import ImageDataModule
from lit_epgan.errors import UserError
from lit_epgan.modules import Classifier, Regression
from tests.federations import federation
from tests.test_cli import folder, refusal

__all__ = ["folder"]  # the fixture: an empty working directory

CLASSIFIER = ["--config", "digits_classifier.yaml", "--trainer.max_epochs", "1", "--data.clients", "2"]


def predicted(folder: Path, module: LightningModule, data: Any) -> pd.DataFrame:
    writer = PredictionWriter()
    options: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "callbacks": [writer]}
    Trainer(default_root_dir=folder, **options).predict(module, datamodule=data)
    assert writer.written == folder / "predictions.csv"
    return pd.read_csv(writer.written, keep_default_na=False, float_precision="round_trip")


def test_the_command_writes_a_classifiers_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *CLASSIFIER]) == 0
    assert main(["predict", *CLASSIFIER]) == 0
    file = Path("runs") / "digits_classifier" / "predictions.csv"
    assert f"Predictions are in {file}." in capsys.readouterr().err
    table = pd.read_csv(file, float_precision="round_trip")
    weights = torch.load(file.parent / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    data = ImageDataModule(dataset="digits", partition="iid", clients=2).data.test
    assert data is not None
    images = data.fetch(list(range(len(data))))[0].flatten(1)  # type: ignore[attr-defined]
    layers = [(weights[n], weights[n.replace("weight", "bias")]) for n in weights if n.endswith("weight")]
    hidden = (images @ layers[0][0].T + layers[0][1]).relu()
    probability, label = (hidden @ layers[1][0].T + layers[1][1]).softmax(1).max(1)
    assert list(table) == ["record", "split", "class", "probability"]
    assert table["record"].tolist() == list(range(len(images)))
    assert set(table["split"]) == {"test"}
    assert table["class"].tolist() == label.tolist()
    torch.testing.assert_close(torch.tensor(table["probability"]).float(), probability)


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier(nn.Identity(), nn.Linear(3, 2))


def test_clients_and_classes_are_named(tmp_path: Path) -> None:
    """Those of validation data by client, with names that a spreadsheet would compute."""
    sets = {name: TensorDataset(torch.randn(n, 3), torch.zeros(n).long()) for name, n in (("=1+1", 5), ("a\nb", 3))}
    data = FederatedDataModule.from_datasets(sets, batch_size=2, val_dataset=sets)
    data.label_names = ["@cat", "dog"]  # type: ignore[attr-defined]
    table = predicted(tmp_path, classifier(), data)
    assert list(table) == ["record", "split", "client", "class", "name", "probability"]
    assert table["client"].tolist() == ["'=1+1"] * 5 + [r"a\nb"] * 3
    assert set(table["split"]) == {"val"}
    assert table["name"].tolist() == [["'@cat", "dog"][k] for k in table["class"]]


def test_a_regressions_outputs_are_columns(tmp_path: Path) -> None:
    data = federation(test_dataset=TensorDataset(torch.randn(7, 3), torch.zeros(7, 2)))
    module = Regression(nn.Identity(), nn.Linear(3, 2))
    table = predicted(tmp_path, module, data)
    assert list(table) == ["record", "split", "output_0", "output_1"]
    assert len(table) == 7


class Plain(LightningModule):
    """A module of somebody's own."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.answer(batch[0])


@pytest.mark.parametrize(("columns", "names"), [(1, ["output_0"]), (None, ["output_0"]), (2, ["output_0", "output_1"])])
def test_any_modules_answers(tmp_path: Path, columns: int | None, names: list[str]) -> None:
    def answer(x: Tensor) -> Tensor:
        return x[:, 0] if columns is None else x[:, :columns]

    data = federation(test_dataset=TensorDataset(torch.arange(15.0).view(5, 3)))
    table = predicted(tmp_path, Plain(answer), data)
    assert list(table)[2:] == names
    assert table["output_0"].tolist() == [0, 3, 6, 9, 12]


@pytest.mark.parametrize(("answer", "words"), [(lambda x: x[:, :, None], r"a tensor \(5, 3, 1\)"), (str, "a str")])
def test_what_is_no_table_is_refused(tmp_path: Path, answer: Any, words: str) -> None:
    data = federation(test_dataset=TensorDataset(torch.arange(15.0).view(5, 3)))
    with pytest.raises(UserError, match=rf"Plain's predict_step returns {words} for a batch, which is no table"):
        predicted(tmp_path, Plain(answer), data)


def test_nothing_to_predict_is_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "images" / "a").mkdir(parents=True)
    Image.new("L", (8, 8)).save(folder / "images" / "a" / "x.png")
    words = ["--data", "lit_epgan.datamodules.FolderDataModule", "--data.path", "images", "--data.image_size", "8"]
    callbacks = json.dumps([{"class_path": "lit_epgan.callbacks.RoundCheckpoint"}])
    told = refusal(
        capsys, "predict", "--config", "digits_classifier.yaml", *words, "--data.color", "grayscale",
        "--trainer.callbacks", callbacks,
    )  # fmt: skip
    assert told.startswith("Nothing was predicted: predict goes over the test data")
    assert not (folder / "runs").exists()
