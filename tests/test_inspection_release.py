"""The one release: what a user can move, what is read off a sum, when detectors raise an alarm."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_epgan.inspection.image_view import PUBLIC, compare, enough, rate_of_each
from lit_epgan.inspection.release import (
    Group,
    ImageFeatures,
    Layout,
    bright_border,
    critical,
    image_statistics,
    joint,
    mean_pixel,
)
from lit_epgan.inspection.user_records import Records

STATISTICS = image_statistics(0.1)
FEATURES = ImageFeatures.of((1, 4, 4), 8)
NUMBERS = st.sampled_from([-math.inf, -1e30, -2.0, -1.0, 0.0, 0.3, 1.0, 1e30, math.inf, math.nan])


def described(images):
    return torch.cat([joint(STATISTICS, images), FEATURES(images)], 1)


@settings(max_examples=60)
@given(
    pixels=st.lists(NUMBERS, min_size=1, max_size=6),
    weights=st.lists(NUMBERS, min_size=12, max_size=12),
    at_least=st.sampled_from([0.0, 1e-9, 1.0, 3.0]),
    together=st.sampled_from([1, 2]),
    bound=st.sampled_from([0.1, 0.7, 1.0]),
)
def test_no_user_gives_more_than_a_norm_of_one(pixels, weights, at_least, together, bound):
    """Whatever the images and the weights: a user in both groups only where both are counted for."""
    images = torch.tensor(pixels)[:, None, None, None].expand(-1, 1, 4, 4)
    columns = torch.tensor(weights).view(6, 2)[: len(pixels)]
    if together == 1:
        columns[:, 1] = 0.0
    layout = Layout(2, 2, 16, together, bound)
    (row,) = layout.rows(Records((images,), torch.zeros(len(pixels)).long(), 1), columns, at_least, described(images))
    assert row.isfinite().all()
    assert float(row.norm()) <= 1 + 1e-6


def test_without_noise_counts_and_means_are_exact():
    """Three users of one group: 1, 2 and 1 images; the third is too few of the other's."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 1, 4, 4, generator=generator) - 0.5
    records = Records((images,), torch.tensor([0, 1, 1, 2]), 3)
    layout = Layout(2, 2, 16, together=2)
    weights = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.0], [1.0, 0.9]])
    rows = layout.rows(records, weights, 1.0, described(images))
    first, second = layout.read(rows.sum(0), 1.0, ["first", "second"])
    assert first.count == pytest.approx(3)
    assert second.count == 0
    told = joint(STATISTICS, images)
    expected = told[0] + (told[1] + 0.5 * told[2]) / 1.5 + told[3]
    torch.testing.assert_close(first.totals, expected.double())
    phi = FEATURES(images).double()
    torch.testing.assert_close(first.embedding, phi[0] + (phi[1] + 0.5 * phi[2]) / 1.5 + phi[3])
    assert first.sd_count == pytest.approx(math.sqrt(2 / 0.2))
    assert first.sd_totals == pytest.approx(math.sqrt(2 / 0.3))


def test_statistics_of_images_by_hand():
    image = -torch.ones(1, 1, 4, 4)
    image[..., 0, :3] = 1.0
    assert mean_pixel(image).item() == pytest.approx((3 - 13) / 16)
    assert bright_border(image).item() == pytest.approx(3 / 12)
    torch.testing.assert_close(joint(STATISTICS, image), torch.tensor([[-0.625, -0.5]]))
    blank = joint(STATISTICS, torch.ones(1, 1, 4, 4))
    torch.testing.assert_close(blank, torch.full((1, 2), 0.5**0.5))


def group(name, users, mean, sd=1.0):
    return Group(name, users, torch.full((2,), users * mean), torch.zeros(1), sd, sd)


def test_who_is_compared_with_whom():
    groups = [group("low", 200.0, 0.5), group("high", 60.0, -0.5), group("few", 9.0, 0.0)]
    found = compare(groups, STATISTICS, torch.tensor([-0.5, -0.5]), 0.01, 10)
    pairs = [("low", "high"), ("low", PUBLIC), ("high", PUBLIC)]
    assert [(d.first, d.second) for d in found] == pairs * 2
    assert [d.alarm for d in found] == [True, True, False] * 2
    assert found[0].gap.estimate == pytest.approx(1.0)
    assert found[3].gap.estimate == pytest.approx(0.5)  # of a share, whose range is half as wide
    assert {d.false_alarms for d in found} == {0.01 / 12}
    assert found[0].detectable > 0.1
    assert compare(groups, STATISTICS, None, 0.01, 10)[0].second == "high"
    assert rate_of_each(1, 2, False, 0.01) == 0.01


def test_a_group_is_large_enough_whatever_the_noise_has_added():
    q = critical(0.01)
    assert enough(group("a", 10 + q * 1.0 + 0.01, 0.0), 10, q)
    assert not enough(group("a", 10 + q * 1.0 - 0.01, 0.0), 10, q)


def test_a_gap_within_the_tolerance_raises_no_more_alarms_than_stated():
    """At the band's very edge, where one side of every interval's misses is an alarm; exactly half the rate each."""
    generator = torch.Generator().manual_seed(0)
    rate, draws, alarms = 0.2, 1500, 0
    one = STATISTICS[:1]
    for _ in range(draws):
        noise = torch.randn(2, generator=generator, dtype=torch.float64) * 4
        noised = Group("all", 100 + float(noise[0]), torch.tensor([30.0]) + noise[1], torch.zeros(1), 4.0, 4.0)
        (found,) = compare([noised], one, torch.tensor([0.2]), rate, 10)
        alarms += found.alarm
    assert alarms / draws == pytest.approx(rate / 2, abs=4 * math.sqrt(rate / 2 / draws))
