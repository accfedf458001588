"""The classifiers that metrics train on the spot: what they recognise, how they are cached, and what they refuse."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_epgan.errors import MissingFileError, UserError
from lit_epgan.metrics import feature_extractor, image_classifiers
from lit_epgan.metrics.cache import cache_folder
from lit_epgan.metrics.feature_extractors import FeatureExtractor
from lit_epgan.metrics.image_classifiers import FashionClassifier
from lit_epgan.metrics.image_scores import class_coverage, confident_counts, frechet_distance
from lit_epgan.metrics.pretrained_extractors import Inception
from tests.fashion_tree import write_fashion
from tests.generative import feature_statistics


def distance(first: Tensor, second: Tensor) -> float:
    return frechet_distance(feature_statistics(first), feature_statistics(second))


@pytest.fixture(scope="module")
def classifier(classifier_cache: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(classifier_cache))
        yield image_classifiers.digits_classifier()


def test_digits_split_is_the_data_modules() -> None:
    """Metrics may not import data modules: the two readings of one rule must agree, row by row."""
    from lit_epgan.datamodules.images import ImageDataModule

    data = image_classifiers.digits_split()
    datamodule = ImageDataModule("digits", partition="iid", clients=1)
    datamodule.setup()
    train: Any = datamodule.data.train
    test: Any = datamodule.data.test
    theirs = next(iter(train.values()))
    assert torch.equal(*(_sorted(x) for x in (data.train, theirs.fetch(list(range(len(theirs))))[0])))
    found, found_labels = test.fetch(list(range(len(test))))
    assert torch.equal(_sorted(found), _sorted(data.test))
    assert torch.equal(found_labels.sort()[0], data.test_labels.sort()[0])
    assert len(data.train) == len(data.train_labels) == 1433


def _sorted(images: Tensor) -> Tensor:
    rows = images.flatten(1)
    weights = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    return rows[(rows.double() @ weights).argsort()]


@pytest.mark.slow
def test_digits_classifier_recognises_digits_and_scales_its_features(classifier: FeatureExtractor) -> None:
    data = image_classifiers.digits_split()
    images, test_images, test_labels = data.train, data.test, data.test_labels
    found, logits = classifier.extract(test_images)
    assert (logits.argmax(1) == test_labels).double().mean() > 0.98
    assert found.shape == (len(test_images), 64)
    assert found.var(0).sum().item() == pytest.approx(100, rel=1e-4)
    assert distance(classifier.extract(images)[0], found) < 1
    assert class_coverage(confident_counts(logits) / len(logits))[0] == 10


def test_distance_orders_what_is_missing(classifier: FeatureExtractor) -> None:
    data = image_classifiers.digits_split()
    images, labels = data.train, data.train_labels
    real = classifier.extract(data.test)[0]
    kept = [images, images[labels != 8], images[labels > 2], images[labels > 4], images[labels == 0]]
    distances = [distance(classifier.extract(some)[0], real) for some in kept]
    assert distances == sorted(distances)
    assert distances[2] > 10 * distances[0]


def test_two_halves_of_real_data_are_nearest(classifier: FeatureExtractor) -> None:
    """By Frechet distance, against the second half spoiled a little in ways that samples are; the same half has 0."""
    data = image_classifiers.digits_split()
    images, labels = torch.cat([data.train, data.test]), torch.cat([data.train_labels, data.test_labels])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    first, second = order.chunk(2)
    real, other = classifier.extract(images[first])[0], images[second]
    noise = torch.randn(other.shape, generator=torch.Generator().manual_seed(1))
    rare = (labels[second] != 3) | (torch.arange(len(second)) % 2 == 0)
    spoiled = {
        "noisy": (other + 0.1 * noise).clamp(-1, 1),
        "blurred": 0.7 * other + 0.3 * torch.nn.functional.avg_pool2d(other, 3, 1, 1),
        "pale": 0.9 * other - 0.1,
        "shifted": other.roll(1, 3),
        "half the threes": other[rare],
        "few repeated": other[torch.arange(len(second)) % 50],
    }
    halves = distance(real, classifier.extract(other)[0])
    worse = {name: distance(real, classifier.extract(each)[0]) for name, each in spoiled.items()}
    assert halves < min(worse.values()), (halves, worse)
    assert distance(real, real) == pytest.approx(0, abs=1e-6)


def test_classifier_is_cached_and_disturbs_no_stream(
    classifier: FeatureExtractor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second classifier comes from the file; a torn file is set aside and made anew, to the same bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "epochs", 4)
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "least_accuracy", -1)
    streams = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    with torch.inference_mode():
        first = image_classifiers.digits_classifier().state_dict()
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert np.array_equal(np.random.get_state()[1], streams[1])  # type: ignore[index]
    (file,) = cache_folder().iterdir()
    trained: list[int] = []
    train = image_classifiers.train
    monkeypatch.setattr(image_classifiers, "train", lambda *args: trained.append(1) or train(*args))
    second = image_classifiers.digits_classifier().state_dict()
    assert not trained
    os.truncate(file, 1000)
    third = image_classifiers.digits_classifier().state_dict()
    assert trained == [1]
    assert all(torch.equal(first[n], second[n]) and torch.equal(first[n], third[n]) for n in first)
    assert sorted(path.name for path in cache_folder().iterdir()) == [file.name, f"{file.name}.damaged"]


def test_a_weak_classifier_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_classifiers, "train", lambda *_: image_classifiers.DigitsClassifier())
    with pytest.raises(UserError, match="recognises only"):
        image_classifiers.digits_classifier()


def test_an_unwritable_cache_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "epochs", 1)
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "least_accuracy", -1)
    assert image_classifiers.digits_classifier().extract(torch.zeros(3, 1, 8, 8))[1].shape == (3, 10)


def test_digits_extractor_refuses_other_images(classifier: FeatureExtractor) -> None:
    with pytest.raises(UserError, match="8 x 8"):
        classifier.extract(torch.zeros(2, 3, 32, 32))
    with pytest.raises(UserError, match="ToyMetrics"):
        classifier.extract(torch.zeros(2, 2))


def test_names_carry_the_extractor(classifier: FeatureExtractor) -> None:
    assert classifier.metric("fid") == "fid_digits"
    names = [Inception.metric(Inception.__new__(Inception), n) for n in ("fid", "classes")]
    assert names == ["fid", "classes_inception"]


def test_fashion_classifier_is_trained_on_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miniature tree; then from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(FashionClassifier, "least_accuracy", -1)
    write_fashion(tmp_path)
    first = feature_extractor("fashion", str(tmp_path))
    features, logits = first.extract(torch.rand(3, 1, 28, 28))
    assert features.shape == (3, 64)
    assert logits.shape == (3, 10)
    monkeypatch.setattr(image_classifiers, "train", None)
    again = feature_extractor("fashion", str(tmp_path)).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.state_dict().items())


def test_fashion_extractor_without_data_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=f"not in {tmp_path}/FashionMNIST/raw"):
        feature_extractor("fashion", str(tmp_path))
