"""Small federations for the tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback, RoundCheckpoint
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


def plain_trainer(**options: Any) -> Trainer:
    """Lightning's own, in double precision on the CPU, which writes and prints nothing."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {"accelerator": "cpu", "precision": "64-true", "num_sanity_val_steps": 0, **dict.fromkeys(off, False)}
    return Trainer(**(quiet | options))


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
    how = {k: options.pop(k) for k in ("ckpt_path", "weights_only") if k in options}
    callbacks = [*options.pop("callbacks", []), FederationCallback(**ours)]
    trainer = plain_trainer(max_epochs=rounds, callbacks=callbacks, default_root_dir=folder, **options)
    trainer.fit(module, datamodule=datamodule, **how)
    return trainer


def assert_resumes(
    module: Callable[[], LightningModule],
    data: Callable[[], FederatedDataModule],
    algorithm: Callable[[], Any],
    folder: Path,
    rounds: int = 3,
    cut: int = 2,
    **options: Any,
) -> None:
    """A run that is stopped after ``cut`` rounds and resumed ends with the bits of the whole run."""

    def end(rounds: int, **more: Any) -> dict[str, torch.Tensor]:
        own = module()
        trainer = fit(own, data(), rounds, folder, algorithm=algorithm(), **options, **more)
        callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))  # type: ignore[attr-defined]
        state = callback.state_dict()
        server = state["server"] | {name: state[name] for name in ("networks",) if state.get(name) is not None}
        # what all runs on these data have spent is not this run's alone
        kept = {f"server {name}": value for name, value in server.items() if not name.startswith("privacy.")}
        return own.state_dict() | kept

    whole = end(rounds)
    end(cut, enable_checkpointing=True, callbacks=[RoundCheckpoint()])
    resumed = end(rounds, ckpt_path=folder / "checkpoints" / "last.ckpt")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
