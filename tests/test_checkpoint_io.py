"""The Trainer's checkpoints have a digest, and none passes through the system's temporary folder."""

import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_epgan import tensor_file
from lit_epgan.callbacks import FederationCallback, RoundCheckpoint
from lit_epgan.errors import UserError
from tests.federations import federation
from tests.modules import Regression
from tests.traps import Trap


def fitted(folder: Path, rounds: int, **options: object) -> Regression:
    module = Regression()
    trainer = Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        precision="64-true",
        logger=False,
        callbacks=[FederationCallback(), RoundCheckpoint(), ModelCheckpoint(folder / "own", save_top_k=-1)],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=federation(), **options)  # type: ignore[arg-type]
    return module


def test_every_checkpoint_has_a_digest_and_is_written_beside_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    torch.manual_seed(0)
    fitted(tmp_path, 2)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.suffix for path in files} == {".ckpt"}
    for path in files:
        tensor_file.load(path, sealed=True)
        assert torch.load(path, weights_only=True).keys() >= {"state_dict", "loops"}


def test_one_that_is_damaged_after_it_was_chosen_is_not_read(tmp_path: Path) -> None:
    fitted(tmp_path, 1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes().replace(b"state_dict", b"state_dicx"))
    with pytest.raises(UserError, match=r"last\.ckpt is damaged: its bytes are not those that were saved"):
        fitted(tmp_path, 2, ckpt_path=last)


def test_no_code_is_run_unless_asked_for(tmp_path: Path) -> None:
    fitted(tmp_path, 1)
    last, marker = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "code-was-run"
    tensor_file.save(tensor_file.load(last) | {"hyper_parameters": Trap(marker)}, last)
    for allowed in (None, True):
        with pytest.raises(UserError, match="only if you trust its maker"):
            fitted(tmp_path, 2, ckpt_path="last", weights_only=allowed)
        assert not marker.exists()
    fitted(tmp_path, 2, ckpt_path="last", weights_only=False)
    assert marker.exists()
