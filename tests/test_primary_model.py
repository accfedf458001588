"""The primary model: any LightningModule with ``predict_step``, trained here or from a checkpoint that runs no code."""

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
from lit_epgan.inspection.user_records import CHUNK, Primary, Records, labels, loaded, trained
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import Classifier, Regression
from tests.federations import federation
from tests.refusals import assert_refused
from tests.test_cli import refusal


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(1, 2), torch.nn.Dropout(0.9)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch[0].flatten().tolist())
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        assert not torch.is_grad_enabled()
        return self.dropout(self.layer(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def records(n):
    x = torch.linspace(-1, 1, n)[:, None]
    return Records((x, (x[:, 0] > 0).long()), torch.zeros(n).long(), 1)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"class": torch.tensor([1, 0])}, [1, 0]),
        (torch.tensor([1, 0], dtype=torch.int8), [1, 0]),
        (torch.tensor([[0.1, 0.2, 0.9], [3.0, 1.0, 2.0]]), [2, 0]),
    ],
)
def test_labels_are_found_in_what_a_model_predicts(answer, expected):
    found = labels(answer, 2)
    assert (found.dtype, found.tolist()) == (torch.int64, expected)


@pytest.mark.parametrize(
    "answer", [None, torch.zeros(2), torch.zeros(3).long(), torch.zeros(2, 2, 2), {"score": torch.zeros(2).long()}]
)
def test_what_is_no_label_is_refused(answer):
    assert_refused("predict_step gives no labels", labels, answer, 2)


def test_a_model_is_asked_in_chunks_and_as_in_evaluation():
    module = Linear()
    with torch.no_grad():
        module.layer.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        module.layer.bias.zero_()
    own = records(CHUNK + 10)
    predicted = Primary(module)(own)
    assert torch.equal(predicted, own.y)


def test_training_repeats_and_leaves_the_random_streams_alone():
    torch.manual_seed(5)
    before, start = torch.get_rng_state(), Linear().state_dict()
    torch.set_rng_state(before)
    runs = []
    for seed in (0, 0, 1):
        module = Linear()
        module.load_state_dict(start)
        state = torch.get_rng_state()
        runs.append(trained(module, records(12), 2, 4, seed))
        assert torch.equal(torch.get_rng_state(), state)
    first, again, other = runs
    assert first.batches == again.batches != other.batches
    assert [len(batch) for batch in first.batches] == [4] * 6
    assert sorted(x for batch in first.batches[:3] for x in batch) == pytest.approx(records(12).x.flatten().tolist())
    assert first.batches[:3] != first.batches[3:]
    assert torch.equal(Primary(first)(records(12)), records(12).y)


def test_a_checkpoint_is_loaded_as_data(tmp_path):
    torch.save({"state_dict": (own := Linear()).state_dict()}, tmp_path / "own.ckpt")
    module = loaded(Linear(), tmp_path / "own.ckpt")
    assert torch.equal(module.layer.weight, own.layer.weight)
    for name, content in (("list", [1]), ("none", {"weights": 1})):
        torch.save(content, tmp_path / name)
        assert_refused("holds no state_dict", loaded, Linear(), tmp_path / name)
    torch.save({"state_dict": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "other.ckpt")
    assert_refused("of another model", loaded, Linear(), tmp_path / "other.ckpt")


CLASSIFIER = ["--config", "digits_classifier.yaml", "--trainer.max_epochs", "1", "--data.clients", "2"]


def predicted(folder, module, data):
    writer = PredictionWriter()
    options: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "callbacks": [writer]}
    Trainer(default_root_dir=folder, **options).predict(module, datamodule=data)
    assert writer.written == folder / "predictions.csv"
    return pd.read_csv(writer.written, keep_default_na=False, float_precision="round_trip")


def test_the_command_writes_a_classifiers_answers(folder, capsys):
    assert main(["fit", *CLASSIFIER]) == 0
    assert main(["predict", *CLASSIFIER]) == 0
    file = Path("runs") / "digits_classifier" / "predictions.csv"
    assert f"Predictions are in {file}." in capsys.readouterr().err
    table = pd.read_csv(file, float_precision="round_trip")
    weights = torch.load(file.parent / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    data = ImageDataModule(dataset="digits", partition="iid", clients=2).data.test
    images = data.fetch(list(range(len(data))))[0].flatten(1)  # type: ignore[attr-defined]
    layers = [(weights[n], weights[n.replace("weight", "bias")]) for n in weights if n.endswith("weight")]
    hidden = (images @ layers[0][0].T + layers[0][1]).relu()
    probability, label = (hidden @ layers[1][0].T + layers[1][1]).softmax(1).max(1)
    assert list(table) == ["record", "split", "class", "probability"]
    assert table["record"].tolist() == list(range(len(images)))
    assert (set(table["split"]), table["class"].tolist()) == ({"test"}, label.tolist())
    torch.testing.assert_close(torch.tensor(table["probability"]).float(), probability)


def classifier():
    torch.manual_seed(0)
    return Classifier(nn.Identity(), nn.Linear(3, 2))


@pytest.mark.usefixtures("folder")
def test_clients_and_classes_are_named(tmp_path):
    """Those of validation data by client, with names that a spreadsheet would compute."""
    sets = {name: TensorDataset(torch.randn(n, 3), torch.zeros(n).long()) for name, n in (("=1+1", 5), ("a\nb", 3))}
    data = FederatedDataModule.from_datasets(sets, batch_size=2, val_dataset=sets)
    data.label_names = ["@cat", "dog"]  # type: ignore[attr-defined]
    table = predicted(tmp_path, classifier(), data)
    assert list(table) == ["record", "split", "client", "class", "name", "probability"]
    assert table["client"].tolist() == ["'=1+1"] * 5 + [r"a\nb"] * 3
    assert set(table["split"]) == {"val"}
    assert table["name"].tolist() == [["'@cat", "dog"][k] for k in table["class"]]


class Plain(LightningModule):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.answer(batch[0])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("columns", "names"), [(1, ["output_0"]), (None, ["output_0"]), (2, ["output_0", "output_1"])])
def test_any_modules_answers(tmp_path, columns, names):
    def answer(x: Tensor) -> Tensor:
        return x[:, 0] if columns is None else x[:, :columns]

    data = federation(test_dataset=TensorDataset(torch.arange(15.0).view(5, 3)))
    table = predicted(tmp_path, Plain(answer), data)
    assert (list(table)[2:], table["output_0"].tolist()) == (names, [0, 3, 6, 9, 12])
    linear = Regression(nn.Identity(), nn.Linear(3, 2))
    assert list(predicted(tmp_path, linear, data)) == ["record", "split", "output_0", "output_1"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("answer", "words"), [(lambda x: x[:, :, None], r"a tensor \(5, 3, 1\)"), (str, "a str")])
def test_what_is_no_table_is_refused(tmp_path, answer, words):
    data = federation(test_dataset=TensorDataset(torch.arange(15.0).view(5, 3)))
    with pytest.raises(UserError, match=rf"Plain's predict_step returns {words} for a batch, which is no table"):
        predicted(tmp_path, Plain(answer), data)


def test_nothing_to_predict_is_a_sentence(folder, capsys):
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
