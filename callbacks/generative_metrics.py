"""Scores of the generated images, each round: Frechet distance, inception score, KID, precision, recall, classes."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lit_epgan.callbacks.round_evaluation import SampleEvaluation, data_dir, prefixed, sample_parts
from lit_epgan.lib.errors import MissingFileError, UserError
from lit_epgan.lib.randomness import isolated
from lit_epgan.metrics import ExtractorName, FeatureExtractor, feature_extractor, fitting_extractor
from lit_epgan.metrics.image_scores import ImageScores, Reference, reference

Split = Literal["train", "val", "test"]
FEWEST = 4  # images that have three neighbours


class GenerativeMetrics(SampleEvaluation):
    """Logs ``fid_NAME``, ``kid_NAME``, ``precision_NAME``, ``recall_NAME`` and ``is_NAME`` of the module's samples.

    With an extractor of the data's classes also how many are covered, ``classes_NAME``, and the smallest class's share,
    ``weakest_class_NAME``: a class is covered by 3 % of the samples at confidence above .9.

    NAME is the extractor's; only Inception's are plain ``fid``, ``kid`` and ``is``. Against another split than test the
    split's name stands behind, as in ``fid_train``. Further sample sets are logged with their name before it, as in
    ``union/fid_digits``. Samples are scored in parts: memory does not grow with their number.

    Args:
        extractor: ``digits``, ``fashion``, ``emoji``, ``typefaces``, ``inception``, ``lite0`` or ``pixels`` (the last
            without inception score); by default the one that fits the data (``fitting_extractor``). ``lite0``
            takes some 30 ms an image on one core: fewer ``samples``, or ``every_n_epochs``, spare time.
        samples: generated images per look; 50,000 in the literature.
        real: split of the data that the samples are compared with, or several; what the extractor sees of it is kept
            in the user's cache.
        every_n_epochs: rounds from one look to the next.
        required: whether a missing extractor ends the run; otherwise it is said, and the run goes on without metrics.
            (A wrong file in its place always ends it.)
        each_generator: whether to score as many samples of every generator of a Bayesian GAN by itself, too, as in
            ``generator_0/fid``.

    Raises:
        UserError: the extractor lacks a file or a package, the data module has no such split, or one of fewer than
            four images or with a pixel that is no finite number.
    """

    def __init__(
        self,
        extractor: ExtractorName | None = None,
        samples: int = 2000,
        real: Split | list[Split] = "test",
        every_n_epochs: int = 1,
        required: bool = True,
        each_generator: bool = False,
    ) -> None:
        super().__init__(every_n_epochs)
        if samples < FEWEST:
            raise UserError(
                f"GenerativeMetrics' samples is {samples}; it must be at least {FEWEST}: precision and recall look at "
                "an image's three nearest."
            )
        self.name, self.samples, self.required, self.each_generator = extractor, samples, required, each_generator
        self.splits: list[Split] = [real] if isinstance(real, str) else list(real)
        self._extractor: FeatureExtractor | None = None
        self._real: dict[Split, Reference] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the extractor ready, so that what is missing is said before anything is trained."""
        if self._extractor is not None or stage == "predict":
            return
        if self.name is None:
            self.name = fitting_extractor(getattr(getattr(trainer, "datamodule", None), "dataset", None))
            rank_zero_info(f"GenerativeMetrics looks at the images by the extractor {self.name}.")
        try:
            self._extractor = feature_extractor(self.name, data_dir(trainer))
        except MissingFileError as error:
            if self.required:
                raise
            rank_zero_warn(f"{error} Until then this run has no {self.name} metrics.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the real images, so that what is wrong with them is said before anything is trained."""
        if self._extractor is not None:
            super().on_fit_start(trainer, pl_module)
            with torch.no_grad():
                self._look_at_real(self._extractor.to(pl_module.device), trainer)

    def _look_at_real(self, extractor: FeatureExtractor, trainer: Trainer) -> None:
        for split in self.splits:
            if split not in self._real:
                with isolated():
                    real_parts = partial(_checked, trainer.datamodule, split)  # type: ignore[attr-defined]
                    self._real[split] = reference(extractor, real_parts)

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the module's samples and every further set. UserError: they are not finite."""
        if self._extractor is None:
            return
        extractor = self._extractor.to(pl_module.device)
        self._look_at_real(extractor, trainer)
        scores: dict[str, ImageScores] = {}
        for part in sample_parts(trainer, pl_module, self.samples, "generative metrics", self.each_generator):
            for name, images in part.items():
                if not images.isfinite().all():
                    raise UserError(
                        f"GenerativeMetrics cannot score {name or 'the samples'}: pixels are no finite numbers: the "
                        "training has diverged; lower the learning rate."
                    )
                scores.setdefault(name, ImageScores(extractor, self.samples)).add(images)
        for prefix, each in scores.items():
            named = each.of_samples()
            for split, real in self._real.items():
                suffix = "" if split == "test" else f"_{split}"
                named |= {f"{name}{suffix}": value for name, value in each.against(real).items()}
            pl_module.log_dict({prefixed(prefix, name): value for name, value in named.items()}, sync_dist=True)


def _checked(datamodule: Any, split: Split) -> Iterator[Tensor]:
    """Batches of ``real_images``, which are enough and finite, or a UserError says so."""
    count = 0
    for images in real_images(datamodule, split):
        broken = ~images.flatten(1).isfinite().all(1)
        if broken.any():
            place = count + int(broken.nonzero()[0])
            raise UserError(
                f"GenerativeMetrics compares samples with the {split} data, and image {place} of them (from 0) has a "
                "pixel that is no finite number: mend it or leave it out."
            )
        count += len(images)
        yield images
    if count < FEWEST:
        raise UserError(
            f"GenerativeMetrics compares samples with the {split} data, which are {count} images; it takes at least "
            f"{FEWEST}: set real to a split that has more."
        )


def real_images(datamodule: Any, split: Split) -> Iterator[Tensor]:
    """Batches of the images of a split, of all clients one after another, of a module with ``data.train``, ``data.val``
    and ``data.test`` (a data set, or one per client), or Lightning's loaders. UserError: there is none."""
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
