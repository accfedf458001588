"""Where there is no GPU, no step searches the disk for NVIDIA's library."""

import os

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lit_epgan.callbacks import FederationCallback

SEARCH = "PYTORCH_NVML_BASED_CUDA_CHECK"


@pytest.mark.parametrize(("gpu", "searches"), [(False, "0"), (True, "1")])
def test_a_federation_in_a_script_makes_no_search(monkeypatch: pytest.MonkeyPatch, gpu: bool, searches: str) -> None:
    """With a GPU, Lightning's setting stands."""
    monkeypatch.setenv(SEARCH, "1")  # as Lightning's import sets it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    callback = FederationCallback()
    trainer = Trainer(accelerator="cpu", callbacks=[callback], **off)
    callback.setup(trainer, LightningModule(), "validate")
    assert os.environ[SEARCH] == searches
