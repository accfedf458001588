"""What a person gets wrong in the data, the weights or the settings: one sentence each, exit code 2, nothing lost."""

import json
from pathlib import Path

import pytest
import torch

from lit_epgan.cli.main import main
from tests.test_cli import TINY, folder, refusal

__all__ = ["folder"]  # the fixture: an empty working directory

DIGITS = [
    *("--config", "digits.yaml", "--trainer.max_epochs", "2", "--data.warmup_steps", "2", "--data.local_steps", "2"),
    *("--data.clients", "2", "--model.lr_decay", "null"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "cifar.yaml"], "--data.download true"),
        (["--config", "digits.yaml", "--data.dataset", "fashion_mnist"], "--data.download true"),
        ([*DIGITS, "--data.clients", "4000"], "4000"),
        ([*DIGITS, "--data.partition", "dirichlet", "--data.clients", "1400", "--data.beta", "0.01"], "client"),
        ([*DIGITS, "--data.partition", "iid", "--data.clients", "2000"], "2000"),
        ([*DIGITS, "--data.clients_per_round", "5"], "at most 2"),
        ([*DIGITS, "--model.lr", "nan"], "lr"),
        ([*DIGITS, "--trainer.max_steps", "5"], "count rounds with max_epochs"),
        ([*TINY, "--federation.local", '["nothing.*"]'], "nothing.*"),
    ],
)
def test_refused_in_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert sentence in refusal(capsys, "fit", *arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data.batch_size", "0"], "data.batch_size is 0; it must be at least 1"),
        (
            ["--federation.algorithm", "lit_epgan.federated.FedProx", "--federation.algorithm.mu", "-1"],
            "FedProx's mu is -1.0; it must be 0 (FedAvg) or more",
        ),
    ],
)
def test_what_a_class_refuses_is_told_in_its_own_words(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """The parser wraps it in a list of all types that the key might have had."""
    assert refusal(capsys, "fit", *DIGITS, *arguments) == sentence


def test_wrong_inception_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    weights = tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    weights.parent.mkdir()
    weights.write_bytes(b"something else")
    metrics = {"class_path": "lit_epgan.callbacks.GenerativeMetrics", "init_args": {"extractor": "inception"}}
    told = refusal(capsys, "fit", *DIGITS, "--trainer.callbacks", json.dumps([metrics]))
    assert str(weights) in told
    assert "6726825d" in told


def test_a_run_is_not_resumed_under_another_algorithm_or_with_other_clients(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where changes are accepted: what the checkpoint holds of the clients is of no use to others."""
    assert main(["fit", *TINY]) == 0
    run = folder / "runs" / "toy"
    before = {path: path.read_bytes() for path in run.rglob("*.c*") if path.suffix in (".ckpt", ".csv")}
    resume = ["--ckpt_path", "last", "--trainer.max_epochs", "3", "--accept_changes", "true"]
    other = [word for word in TINY if not word.startswith("--federation.algorithm") and word != "20"]
    told = refusal(capsys, "fit", *other, "--federation.algorithm", "lit_epgan.federated.FedAvg", *resume)
    assert "GeneratorSites" in told
    assert "FedAvg" in told
    told = refusal(capsys, "fit", *TINY, "--data.clients", "3", *resume)
    assert "client-2" in told
    assert {path: path.read_bytes() for path in before} == before
