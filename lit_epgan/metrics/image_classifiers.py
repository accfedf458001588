"""The extractors ``digits``, ``fashion``, ``emoji``, ``typefaces``: classifiers of the data's classes, cached."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.lib.cache import alone, cache_folder, load_tensors, save_tensors
from lit_epgan.lib.class_splits import split_by_class
from lit_epgan.lib.emoji_package import read_emoji, split_by_emoji
from lit_epgan.lib.errors import MissingFileError, UserError
from lit_epgan.lib.randomness import isolated, seed_on_host
from lit_epgan.lib.typefaces import read_typefaces
from lit_epgan.metrics.feature_extractors import FeatureExtractor
from lit_epgan.networks.resnet import BasicBlock

WIDTH = 64
TOTAL_VARIANCE = 100.0
SHIFT = 3  # pixels of an emoji
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
        """Features (n, 64) and logits (n, classes) of ``images`` (n, *shape) in [-1, 1]. UserError: images of another
        shape."""
        if images.shape[1:] != self.shape:
            colours = "grey" if self.shape[0] == 1 else "coloured"
            raise UserError(
                f"the extractor {self.name!r} knows {colours} images of {self.shape[1]} x {self.shape[2]} pixels, not "
                f"{tuple(images.shape[1:])}: use the extractor inception or lite0."
            )
        features = self.layers(images)
        return features * self.scale, self.head(features)


class DigitsClassifier(ImageClassifier):
    """64 penultimate features and ten logits of digits (n, 1, 8, 8); train against test images score about 0.4."""

    name = "digits"
    shape = (1, 8, 8)
    recipe = "conv 32-64-64, dense 64; AdamW 2e-3 to 0, decay 1e-2, 40 epochs of 64, pixel noise 0.1; seed 1"
    epochs = 40
    least_accuracy = 0.98

    def body(self) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(1024, 64), nn.ReLU()),
        )


def digits_split(seed: int = 7) -> LabelledImages:
    """scikit-learn's digits: of every class 80 % to train and 20 % to test.

    The data module's split is the same.
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    images = torch.tensor(source.data / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(source.target)
    train, test = split_by_class(labels, seed)
    return LabelledImages(images[train], labels[train], images[test], labels[test])


def digits_classifier() -> DigitsClassifier:
    """The trained classifier, from the cache or trained now (seconds). UserError: the classifier's test accuracy is not
    above 98 %, so its distances would mean nothing."""
    return trained(DigitsClassifier, digits_split())


class FashionClassifier(ImageClassifier):
    """64 penultimate features and ten logits of Fashion-MNIST's images (n, 1, 28, 28)."""

    name = "fashion"
    shape = (1, 28, 28)
    recipe = "conv 32-64 at stride 2, dense 64; AdamW 2e-3 to 0, decay 1e-2, 5 epochs of 64, pixel noise 0.1; seed 1"
    epochs = 5
    least_accuracy = 0.88

    def body(self) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(64 * 7 * 7, 64), nn.ReLU()),
        )


def fashion_classifier(data_dir: str) -> FashionClassifier:
    """The trained classifier, from the cache or trained now (a minute) on ``data_dir``/FashionMNIST/raw.
    MissingFileError: the data are not there. UserError: its test accuracy is not above 88 %, so its distances would
    mean nothing."""
    from torchvision.datasets import FashionMNIST

    try:
        train, test = (FashionMNIST(data_dir, train=train) for train in (True, False))
    except RuntimeError as error:
        raise MissingFileError(
            f"the extractor 'fashion' is trained on Fashion-MNIST, which is not in {data_dir}/FashionMNIST/raw: "
            "--data.dataset fashion_mnist says which files to place there; or choose another extractor."
        ) from error
    data = LabelledImages(scaled(train.data[:, None]), train.targets, scaled(test.data[:, None]), test.targets)
    return trained(FashionClassifier, data)


class EmojiClassifier(ImageClassifier):
    """64 penultimate features and nine logits of emoji (n, 3, 32, 32).

    Of emoji that it has not seen it recognises 68 %: 93 % of the flags, 87 % of the people, half of the food and the
    objects, and 12 % of the activities, a category of all kinds of things.
    """

    name = "emoji"
    shape = (3, 32, 32)
    classes = 9
    recipe = (
        "conv 16, residual 16-32-64 at stride 2, dense 64; AdamW 2e-3 to 0, decay 1e-2, 40 epochs of 64, mirrored, "
        "shifted by up to 3, pixel noise 0.1; seed 1"
    )
    epochs = 40
    least_accuracy = 0.65

    def body(self) -> nn.Sequential:
        block = partial(BasicBlock, stride=2, norm=nn.BatchNorm2d, bias=False)
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(block(16, 16), block(16, 32), block(32, 64), nn.Flatten()),
            *(nn.Linear(64 * 4 * 4, 64), nn.ReLU()),
        )

    def varied(self, images: Tensor) -> Tensor:
        """Half of the images mirrored, all shifted by one number of pixels over white, with noise."""
        mirrored = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
        down, right = torch.randint(2 * SHIFT + 1, (2,)).tolist()
        shifted = F.pad(mirrored, [SHIFT] * 4, value=1.0)[:, :, down : down + 32, right : right + 32]
        return super().varied(shifted)


def emoji_classifier(data_dir: str) -> EmojiClassifier:
    """The classifier trained on both vendors' emoji, packed in ``data_dir``, from the cache or trained now (a minute).
    MissingFileError: a packed file is not there. UserError: one is damaged, or the test accuracy is not above 65 %."""
    train, test = split_by_emoji(read_emoji(data_dir), split_seed=7)
    return trained(
        EmojiClassifier, LabelledImages(scaled(train.pixels), train.categories, scaled(test.pixels), test.categories)
    )


class TypefacesClassifier(FashionClassifier):
    """64 penultimate features and 62 logits of digits and letters (n, 1, 28, 28) in typefaces."""

    name = "typefaces"
    classes = 62
    counts_classes = False  # 62 cannot have 3 % of the samples each
    recipe = "conv 32-64 at stride 2, dense 64; AdamW 2e-3 to 0, decay 1e-2, 20 epochs of 64, pixel noise 0.1; seed 1"
    epochs = 20
    least_accuracy = 0.7


def typefaces_classifier(data_dir: str) -> TypefacesClassifier:
    """The trained classifier, from the cache or trained now (a minute) on the families in ``data_dir`` that take part
    in nothing: three quarters of them train it, the others test it. MissingFileError: there are no fonts. UserError: a
    font is damaged, or the test accuracy is not above 70 %, so its distances would mean nothing."""
    judges = list(read_typefaces(data_dir, judges=True).values())
    test, train = ([own for k, own in enumerate(judges) if (k % 4 == 0) == held] for held in (True, False))
    if not test or not train:
        raise UserError(
            f"{data_dir} holds too few typefaces: place at least seven families there; every sixth judges samples."
        )
    (x, y), (held_x, held_y) = (tuple(map(torch.cat, zip(*part, strict=True))) for part in (train, test))
    return trained(TypefacesClassifier, LabelledImages(scaled(x), y, scaled(held_x), held_y))


CLASSIFIERS: dict[str, type[ImageClassifier]] = {
    kind.name: kind for kind in (DigitsClassifier, FashionClassifier, EmojiClassifier, TypefacesClassifier)
}


def scaled(pixels: Tensor) -> Tensor:
    """Bytes, 0 to 255, as numbers in [-1, 1]."""
    return pixels.to(torch.float32).div_(127.5).sub_(1)


@torch.inference_mode(False)
def trained(kind: type[T], data: LabelledImages) -> T:
    """The classifier trained on ``data``, from the cache or now. UserError: it recognises too few of the test images to
    judge samples by."""
    content = data.train.numpy().tobytes() + data.train_labels.numpy().tobytes() + kind.recipe.encode()
    path = cache_folder() / f"{kind.name}-classifier-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    with isolated():
        classifier = _read(kind, path) or _made(kind, data, path)
    accuracy = (classifier.extract(data.test)[1].argmax(1) == data.test_labels).double().mean().item()
    if accuracy <= kind.least_accuracy:
        raise UserError(
            f"the {kind.name} classifier recognises only {accuracy:.1%} of the test images, too few to judge samples "
            f"by: delete {path} and run again."
        )
    return classifier.eval().requires_grad_(False)


def _made(kind: type[T], data: LabelledImages, path: Path) -> T:
    """Train it and keep it at ``path``, unless another process did so meanwhile."""
    with alone(path):
        classifier = _read(kind, path)
        if classifier is None:
            classifier = train(kind, data)
            classifier.scale.copy_((TOTAL_VARIANCE / classifier.extract(data.test)[0].var(0).sum()).sqrt())
            save_tensors(classifier.state_dict(), path)
    return classifier


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
