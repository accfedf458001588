"""What a person gets wrong in the data, the weights, the values or the settings: one sentence each, nothing lost."""

import inspect
import json

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.cli.main import main
from lit_epgan.cli.run_setup import ENTRY, hyperparameters, refuse_changes
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import Classifier
from tests.federations import client_sets, fit
from tests.modules import Regression
from tests.refusals import assert_refused
from tests.test_cli import BARE, refusal
from tests.values import SMALL_IMAGES, words_of

pytestmark = pytest.mark.usefixtures("folder")

DIGITS = [
    *("--config", "digits.yaml", "--trainer.max_epochs", "2", "--data.warmup_steps", "2", "--data.local_steps", "2"),
    *("--data.clients", "2", "--model.lr_decay", "null"),
]
FEDPROX = ["--federation.algorithm", "lit_epgan.federated.FedProx", "--federation.algorithm.mu"]


def test_wrong_inception_weights(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    weights = tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    weights.parent.mkdir()
    weights.write_bytes(b"something else")
    metrics = {"class_path": "lit_epgan.callbacks.GenerativeMetrics", "init_args": {"extractor": "inception"}}
    told = refusal(capsys, "fit", *DIGITS, "--trainer.callbacks", json.dumps([metrics]))
    assert str(weights) in told
    assert "6726825d" in told


RESUME = ["--ckpt_path", "last", "--trainer.max_epochs", "3"]


@pytest.mark.slow
def test_what_differs_is_named_and_can_be_accepted_but_for_another_algorithm_and_other_clients(folder, capsys):
    """What the checkpoint holds of the clients is of no use to others."""
    assert main(["fit", *BARE, "--trainer.precision", "64-true"]) == 0
    run = folder / "runs" / "toy"
    before = {path: path.read_bytes() for path in run.rglob("*.c*") if path.suffix in (".ckpt", ".csv")}
    resume = [*BARE, "--trainer.precision", "64-true", *RESUME]
    others = ["--seed_everything", "7", "--model.lr", "0.125", "--data.points", "16"]
    others += ["--federation.algorithm.pool", "30", "--trainer.gradient_clip_val", "1"]
    told = refusal(capsys, "fit", *resume, *others)
    for said in (
        "data.points was 32 and is 16",
        "federation.algorithm.pool was 20 and is 30",
        "model.lr was 0.002 and is 0.125",
        "seed_everything was 0 and is 7",
        "trainer.gradient_clip_val was null and is 1",
        "--accept_changes true",
    ):
        assert said in told
    accept = ["--accept_changes", "true"]
    other = [word for word in resume if not word.startswith("--federation.algorithm") and word != "20"]
    told = refusal(capsys, "fit", *other, "--federation.algorithm", "lit_epgan.federated.FedAvg", *accept)
    assert "GeneratorSites" in told
    assert "FedAvg" in told
    assert "client-2" in refusal(capsys, "fit", *resume, "--data.clients", "3", *accept)
    assert {path: path.read_bytes() for path in before} == before
    free = ["--data.num_workers", "0", "--trainer.log_every_n_steps", "3"]
    accepted = ["--seed_everything", "7", "--model.lr", "0.125"]
    assert main(["fit", *resume, *free, *accepted, *accept]) == 0
    assert sorted(pd.read_csv(run / "metrics.csv")["epoch"].unique()) == [0, 1, 2]
    assert yaml.safe_load((run / "config.yaml").read_text())["accept_changes"] is False  # asked anew the next time
    assert "seed_everything was 7 and is 0" in refusal(capsys, "fit", *resume)


def test_at_most_five_differences_are_named_and_a_class_stands_for_its_arguments(tmp_path):
    old = {"model": {"class_path": "A", "init_args": {f"x{i}": i for i in range(8)}}, "seed_everything": 0}
    path = tmp_path / "x.ckpt"
    tensor_file.save({ENTRY: hyperparameters(old)}, path)
    refuse_changes(path, hyperparameters(old))
    other = {"model": {"class_path": "A", "init_args": {f"x{i}": -i for i in range(8)}}, "seed_everything": 0}
    with pytest.raises(UserError, match=r"model\.x5 was 5 and is -5 and 2 more\. Set them back"):
        refuse_changes(path, hyperparameters(other))
    another = {"model": {"class_path": "B", "init_args": {"y": 1}}, "seed_everything": 0}
    assert_refused(r'settings: model was "A" and is "B"\. Set', refuse_changes, path, hyperparameters(another))
    tensor_file.save({"epoch": 3}, path)  # from before settings were kept
    refuse_changes(path, hyperparameters(another))


def test_places_and_speed_decide_nothing():
    data = {"class_path": "D", "init_args": {"data_dir": "x", "path": "y", "num_workers": 3, "batch_size": 4}}
    trainer = {"max_epochs": 3, "devices": 2, "logger": True, "callbacks": [], "precision": "32-true"}
    found = hyperparameters({"data": data, "trainer": trainer, "ckpt_path": "z"})
    assert {name for name in found if not name.startswith("trainer.")} == {"data", "data.batch_size"}
    assert "trainer.precision" in found
    assert not found.keys() & {"trainer.max_epochs", "trainer.devices", "trainer.logger", "trainer.callbacks"}


def fitted(folder, rounds: int, sizes: tuple[int, ...] = (9, 5), seed: int = 0, **options) -> None:
    datasets = dict(zip("ab", client_sets(sizes), strict=True))
    data = FederatedDataModule.from_datasets(datasets, batch_size=4, seed=seed)
    fit(Regression(), data, rounds, folder, callbacks=[RoundCheckpoint()], enable_checkpointing=True, **options)


def test_from_python_the_seed_and_the_clients_data_are_compared(tmp_path):
    fitted(tmp_path, 1)
    with pytest.raises(UserError, match="has the seed 0, this one's data module 3: resume with the seed"):
        fitted(tmp_path, 2, seed=3, ckpt_path="last")
    with pytest.raises(UserError, match="client b has 5 records, this run's 6: resume with the data"):
        fitted(tmp_path, 2, sizes=(9, 6), ckpt_path="last")
    fitted(tmp_path, 2, ckpt_path="last")
    last = tmp_path / "checkpoints" / "last.ckpt"
    older = tensor_file.load(last)
    federation = older["callbacks"]["FederationCallback"]
    del federation["seed"], federation["records"]
    tensor_file.save(older, last)
    fitted(tmp_path, 3, seed=3, ckpt_path="last")  # from before these were kept


CLASSIFIER = ["--config", "digits_classifier.yaml", *SMALL_IMAGES, *BARE[-2:]]
TOY = words_of("sites")[1:]
OURS = str(inspect.getsourcefile(Classifier))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data.dataset", "fashion_mnist"], "--data.download true"),
        (["--data.partition", "one_class", "--data.clients", "4000"], "400 of 4000 clients cannot share"),
        (["--data.clients_per_round", "5"], "at most 2"),
        (["--data.beta", "nan"], "data.beta is 'nan', but a number is expected."),
        (["--federation.local", '["nothing.*"]'], "nothing.*"),
        # the parser wraps what a class says in a list of all types that the key might have had
        (["--data.batch_size", "0"], "^data.batch_size is 0; it must be at least 1$"),
        ([*FEDPROX, "-1"], "^FedProx's mu is -1.0; it must be 0 (FedAvg) or more$"),
        (["--model.optimizer.lr", "-1"], "model.optimizer.lr is -1: Invalid learning rate: -1.0"),
        (["--model.optimizer.lr", "nan"], "^model.optimizer.lr is 'nan', but a number is expected.$"),
        (["--model.optimizer.nesterov", "7"], "^model.optimizer.nesterov is '7', but true or false is expected.$"),
        (["--data.num_workers", str(10**12)], "data.num_workers is 1000000000000; it must lie between 0 and"),
        (["--data.beta", "null"], "data.beta is null, but a number is expected."),
        (["--seed_everything", "-1"], "seed_everything is -1; it must lie between 0 and 4294967295."),
        (["--trainer.check_val_every_n_epoch", "-1"], "check_val_every_n_epoch"),
        (["--trainer.accelerator", "tpu"], "trainer.accelerator is tpu: "),
        (["--trainer.default_root_dir", "/dev/null"], "trainer.default_root_dir is /dev/null"),
        (["--trainer.default_root_dir", "s3://bucket/run"], "trainer.default_root_dir is s3://bucket/run"),
        (["--model.backbone.hidden", f"[{10**12}]"], "hidden is [1000000000000]: that needs 238,419 GiB"),
        (["--model.backbone.hidden", f"[{2**63}]"], f"model.backbone.hidden is [{2**63}]: that needs too much memory"),
        (["--model.backbone.hidden", "[-1]"], "model.backbone.hidden is [-1]: a multilayer perceptron"),
        (["--model.head.in_features", "63"], "the backbone gives 64 features, the head takes 63"),
        (["--model.head.out_features", "3"], "the labels go from 0 to 9, the head gives 3 outputs"),
        (["--model.backbone.data_shape", "[1, 8, 9]"], "model.backbone.data_shape is [1, 8, 9]: mat1 and mat2 shapes"),
    ],
)
def test_the_sentence_names_the_key(capsys, words, sentence):
    assert sentence in f"^{refusal(capsys, 'fit', *CLASSIFIER, *words)}$"


def test_values_beyond_the_machine_and_keys_that_are_not_to_blame(capsys):
    told = refusal(capsys, "fit", *TOY, "--data.points", str(10**12))
    assert told == "data.points is 1000000000000: that needs 14,901 GiB of memory"
    # null is what a network has of much that it was not given
    words = ["--model.lr_decay", "null", "--trainer.callbacks+", "tests.test_bad_input.OutOfOrder"]
    assert refusal(capsys, "fit", *TOY, *words) == "The reader is out of order."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
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


class OutOfOrder(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise UserError("The reader is out of order.")


def test_faults_of_the_package_or_of_the_users_code_and_debugging_show_tracebacks(monkeypatch, folder):
    monkeypatch.setenv("LIT_EPGAN_DEBUG", "1")
    with pytest.raises(Exception, match="Invalid learning rate"):
        main(["fit", *CLASSIFIER, "--model.optimizer.lr", "-1"])
    (folder / "own_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "own.yaml").write_text("model: {class_path: own_module.Own}")
    with pytest.raises(ValueError, match="a fault of -1"):
        main(["fit", *CLASSIFIER, "--config", "own.yaml", "--trainer.max_time", "null", "--data.split_seed", "-1"])
    source = compile("def loss(self, outputs, targets):\n raise RuntimeError('a fault of the program')", OURS, "exec")
    names = {}
    exec(source, names)  # as if it stood in the package's own file
    monkeypatch.setattr(Classifier, "loss", names["loss"])
    with pytest.raises(RuntimeError, match="a fault of the program"):
        main(["fit", *CLASSIFIER])
