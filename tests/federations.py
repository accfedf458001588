"""Small federations for the tests."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule

SIZES = (20, 7, 34, 12)


def client_sets(sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float64) -> list[TensorDataset]:
    generator = torch.Generator().manual_seed(5)
    sets = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, 3, generator=generator, dtype=dtype) + k
        sets.append(
            TensorDataset(x, x.sum(1, keepdim=True) * (k + 1) + torch.randn(n, 1, generator=generator, dtype=dtype))
        )
    return sets


def federation(**options: Any) -> FederatedDataModule:
    sizes = options.pop("sizes", SIZES)
    return FederatedDataModule.from_datasets(client_sets(sizes), batch_size=8, **options)


def fit(
    module: LightningModule,
    datamodule: FederatedDataModule,
    rounds: int = 3,
    folder: Path | None = None,
    **options: Any,
) -> Trainer:
    """Federate ``module`` in double precision on the CPU; options for the Trainer or, by name, for the callback."""
    names = ("algorithm", "optimizer_state", "buffers", "local", "mechanism", "sampler", "aggregator")
    ours = {k: options.pop(k) for k in names if k in options}
    ckpt_path = options.pop("ckpt_path", None)
    callbacks = [*options.pop("callbacks", []), FederationCallback(**ours)]
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "precision": "64-true",
    }
    trainer = Trainer(max_epochs=rounds, callbacks=callbacks, default_root_dir=folder, **(defaults | options))

    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer
