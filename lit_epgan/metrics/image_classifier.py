"""Extractors that know the data's classes: a small classifier of images, trained on the spot and cached."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.metrics.cache import cache_folder, load_tensors, save_tensors
from lit_epgan.metrics.features import FeatureExtractor
from lit_epgan.randomness import isolated, seed_on_host

WIDTH = 64
TOTAL_VARIANCE = 100.0
T = TypeVar("T", bound="ImageClassifier")


@dataclass(frozen=True)
class LabelledImages:
    """Images (n, channels, height, width) in [-1, 1] and labels (n,), of the training and of the test split."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


class ImageClassifier(FeatureExtractor):
    """64 penultimate features and the classes' logits of images of one shape.

    The features are scaled by one constant such that the test images' total variance is 100: then the Frechet
    distance of a set without anything of the classes is of that order.

    A subclass gives the layers, the recipe they are trained by (AdamW, from ``learning_rate`` down to 0, on images that
    are ``varied``) and ``least_accuracy``, below which distances would mean nothing.
    """

    counts_classes = True
    shape: ClassVar[tuple[int, int, int]]
    classes: ClassVar[int] = 10
    recipe: ClassVar[str]
    epochs: ClassVar[int]
    least_accuracy: ClassVar[float]
    learning_rate: ClassVar[float] = 2e-3
    pixel_noise: ClassVar[float] = 0.1
    seed: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.body()
        self.head = nn.Linear(WIDTH, self.classes)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))

    def body(self) -> nn.Sequential:
        """Layers from images (n, *shape) to features (n, 64)."""
        raise NotImplementedError

    def varied(self, images: Tensor) -> Tensor:
        """A batch as it is trained on: with Gaussian noise on every pixel."""
        return images + self.pixel_noise * torch.randn(images.shape)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, 64) and logits (n, classes) of ``images`` (n, *shape) in [-1, 1].

        Raises:
            UserError: images of another shape.
        """
        if images.shape[1:] != self.shape:
            colours = "grey" if self.shape[0] == 1 else "coloured"
            raise UserError(
                f"the extractor {self.name!r} knows {colours} images of {self.shape[1]} x {self.shape[2]} pixels, not "
                f"{tuple(images.shape[1:])}: use the extractor inception or lite0."
            )
        features = self.layers(images)
        return features * self.scale, self.head(features)


@torch.inference_mode(False)
def trained(kind: type[T], data: LabelledImages) -> T:
    """The classifier trained on ``data``, from the cache or now.

    Raises:
        UserError: it recognises too few of the test images to judge samples by.
    """
    content = data.train.numpy().tobytes() + data.train_labels.numpy().tobytes() + kind.recipe.encode()
    path = cache_folder() / f"{kind.name}-classifier-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    with isolated():
        classifier = _read(kind, path)
        if classifier is None:
            classifier = train(kind, data)
            classifier.scale.copy_((TOTAL_VARIANCE / classifier.extract(data.test)[0].var(0).sum()).sqrt())
            save_tensors(classifier.state_dict(), path)
    accuracy = (classifier.extract(data.test)[1].argmax(1) == data.test_labels).double().mean().item()
    if accuracy <= kind.least_accuracy:
        raise UserError(
            f"the {kind.name} classifier recognises only {accuracy:.1%} of the test images, too few to judge samples "
            f"by: delete {path} and run again."
        )
    return classifier.eval().requires_grad_(False)


def _read(kind: type[T], path: Path) -> T | None:
    classifier = kind()
    kept = load_tensors(path, classifier.state_dict())
    if kept is None:
        return None
    try:
        classifier.load_state_dict(kept)
    except RuntimeError:  # of another network
        return None
    return classifier


@torch.enable_grad()
def train(kind: type[T], data: LabelledImages, batch_size: int = 64) -> T:
    """The classifier after its recipe's epochs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order, whatever the machine's cores
    seed_on_host(kind.seed)
    classifier = kind()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=kind.learning_rate, weight_decay=1e-2)
    for epoch in range(kind.epochs):
        optimizer.param_groups[0]["lr"] = kind.learning_rate * (1 - epoch / kind.epochs)
        for rows in torch.randperm(len(data.train)).split(batch_size):
            loss = F.cross_entropy(classifier(classifier.varied(data.train[rows]))[1], data.train_labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.set_num_threads(threads)
    return classifier.eval()
