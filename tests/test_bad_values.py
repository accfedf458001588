"""A value that cannot be is refused in one sentence that names its key; other people's faults stay tracebacks."""

import inspect
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_epgan.cli.main import main
from lit_epgan.errors import UserError
from lit_epgan.modules import Classifier
from tests.test_cli import refusal
from tests.values import SMALL_IMAGES, words_of

pytestmark = pytest.mark.usefixtures("folder", "only_fit")

CLASSIFIER = ["--config", "digits_classifier.yaml", *SMALL_IMAGES]
TOY = words_of("sites")[1:]
OURS = str(inspect.getsourcefile(Classifier))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model.optimizer.lr", "-1"], "model.optimizer.lr is -1: Invalid learning rate: -1.0"),
        (["--data.num_workers", str(10**12)], "data.num_workers is 1000000000000; it must lie between 0 and"),
        (["--data.beta", "null"], "data.beta is null, but a number is expected."),
        (["--seed_everything", "-1"], "seed_everything is -1; it must lie between 0 and 4294967295."),
        (["--trainer.accumulate_grad_batches", "0"], "accumulate_grad_batches"),
        (["--trainer.check_val_every_n_epoch", "-1"], "check_val_every_n_epoch"),
        (["--trainer.accelerator", "tpu"], "trainer.accelerator is tpu: "),
        (["--trainer.default_root_dir", "/dev/null"], "trainer.default_root_dir is /dev/null"),
        (["--trainer.default_root_dir", "s3://bucket/run"], "trainer.default_root_dir is s3://bucket/run"),
        (
            ["--model.backbone.hidden", f"[{10**12}]"],
            "model.backbone.hidden is [1000000000000]: that needs 238,419 GiB",
        ),
        (["--model.backbone.hidden", f"[{2**63}]"], f"model.backbone.hidden is [{2**63}]: that needs too much memory"),
        (["--model.backbone.hidden", "[-1]"], "model.backbone.hidden is [-1]: a multilayer perceptron"),
        (["--model.head.in_features", "63"], "the backbone gives 64 features, the head takes 63"),
        (["--model.head.out_features", "3"], "the labels go from 0 to 9, the head gives 3 outputs"),
        (["--model.backbone.data_shape", "[1, 8, 9]"], "model.backbone.data_shape is [1, 8, 9]: mat1 and mat2 shapes"),
    ],
)
def test_the_sentence_names_the_key(capsys, words, sentence):
    assert sentence in refusal(capsys, "fit", *CLASSIFIER, *words)


def test_more_points_than_memory_holds(capsys):
    told = refusal(capsys, "fit", *TOY, "--data.points", str(10**12))
    assert told == "data.points is 1000000000000: that needs 14,901 GiB of memory"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: {init_args: {beta: .nan}}", "data.beta is nan, but a finite number is expected."),
        ("model: {init_args: {optimizer: {init_args: {lr: .inf}}}}", "model.optimizer.lr is inf, but a finite number"),
        ("data: {init_args: {batch_size: null}}", "data.batch_size is null, but a whole number is expected."),
    ],
)
def test_a_config_file_s_values_are_looked_at_as_well(folder, capsys, text, sentence):
    (folder / "own.yaml").write_text(text)
    assert sentence in refusal(capsys, "fit", *CLASSIFIER, "--config", "own.yaml")


OWN = """
from lit_epgan.modules import Classifier

class Own(Classifier):
    def training_step(self, batch, batch_idx):
        raise ValueError("a fault of -1")
"""


def test_a_fault_in_the_user_s_own_code_stays_a_traceback(folder, monkeypatch):
    (folder / "own_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "own.yaml").write_text("model: {class_path: own_module.Own}")
    with pytest.raises(ValueError, match="a fault of -1"):
        main(["fit", *CLASSIFIER, "--config", "own.yaml", "--trainer.max_time", "null", "--data.split_seed", "-1"])


class OutOfOrder(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise UserError("The reader is out of order.")


def test_a_key_that_has_nothing_to_do_with_it_is_not_blamed(capsys):
    """null is what a network has of much that it was not given."""
    words = ["--model.lr_decay", "null", "--trainer.callbacks+", "tests.test_bad_values.OutOfOrder"]
    assert refusal(capsys, "fit", *TOY, *words) == "The reader is out of order."


def test_a_fault_of_the_package_stays_a_traceback(monkeypatch):
    source = compile("def loss(self, outputs, targets):\n raise RuntimeError('a fault of the program')", OURS, "exec")
    names: dict[str, Any] = {}
    exec(source, names)  # as if it stood in the package's own file
    monkeypatch.setattr(Classifier, "loss", names["loss"])
    with pytest.raises(RuntimeError, match="a fault of the program"):
        main(["fit", *CLASSIFIER])


def test_the_traceback_is_shown_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("LIT_EPGAN_DEBUG", "1")
    with pytest.raises(Exception, match="Invalid learning rate"):
        main(["fit", *CLASSIFIER, "--model.optimizer.lr", "-1"])
