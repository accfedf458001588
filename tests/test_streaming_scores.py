"""Scores as running sums equal torch-fidelity's of all images at once, in memory that does not grow."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics
from torch_fidelity.metric_isc import isc_features_to_metric

from lit_epgan.callbacks.round_evaluation import sample_parts
from lit_epgan.errors import UserError
from lit_epgan.metrics import image_scores as module
from lit_epgan.metrics.feature_extractors import FeatureExtractor
from lit_epgan.metrics.image_scores import FeatureMoments, ImageScores, InceptionScore, RandomRows
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator


@pytest.mark.parametrize("size", [1, 7, 300])
def test_moments_are_torch_fidelitys(size: int) -> None:
    features = torch.randn(300, 5, dtype=torch.double, generator=torch.Generator().manual_seed(1)) * 3 + 1e4
    moments = FeatureMoments()
    for part in features.split(size):
        moments.add(part)
    expected = fid_features_to_statistics(features)
    np.testing.assert_allclose(moments.statistics().mean, expected["mu"], rtol=1e-12)
    np.testing.assert_allclose(moments.statistics().covariance, expected["sigma"], rtol=1e-6, atol=1e-8)


def test_one_image_has_no_covariance() -> None:
    moments = FeatureMoments()
    moments.add(torch.zeros(1, 3))
    with pytest.raises(UserError, match="from 1 images"):
        moments.statistics()


@pytest.mark.parametrize("splits", [1, 3, 10])
@pytest.mark.parametrize("size", [1, 64, 203])
def test_inception_score_is_torch_fidelitys(splits: int, size: int) -> None:
    logits = torch.randn(203, 6, dtype=torch.double, generator=torch.Generator().manual_seed(2)) * 4
    score = InceptionScore(203, splits)
    for part in logits.split(size):
        score.add(part)
    assert score.value() == pytest.approx(isc_features_to_metric(logits, splits)["inception_score_mean"], rel=1e-12)


@pytest.mark.parametrize("size", [1, 30, 64, 1000])
def test_random_rows_are_of_all_clients_however_they_come(size: int) -> None:
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
    """An image's pixels are its features and its logits."""

    name = "plain"
    counts_classes = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = images.flatten(1) @ self.weight
        return features, 5 * features


def test_parts_do_not_change_the_scores_and_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
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
    """A callback that offers a set by position."""

    def extra_samples(self, n: int, start: int = 0) -> dict[str, Tensor]:
        return {"count": torch.arange(start, start + n)}


class Stand:
    """A trainer, as far as samples are concerned."""

    callbacks = (Offering(),)


def test_samples_come_in_parts() -> None:
    gan = GAN(MLPGenerator((2,), hidden=(4,), members=2), MLPDiscriminator((2,), hidden=(4,)))
    parts = list(sample_parts(Stand(), gan, 25, "test", each_generator=True, size=10))  # type: ignore[arg-type]
    assert [len(part[""]) for part in parts] == [10, 10, 5]
    assert [tuple(part["generator_1"].shape) for part in parts] == [(10, 2), (10, 2), (5, 2)]
    assert torch.cat([part["count"] for part in parts]).tolist() == list(range(25))
    assert not torch.equal(parts[0][""], parts[1][""])
