"""Frechet distance, inception score and class coverage of the generated images, each round."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks.round_evaluation import RoundEvaluation, prefixed, sample_sets
from lit_epgan.errors import MissingFileError, UserError
from lit_epgan.metrics import ExtractorName, FeatureExtractor, feature_extractor
from lit_epgan.metrics.generative import (
    FeatureStatistics,
    class_coverage,
    feature_statistics,
    frechet_distance,
    inception_score,
)
from lit_epgan.randomness import isolated

Split = Literal["train", "val", "test"]


class GenerativeMetrics(RoundEvaluation):
    """Logs ``fid_NAME`` and ``is_NAME``; with an extractor of the data's classes also how many are covered.

    That is ``classes_NAME`` and the smallest class's share ``weakest_class_NAME``.

    NAME is the extractor's; only Inception's are plain ``fid`` and ``is``. Further sample sets are logged with their
    name before it, as in ``union/fid_digits``. A class is covered by 3 % of the samples at confidence above .9.

    Args:
        extractor: ``digits``, ``inception`` or ``lite0``.
        samples: generated images per look.
        real: split of the data that the samples are compared with; its features are computed once.
        every_n_epochs: rounds from one look to the next.
        required: whether a missing extractor ends the run; otherwise it is said, and the run goes on without metrics.
            (A wrong file in its place always ends it.)

    Raises:
        UserError: the extractor lacks a file or a package, or the data module has no such split.
    """

    def __init__(
        self,
        extractor: ExtractorName = "digits",
        samples: int = 2000,
        real: Split = "test",
        every_n_epochs: int = 1,
        required: bool = True,
    ) -> None:
        super().__init__(every_n_epochs)
        if samples < 2:
            raise UserError(f"GenerativeMetrics' samples is {samples}; it must be at least 2.")
        self.name, self.samples, self.split, self.required = extractor, samples, real, required
        self._extractor: FeatureExtractor | None = None
        self._real: FeatureStatistics | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the extractor ready, so that what is missing is said before anything is trained."""
        if self._extractor is not None or stage == "predict":
            return
        try:
            self._extractor = feature_extractor(self.name)
        except MissingFileError as error:
            if self.required:
                raise
            rank_zero_warn(f"{error} Until then this run has no {self.name} metrics.")

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the module's samples and every further set."""
        if self._extractor is None:
            return
        extractor = self._extractor.to(pl_module.device)
        if self._real is None:
            with isolated():
                images = torch.cat(list(real_images(trainer.datamodule, self.split)))  # type: ignore[attr-defined]
            self._real = feature_statistics(extractor.extract(images)[0])
        for prefix, images in sample_sets(trainer, pl_module, self.samples, "generative metrics").items():
            for name, value in scores(extractor, images, self._real).items():
                pl_module.log(prefixed(prefix, name), value, sync_dist=True)


def scores(extractor: FeatureExtractor, images: Tensor, real: FeatureStatistics) -> dict[str, float]:
    """Every metric of ``images`` (n, channels, height, width) in [-1, 1] under its full name."""
    features, logits = extractor.extract(images)
    named = {
        "fid": frechet_distance(feature_statistics(features), real),
        "is": inception_score(logits, extractor.splits),
    }
    if extractor.counts_classes:
        named["classes"], named["weakest_class"] = class_coverage(logits)
    return {extractor.metric(name): float(value) for name, value in named.items()}


def real_images(datamodule: Any, split: Split) -> Iterator[Tensor]:
    """Batches of the images of a split, of all clients one after another.

    Args:
        datamodule: with ``data.train``, ``data.val`` and ``data.test`` (a data set, or one per client), or
            Lightning's loaders.
        split: which.

    Raises:
        UserError: there is none.
    """
    if hasattr(datamodule, "data"):
        found = getattr(datamodule.data, split, None)
        datasets = list(found.values()) if isinstance(found, Mapping) else [found]
        loaders: list[Any] = [DataLoader(dataset, batch_size=500) for dataset in datasets if dataset is not None]
    else:
        loader: Any = getattr(datamodule, f"{split}_dataloader", list)()
        loaders = list(loader) if isinstance(loader, list | tuple) else [loader]
    if not loaders:
        raise UserError(
            f"GenerativeMetrics compares samples with the {split} data, but there are none: set real to train or val."
        )
    for loader in loaders:
        for batch in loader:
            yield batch if isinstance(batch, Tensor) else batch[0]
