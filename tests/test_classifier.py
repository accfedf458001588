"""The classifier, its backbone of fully connected layers, and the rounds that it takes to be good enough."""

import multiprocessing
import os
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.callbacks.rounds_to_target import RoundsToTarget
from lit_epgan.datamodules.images import ImageDataModule
from lit_epgan.federated import MOON, FedAvg, FedNP
from lit_epgan.lib import cache
from lit_epgan.lib.cache import cache_folder
from lit_epgan.lib.errors import MissingFileError, UserError
from lit_epgan.metrics import feature_extractor, image_classifiers
from lit_epgan.metrics.image_classifiers import FashionClassifier
from lit_epgan.metrics.image_scores import class_coverage, confident_counts, frechet_distance
from lit_epgan.metrics.pretrained_extractors import Inception
from lit_epgan.modules.supervised import Classifier
from lit_epgan.networks.mlp import MLPBackbone
from lit_epgan.networks.resnet import ResNet18
from tests.fashion_tree import write_fashion
from tests.federations import fit
from tests.generative import feature_statistics
from tests.refusals import assert_refused


def new_classifier(lr: float = 0.1) -> Classifier:
    torch.manual_seed(0)
    return Classifier(MLPBackbone(hidden=[16]), nn.Linear(16, 10), lambda p: torch.optim.SGD(p, lr=lr))


def digits(**options) -> ImageDataModule:
    return ImageDataModule(**({"dataset": "digits", "partition": "iid", "clients": 3, "batch_size": 64} | options))


def test_loss_and_accuracy_by_hand():
    module = new_classifier()
    images, labels = torch.randn(7, 1, 8, 8), torch.tensor([0, 1, 2, 3, 4, 5, 6])
    logits = module(images)
    rows = [float(logits[i, label] - logits[i].exp().sum().log()) for i, label in enumerate(labels)]
    assert float(module.training_step((images, labels), 0)) == pytest.approx(-float(np.mean(rows)), rel=1e-5)
    scores = module.scores(logits, labels)
    assert float(scores["accuracy"]) == pytest.approx(sum(logits.argmax(1) == labels) / 7)
    assert float(scores["cross_entropy"]) == pytest.approx(-float(np.mean(rows)), rel=1e-5)


def test_validation_weighs_rows_not_batches():
    """364 test images in batches of 64: the last one is smaller."""
    module, data = new_classifier(), digits()
    trainer = fit(module, data, 1, algorithm=FedAvg())
    test = data.data.val
    images, labels = test.fetch(list(range(len(test))))
    accuracy = float((module(images.double()).argmax(1) == labels).double().mean())
    assert float(trainer.callback_metrics["accuracy"]) == pytest.approx(accuracy, rel=1e-9)
    assert accuracy > 0.15  # more than by chance


@pytest.mark.parametrize("algorithm", [MOON("backbone"), FedNP("backbone", "head", latent=4, hidden=5)])
def test_the_names_of_the_submodules_are_what_moon_and_fednp_ask_for(algorithm):
    module = new_classifier()
    fit(module, digits(), 2, algorithm=algorithm)
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_the_backbone_by_hand():
    backbone = MLPBackbone((1, 2, 2), (3, 5))
    (w, b), (v, c) = ((m.weight, m.bias) for m in backbone.modules() if isinstance(m, nn.Linear))
    x = torch.randn(4, 1, 2, 2)
    expected = F.relu(F.relu(x.flatten(1) @ w.T + b) @ v.T + c)
    torch.testing.assert_close(backbone(x), expected)
    assert backbone.out_features == expected.shape[1] == 5
    assert_refused("hidden is empty", MLPBackbone, hidden=[])


def test_a_partition_of_its_own_for_every_seed():
    def labels(**options) -> Tensor:
        return digits(partition="dirichlet", **options).data.labels["client-1"]

    assert torch.equal(labels(seed=1), labels(seed=2))
    assert not torch.equal(labels(seed=1, partition_by_seed=True), labels(seed=2, partition_by_seed=True))
    ours, theirs = (digits(seed=s, partition_by_seed=True).data.test.fetch([0, 1, 2]) for s in (1, 2))
    assert torch.equal(ours[0], theirs[0])  # the test images stay


class Scripted(Classifier):
    script = (0.2, 0.8, 0.95, 0.5, 0.99)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"accuracy": torch.tensor(self.script[self.trainer.current_epoch])}


def rounds_to(target: float, rounds: int = 5, **options) -> float:
    plain = new_classifier()
    module = Scripted(plain.backbone, plain.head)
    callbacks = [RoundsToTarget("accuracy", target), *options.pop("callbacks", [])]
    options |= {"enable_checkpointing": "folder" in options}
    trainer = fit(module, digits(local_steps=1), rounds, callbacks=callbacks, **options)
    return float(trainer.callback_metrics["rounds_to_target"])


@pytest.mark.parametrize(("target", "rounds"), [(0.1, 1), (0.97, 5), (1.0, 6)])
def test_the_first_round_that_is_good_enough_or_one_more_than_all(target, rounds):
    assert rounds_to(target) == rounds


def test_rounds_before_the_first_that_is_validated_are_not_looked_at():
    assert rounds_to(0.7, 4, check_val_every_n_epoch=2) == 2


def test_a_metric_that_is_not_logged_is_named_and_a_resumed_run_remembers(tmp_path):
    assert rounds_to(0.9, 3, folder=tmp_path, callbacks=[RoundCheckpoint()]) == 3
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert rounds_to(0.9, 4, folder=tmp_path, callbacks=[RoundCheckpoint()], ckpt_path=last) == 3
    with pytest.raises(UserError, match="'precision', which Classifier does not log in validation: it logs accuracy"):
        fit(new_classifier(), digits(), 1, callbacks=[RoundsToTarget("precision")])


def distance(first: Tensor, second: Tensor) -> float:
    return frechet_distance(feature_statistics(first), feature_statistics(second))


@pytest.fixture(scope="module")
def classifier(classifier_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(classifier_cache))
        yield image_classifiers.digits_classifier()


def test_digits_split_is_the_data_modules():
    """Metrics may not import data modules: the two readings of one rule must agree, row by row."""
    data = image_classifiers.digits_split()
    datamodule = ImageDataModule("digits", partition="iid", clients=1)
    datamodule.setup()
    train = datamodule.data.train
    test = datamodule.data.test
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
def test_digits_classifier_recognises_digits_and_scales_its_features(classifier):
    data = image_classifiers.digits_split()
    images, test_images, test_labels = data.train, data.test, data.test_labels
    found, logits = classifier.extract(test_images)
    assert (logits.argmax(1) == test_labels).double().mean() > 0.98
    assert found.shape == (len(test_images), 64)
    assert found.var(0).sum().item() == pytest.approx(100, rel=1e-4)
    assert distance(classifier.extract(images)[0], found) < 1
    assert class_coverage(confident_counts(logits) / len(logits))[0] == 10


def test_distance_orders_what_is_missing(classifier):
    data = image_classifiers.digits_split()
    images, labels = data.train, data.train_labels
    real = classifier.extract(data.test)[0]
    kept = [images, images[labels != 8], images[labels > 2], images[labels > 4], images[labels == 0]]
    distances = [distance(classifier.extract(some)[0], real) for some in kept]
    assert distances == sorted(distances)
    assert distances[2] > 10 * distances[0]


def test_two_halves_of_real_data_are_nearest(classifier):
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


def kept_files():
    """Without the file by which processes wait for each other."""
    return sorted(cache_folder().glob("[!.]*"))


def test_of_two_processes_one_trains_a_classifier_and_the_other_waits(tmp_path, monkeypatch):
    def slowly(kind, data):
        with (tmp_path / "trained").open("a") as log:
            log.write("once\n")
        time.sleep(0.5)
        return kind()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_classifiers, "train", slowly)
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "least_accuracy", -1)
    forks = multiprocessing.get_context("fork")
    both = [forks.Process(target=image_classifiers.digits_classifier) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert [each.exitcode for each in both] == [0, 0]
    assert (tmp_path / "trained").read_text() == "once\n"


def test_without_a_lock_each_process_trains_its_own(tmp_path, monkeypatch):
    """As in a cache on a file system without locks."""
    monkeypatch.setattr(cache.FileLock, "acquire", lambda self: (_ for _ in ()).throw(OSError("no locks")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "least_accuracy", -1)
    trained: list[int] = []
    monkeypatch.setattr(image_classifiers, "train", lambda kind, data: trained.append(1) or kind())
    image_classifiers.digits_classifier()
    assert trained == [1]


def test_classifier_is_cached_and_disturbs_no_stream(tmp_path, monkeypatch):
    """A second classifier comes from the file; a torn file is set aside and made anew, to the same bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "epochs", 1)
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "least_accuracy", -1)
    streams = torch.get_rng_state(), np.random.get_state()[1].copy()
    with torch.inference_mode():
        first = image_classifiers.digits_classifier().state_dict()
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert np.array_equal(np.random.get_state()[1], streams[1])
    (file,) = kept_files()
    trained: list[int] = []
    train = image_classifiers.train
    monkeypatch.setattr(image_classifiers, "train", lambda *args: trained.append(1) or train(*args))
    second = image_classifiers.digits_classifier().state_dict()
    assert not trained
    os.truncate(file, 1000)
    third = image_classifiers.digits_classifier().state_dict()
    assert trained == [1]
    assert all(torch.equal(first[n], second[n]) and torch.equal(first[n], third[n]) for n in first)
    assert [path.name for path in kept_files()] == [file.name, f"{file.name}.damaged"]


def test_the_digits_extractor_refuses_other_images_and_names_its_metrics(classifier):
    assert_refused("8 x 8", classifier.extract, torch.zeros(2, 3, 32, 32))
    assert_refused("ToyMetrics", classifier.extract, torch.zeros(2, 2))
    assert classifier.metric("fid") == "fid_digits"
    names = [Inception.metric(Inception.__new__(Inception), n) for n in ("fid", "classes")]
    assert names == ["fid", "classes_inception"]


def test_fashion_classifier_is_trained_on_the_data_folder(tmp_path, monkeypatch):
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


def test_a_weak_classifier_and_missing_data_are_refused(tmp_path, monkeypatch):
    with pytest.raises(MissingFileError, match=f"not in {tmp_path}/FashionMNIST/raw"):
        feature_extractor("fashion", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_classifiers, "train", lambda *_: image_classifiers.DigitsClassifier())
    assert_refused("recognises only", image_classifiers.digits_classifier)


def torchvisions() -> nn.Module:
    """torchvision's ResNet-18 with the stem for 32 x 32 and without its classifier."""
    network = resnet18()
    network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    network.maxpool, network.fc = nn.Identity(), nn.Identity()
    return network


@pytest.mark.parametrize("training", [True, False])
def test_the_outputs_are_torchvisions_with_its_weights(training):
    theirs, ours = torchvisions(), ResNet18()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that are not those of the beginning
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(3, 3, 32, 32)
    ours.train(training), theirs.train(training)
    torch.testing.assert_close(ours(images), theirs(images))


def test_as_many_parameters_as_torchvisions_which_begin_as_they_do():
    count = sum(p.numel() for p in ResNet18().parameters())
    assert count == sum(p.numel() for p in torchvisions().parameters()) == 11_168_832
    torch.manual_seed(0)
    theirs = dict(torchvisions().named_parameters())
    for name, parameter in ResNet18().named_parameters():
        if name != "conv1.weight" and parameter.dim() == 4:  # that one is not initialised by torchvision here
            assert float(parameter.std() / theirs[name].std()) == pytest.approx(1, abs=0.03), name


@pytest.mark.parametrize(("size", "channels"), [(32, 3), (64, 3), (8, 1)])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_features_of_other_sizes_and_norms(size, channels, norm):
    network = ResNet18(channels, width=4, norm=norm)
    features = network(torch.randn(2, channels, size, size))
    assert features.shape == (2, network.out_features) == (2, 32)


def test_with_group_norm_a_row_does_not_depend_on_the_others():
    images = torch.randn(4, 3, 16, 16)
    for norm, independent in (("group", True), ("none", True), ("batch", False)):
        network = ResNet18(width=8, norm=norm)
        alone = torch.allclose(network(images)[:2], network(images[:2]), atol=1e-5)
        assert alone == independent, norm
    assert not list(ResNet18(width=8, norm="group").buffers())
    assert {m.num_groups for m in ResNet18(norm="group").modules() if isinstance(m, nn.GroupNorm)} == {32}
    assert_refused("norm 'layer' does not exist", ResNet18, norm="layer")
    assert_refused("ResNet-18 needs width of at least 1", ResNet18, width=0)
