"""The ``digits`` extractor: a small classifier of scikit-learn's digits."""

import torch
from torch import nn

from lit_epgan.class_splits import split_by_class
from lit_epgan.metrics.image_classifier import ImageClassifier, LabelledImages, trained


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
    """The trained classifier, from the cache or trained now (seconds).

    Raises:
        UserError: the classifier's test accuracy is not above 98 %, so its distances would mean nothing.
    """
    return trained(DigitsClassifier, digits_split())
