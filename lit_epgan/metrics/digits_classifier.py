"""The ``digits`` extractor: a small classifier of scikit-learn's digits, trained on the spot and cached."""

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.metrics.cache import cache_folder, load_tensors, save_tensors
from lit_epgan.metrics.features import FeatureExtractor
from lit_epgan.randomness import isolated, seed_on_host

RECIPE = "conv 32-64-64, dense 64; AdamW 2e-3 to 0, decay 1e-2, 40 epochs of 64, pixel noise 0.1; seed 1"
EPOCHS, BATCH, LEARNING_RATE, PIXEL_NOISE, SEED = 40, 64, 2e-3, 0.1, 1
TOTAL_VARIANCE = 100.0


class DigitsClassifier(FeatureExtractor):
    """64 penultimate features and ten logits of digits (n, 1, 8, 8).

    The features are scaled by one constant such that the test images' total variance is 100: then the Frechet
    distance of a set without anything of the digits is of that order, and train against test images score about 0.4.
    """

    name = "digits"
    counts_classes = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(1024, 64), nn.ReLU()),
        )
        self.head = nn.Linear(64, 10)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, 64) and logits (n, 10) of ``images`` (n, 1, 8, 8) in [-1, 1].

        Raises:
            UserError: images of another shape.
        """
        if images.shape[1:] != (1, 8, 8):
            raise UserError(
                f"the extractor 'digits' knows grey images of 8 x 8 pixels, not {tuple(images.shape[1:])}: "
                "use the extractor inception or lite0."
            )
        features = self.layers(images)
        return features * self.scale, self.head(features)


def digits_split(seed: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images, training labels, test images, test labels: of every class 80 % and 20 %.

    One generator permutes the rows of class 0, 1, ... in turn and the first 80 % train; the data module follows the
    same rule.

    Returns:
        images (n, 1, 8, 8) in [-1, 1] and labels (n,), twice.
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    images = torch.tensor(source.data / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(source.target)
    generator = torch.Generator().manual_seed(seed)
    train, test = [], []
    for label in range(10):
        rows = torch.where(labels == label)[0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        cut = int(0.8 * len(rows))
        train.append(rows[:cut])
        test.append(rows[cut:])
    first, second = torch.cat(train), torch.cat(test)
    return images[first], labels[first], images[second], labels[second]


@torch.inference_mode(False)
def digits_classifier() -> DigitsClassifier:
    """The trained classifier, from the cache or trained now (seconds).

    Raises:
        UserError: the classifier's test accuracy is not above 98 %, so its distances would mean nothing.
    """
    images, labels, test_images, test_labels = digits_split()
    content = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes() + RECIPE.encode()).hexdigest()
    path = cache_folder() / f"digits-classifier-{content[:16]}.pt"
    with isolated():
        classifier = _cached(path)
        if classifier is None:
            classifier = _train(images, labels)
            classifier.scale.copy_((TOTAL_VARIANCE / classifier.extract(test_images)[0].var(0).sum()).sqrt())
            save_tensors(classifier.state_dict(), path)
    _check_accuracy(classifier, test_images, test_labels, str(path))
    return classifier.eval().requires_grad_(False)


def _cached(path: Path) -> DigitsClassifier | None:
    state = load_tensors(path)
    classifier = DigitsClassifier()
    try:
        classifier.load_state_dict(state or {})
    except RuntimeError:  # of another network, or none
        return None
    return classifier


def _check_accuracy(classifier: DigitsClassifier, images: Tensor, labels: Tensor, path: str) -> None:
    accuracy = (classifier.extract(images)[1].argmax(1) == labels).double().mean().item()
    if accuracy <= 0.98:
        raise UserError(
            f"the digits classifier recognises only {accuracy:.1%} of the test images, too few to judge samples by: "
            f"delete {path} and run again."
        )


@torch.enable_grad()
def _train(images: Tensor, labels: Tensor) -> DigitsClassifier:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order, whatever the machine's cores
    seed_on_host(SEED)
    classifier = DigitsClassifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=LEARNING_RATE, weight_decay=1e-2)
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - epoch / EPOCHS)
        for rows in torch.randperm(len(images)).split(BATCH):
            noisy = images[rows] + PIXEL_NOISE * torch.randn(len(rows), 1, 8, 8)
            loss = F.cross_entropy(classifier(noisy)[1], labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.set_num_threads(threads)
    return classifier.eval()
