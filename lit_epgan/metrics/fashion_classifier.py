"""The ``fashion`` extractor: a small classifier of Fashion-MNIST's ten kinds of clothes."""

import torch
from torch import Tensor, nn
from torchvision.datasets import FashionMNIST

from lit_epgan.errors import MissingFileError
from lit_epgan.metrics.image_classifier import ImageClassifier, LabelledImages, trained


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
    """The trained classifier, from the cache or trained now (a minute).

    Args:
        data_dir: the folder that holds ``FashionMNIST/raw``, as the data module's.

    Raises:
        MissingFileError: the data are not there.
        UserError: the classifier's test accuracy is not above 88 %, so its distances would mean nothing.
    """
    try:
        train, test = (FashionMNIST(data_dir, train=train) for train in (True, False))
    except RuntimeError as error:
        raise MissingFileError(
            f"the extractor 'fashion' is trained on Fashion-MNIST, which is not in {data_dir}/FashionMNIST/raw: "
            "--data.dataset fashion_mnist says which files to place there; or choose another extractor."
        ) from error
    data = LabelledImages(_scaled(train.data), train.targets, _scaled(test.data), test.targets)
    return trained(FashionClassifier, data)


def _scaled(pixels: Tensor) -> Tensor:
    """Bytes (n, 28, 28) as images (n, 1, 28, 28) in [-1, 1]."""
    return pixels.unsqueeze(1).to(torch.float32).div_(127.5).sub_(1)
