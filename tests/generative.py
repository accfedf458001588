"""Images, an extractor that needs no weights, and what the tests of generative callbacks run them with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch_fidelity.metric_fid import fid_features_to_statistics

from lit_epgan.metrics.feature_extractors import FeatureExtractor
from lit_epgan.metrics.image_scores import FeatureStatistics
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator


def feature_statistics(features: Tensor) -> FeatureStatistics:
    """Statistics of ``features`` (n, d) all at once, as torch-fidelity has them."""
    statistics = fid_features_to_statistics(features.double().cpu())
    return FeatureStatistics(statistics["mu"], statistics["sigma"])


class Pixels(FeatureExtractor):
    name = "digits"
    counts_classes = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen: list[int] = []

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(len(images))
        return images.flatten(1)[:, :8] * self.scale, images.flatten(1)[:, 10:20] * 9


class Images(LightningDataModule):
    def __init__(self, validates: bool = True, tests: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(60, 1, 8, 8, generator=generator) * 2 - 1
        self.validates, self.tests = validates, tests

    def _loader(self, rows: slice, batch_size: int = 20) -> DataLoader:
        return DataLoader(TensorDataset(self.images[rows], torch.zeros(60)[rows]), batch_size=batch_size)

    def train_dataloader(self) -> DataLoader:
        return self._loader(slice(0, 40))

    def val_dataloader(self) -> Any:
        return self._loader(slice(40, 60)) if self.validates else []

    def test_dataloader(self) -> Any:
        return self._loader(slice(40, 60), 7) if self.tests else []

    predict_dataloader = test_dataloader


class Union(Callback):
    """Offers a further sample set, as a federation does."""

    def extra_samples(self, n: int, start: int = 0) -> dict[str, Tensor]:
        return {"union": torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(n)) * 2 - 1}


class Log(Callback):
    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rounds.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def use_pixels(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Pixels:
    extractor = Pixels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "cache"))
    monkeypatch.setattr("lit_epgan.callbacks.generative_metrics.feature_extractor", lambda name, data_dir="": extractor)
    return extractor


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"logger": False, "max_epochs": 2, **options},
    )


def gan() -> GAN:
    torch.manual_seed(0)
    return GAN(MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,)))
