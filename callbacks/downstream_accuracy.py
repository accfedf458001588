"""What samples are worth to somebody who trains on them: a classifier trained on samples, tested on real images."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lit_epgan.callbacks.round_evaluation import RoundEvaluation, prefixed
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, isolated
from lit_epgan.metrics.image_classifiers import CLASSIFIERS, LabelledImages, train

Records = tuple[Tensor, Tensor]  # images (n, channels, height, width) in [-1, 1] and labels (n,)


class DownstreamAccuracy(RoundEvaluation):
    """Logs ``downstream_NAME``, the share of real held-out images that a classifier recognises which has seen the
    module's labelled samples alone, and ``downstream_real_NAME``, that of one which has seen the clients' own images.

    Both are trained in the same way, on as many images, and tested on the data module's test images. NAME is the
    classifier's. Further labelled sample sets are logged with their name before it, as in ``union/downstream_digits``.
    For experiments: the clients' images must be in this process.

    Args:
        classifier: whose layers and recipe: ``digits``, ``fashion``, ``emoji`` or ``typefaces``.
        images: at most so many train either of the two; of the clients' own they are drawn. By default as many as the
            clients have.
        every_n_epochs: rounds from one look to the next.

    Raises:
        UserError: there is no such classifier, the module has no labelled samples, the data have no labels, or images
            are of another shape.
    """

    def __init__(
        self,
        classifier: Literal["digits", "fashion", "emoji", "typefaces"] = "digits",
        images: int | None = None,
        every_n_epochs: int = 1,
    ) -> None:
        super().__init__(every_n_epochs)
        at_least(1, self, images=images)
        if classifier not in CLASSIFIERS:
            raise UserError(
                f"DownstreamAccuracy's classifier is {classifier!r}: choose one of {', '.join(CLASSIFIERS)}."
            )
        self.name, self.images = classifier, images
        self._of_real: float | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot be looked at before anything is trained."""
        self._check_samples(pl_module)
        for split in ("train", "test"):
            self._images(trainer, split)

    def _check_samples(self, pl_module: LightningModule) -> None:
        if not hasattr(pl_module, "sample_labelled"):
            raise UserError(
                f"DownstreamAccuracy trains a classifier on labelled samples, and {type(pl_module).__name__} has none: "
                "take a model with labels (lit_epgan.modules.ConditionalGAN, ConditionalFlow), or leave it out."
            )

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train the classifiers and test them; that of the clients' own images once."""
        self._check_samples(pl_module)
        test, own = self._records(trainer, "test"), self._records(trainer, "train")
        n = min(self.images or len(own[1]), len(own[1]))
        if self._of_real is None:
            rows = torch.randperm(len(own[1]), generator=generator_for("downstream accuracy", "real"))[:n]
            self._of_real = self._accuracy((own[0][rows], own[1][rows]), test)
        sets = {"": pl_module.sample_labelled(n, generator_for("downstream accuracy"))}  # type: ignore[operator]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "extra_labelled_samples"):
                sets |= callback.extra_labelled_samples(n)
        found = {f"downstream_real_{self.name}": self._of_real}
        for name, (samples, labels) in sets.items():
            accuracy = self._accuracy((samples.cpu().float(), labels.cpu()), test)
            found[prefixed(name, f"downstream_{self.name}")] = accuracy
        pl_module.log_dict(found, sync_dist=True)

    def _images(self, trainer: Trainer, split: str) -> ConcatDataset:
        """All clients' images of a split. UserError: there are none, or none with labels."""
        held: Mapping[str, Dataset] | Dataset | None = getattr(trainer.datamodule.data, split)  # type: ignore[attr-defined]
        sets: list[Any] = list(held.values()) if isinstance(held, Mapping) else [held] * (held is not None)
        images: ConcatDataset | None = ConcatDataset(sets) if sets else None
        if not images or not isinstance(images[0], list | tuple) or len(images[0]) < 2:
            raise UserError(
                f"DownstreamAccuracy needs {split} images with labels, and the data module has none: leave it out."
            )
        return images

    def _records(self, trainer: Trainer, split: str) -> Records:
        batches = list(DataLoader(self._images(trainer, split), batch_size=500))
        return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])

    def _accuracy(self, seen: Records, test: Records) -> float:
        with isolated():
            classifier = train(CLASSIFIERS[self.name], LabelledImages(*seen, *test))
            return (classifier.extract(test[0])[1].argmax(1) == test[1]).double().mean().item()
