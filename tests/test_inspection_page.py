"""The page's parts that are computed: the verdict, where an interval is drawn, what is left, and text made safe."""

import base64
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lit_epgan.datamodules import WritersDataModule
from lit_epgan.inspection import AllExamples, Ask, Check, Findings, ImageView, Inspection, Panel
from lit_epgan.inspection.image_view import (
    BRIGHTNESS,
    INVERSION,
    PLACE,
    PUBLIC,
    SPOTS,
    Detection,
    ImageRelease,
    any_direction,
    causes,
    compare,
    enough,
    look_next,
    rate_of_each,
    unlike_next,
)
from lit_epgan.inspection.inspection import drawn, page, uri, verdict
from lit_epgan.inspection.release import (
    LIKENESS,
    Group,
    ImageFeatures,
    Interval,
    Layout,
    Likeness,
    bright_border,
    critical,
    difference,
    distance,
    image_statistics,
    joint,
    mean_pixel,
    ratio,
)
from lit_epgan.inspection.user_records import Records
from lit_epgan.inspection.words_view import JoinedShare, joined_share, words_outside
from lit_epgan.privacy import Ledger, Queries

CHECK = Check("a - b", "+0.10 against +0.20", -0.1, -0.3, 0.2, 0.1, 0.4, False, "a note")


def test_an_interval_a_verdict_and_a_picture():
    """From -0.4 at 0 to 0.4 at 100; what lies beyond is drawn at the edge."""
    assert drawn(CHECK) == {"low": 12.5, "high": 75.0, "estimate": 37.5, "band_low": 37.5, "band_high": 62.5}
    assert drawn(replace(CHECK, low=-9.0, high=float("inf")))["low"] == 0
    assert drawn(replace(CHECK, low=-9.0, high=float("inf")))["high"] == 100
    alarm = replace(CHECK, alarm=True)
    assert verdict([]) == "Nothing could be compared"
    assert verdict([CHECK]) == "No alarm from 1 detectors"
    assert verdict([alarm, CHECK, alarm]) == "2 of 3 detectors raise an alarm"
    assert base64.b64decode(uri(b"\x89PNG").removeprefix("data:image/png;base64,")) == b"\x89PNG"


@pytest.mark.parametrize(("budget", "left"), [(None, "No budget is set."), (3.0, "of the budget is left.")])
def test_a_page_tells_the_price_and_what_is_left(budget, left, tmp_path):
    ask = Ask(Queries(Ledger(tmp_path / "ledger.jsonl"), budget=budget), 2.0, "a <look>")
    Ask(ask.queries, 4.0, "an <earlier> look")([torch.ones(1)])
    panels = [Panel("<b>", ["a line"], b"\x89PNG"), Panel("words", words=[("<w>", "3.0")]), Panel("few", refused="no")]
    findings = Findings(
        panels, [replace(CHECK, alarm=True, estimate=0.2), CHECK], ["a sum"], ["look there"], "rates", "to read"
    )
    inspection = Inspection(WritersDataModule(), ImageView(), title="Why?", description="One.\n\nTwo.")
    html = page(inspection, findings, ask, "python -m lit_epgan inspect --x \udcff")
    cost = f"This inspection: {ask.price}".replace("'", "&#39;")
    for expected in ("<h1>Why?</h1>", "<p>One.</p>", "<p>Two.</p>", "&lt;b&gt;", "&lt;w&gt;", "&lt;earlier&gt;",
                     "look there", "rates", "to read", "a sum", "1 of 2 detectors raise an alarm", left, "\\udcff",
                     cost, "one user&#39;s whole data set emptied"):  # fmt: skip
        assert expected in html, expected
    assert html.count("data:image/png") == 1
    assert html.count('tag alarm"') == 1
    assert all(html.count(f'cx="{place}%"') == 1 for place in (75.0, 37.5))
    assert '<div class="verdict alarm">' in html
    nothing = page(inspection, Findings(panels), ask, "a command")
    assert '<div class="verdict none">Nothing could be compared' in nothing
    assert "The detectors" not in nothing
    assert "whoever knows the seed" not in html
    if budget is not None:
        total = ask.queries.ledger.read().total().epsilon
        assert f"Epsilon {budget - total:.3g} of" in html


MEAN, BORDER = image_statistics(0.1)
RATE = 0.001


def interval(middle, half=0.05):
    return Interval(middle, middle - half, middle + half)


def compared(statistic, first, second, a, b, half=0.05):
    means = interval(a, half), interval(b, half if second != PUBLIC else 0.0)
    return Detection(statistic, first, second, means, difference(*means), RATE)


def test_the_odd_group_is_named_and_not_those_that_differ_from_it():
    found = [
        compared(MEAN, "low", "high", 0.3, -0.4),
        compared(MEAN, "low", PUBLIC, 0.3, -0.4),
        compared(MEAN, "high", PUBLIC, -0.4, -0.4),
        compared(BORDER, "low", "high", 0.7, 0.1),
        compared(BORDER, "low", PUBLIC, 0.7, 0.1),
        compared(BORDER, "high", PUBLIC, 0.1, 0.1),
    ]
    sentences = look_next(found, [])
    assert len(sentences) == 2
    assert "“low” differs from “high” and “public data”: its mean pixel is higher by 0.70" in sentences[0]
    assert "that are bright is higher by 0.60. Look at how pixels are encoded" in sentences[0]
    assert "Once the fault is mended" in sentences[1]


def test_causes_and_odd_ones_that_are_not_certain():
    found = [compared(MEAN, "high", "low", -0.4, 0.3), compared(MEAN, "low", PUBLIC, 0.3, -0.4)]
    found += [compared(BORDER, "high", "low", 0.1, 0.1), compared(BORDER, "low", PUBLIC, 0.1, 0.1)]
    sentences = look_next(found, [])
    assert len(sentences) == 2
    assert sentences[0].startswith("The group “low” differs from “public data”: its mean pixel is higher by 0.70. Look")
    found = [compared(MEAN, "a", "b", 0.0, -0.4, 0.1), compared(BORDER, "a", "b", 0.46, 0.1, 0.1)]
    assert set(causes(found)) == {INVERSION, SPOTS}
    (sentence, _) = look_next(found, [])
    assert "more than one cause, the likeliest first: look at how pixels are encoded" in sentence
    assert "; or look for bright noise" in sentence


@pytest.mark.parametrize(
    ("pixel", "border", "expected"),
    [
        ((0.3, -0.4), (0.7, 0.1), INVERSION),
        ((0.0, -0.4), (0.5, 0.1), INVERSION),  # of half of the images: neither sign has changed
        ((0.02, -0.4), (0.37, 0.1), SPOTS),  # three pixels in ten made bright
        ((-0.1, -0.4), (0.1, 0.1), BRIGHTNESS),
        ((-0.7, -0.4), (0.0, 0.1), BRIGHTNESS),
        ((-0.4, -0.4), (0.7, 0.1), PLACE),
    ],
)
def test_a_cause_is_named_where_the_noise_leaves_no_other(pixel, border, expected):
    found = [compared(MEAN, "a", "b", *pixel, 0.01), compared(BORDER, "a", "b", *border, 0.01)]
    assert causes(found) == [expected]
    assert expected[5:40] in look_next(found, [])[0]
    assert "more than one cause" not in look_next(found, [])[0]


def test_no_alarm_is_told_with_what_would_have_raised_one_and_a_group_too_small():
    quiet = [compared(MEAN, "a", "b", 0.0, 0.0, half) for half in (0.05, 0.2)]
    (sentence,) = look_next(quiet, [])
    assert f"from {quiet[1].detectable:.2f} on" in sentence
    assert f"{quiet[0].detectable:.2f}" != f"{quiet[1].detectable:.2f}"
    assert look_next([], []) == []
    sentences = look_next([compared(MEAN, "a", "b", 0.0, 0.0)], ["few"])
    assert "“few” has too few users" in sentences[0]
    assert "No alarm" in sentences[1]


Q = 2.0


def test_a_known_count_leaves_the_usual_interval_and_one_that_noise_explains_says_nothing():
    found = ratio(30.0, 60.0, 3.0, 0.0, Q)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.5, 0.5 - Q * 3 / 60, 0.5 + Q * 3 / 60))
    for count in (9.9, 0.0, -3.0):
        found = ratio(5.0, count, 4.0, 5.0, Q)
        assert (found.low, found.high) == (-math.inf, math.inf)
        assert not found.outside(0.0)
    known = Interval(0.3, 0.3, 0.3)
    found = difference(Interval(0.5, 0.4, 0.7), known)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.2, 0.1, 0.4))
    assert found.outside(0.05)
    assert not found.outside(0.1 + 1e-9)
    assert not Interval(0.0, -0.2, 0.3).outside(0.1)
    assert Interval(-0.3, -0.4, -0.2).outside(0.1)


@pytest.mark.parametrize(("total", "count"), [(30.0, 60.0), (-12.0, 25.0), (0.0, 40.0)])
def test_limits_are_where_the_pivot_is_critical(total, count):
    """Brute force: the R on a grid whose (total - R count) / sd is within q reach from limit to limit."""
    found = ratio(total, count, 4.0, 5.0, Q)
    grid = np.linspace(-5, 5, 200_001)
    inside = grid[np.abs(total - grid * count) <= Q * np.hypot(4.0, grid * 5.0)]
    assert (found.low, found.high) == pytest.approx((inside.min(), inside.max()), abs=1e-4)


def test_noise_puts_the_truth_outside_at_the_stated_rate():
    """Ratios exactly, differences nearly: two groups of 54 and 213 users, as in the demo."""
    generator = np.random.default_rng(0)
    rate, draws = 0.05, 4000
    q = critical(rate)
    assert q == pytest.approx(stats.norm.isf(rate / 2))
    missed = {"ratio": 0, "difference": 0}
    for _ in range(draws):
        groups = ((0.24, 213), (-0.4, 54))
        first, second = (ratio(generator.normal(m * n, 3.6), generator.normal(n, 4.5), 3.6, 4.5, q) for m, n in groups)
        gap = difference(first, second)
        missed["ratio"] += not second.low <= -0.4 <= second.high
        missed["difference"] += not gap.low <= 0.64 <= gap.high
    assert missed["ratio"] / draws == pytest.approx(rate, abs=4 * math.sqrt(rate / draws))
    assert missed["difference"] / draws == pytest.approx(rate, abs=4 * math.sqrt(rate / draws))


SENTENCES = [["the", "b", "a"], ["b a", "the"], ["b a", "b"], ["c"]]


def test_words_outside_a_vocabulary_and_the_share_of_joined_ones():
    assert words_outside(SENTENCES, {"the"}) == ["b", "b", "b a", "b a", "a", "c"]
    assert words_outside(SENTENCES, {"the"}, position=0) == ["b a", "b a", "c"]
    assert words_outside(SENTENCES, {"the"}, position=2) == ["a"]
    assert words_outside([], {"the"}) == []
    found = joined_share(["return the", "this is", "apple"])
    assert (found.joined, found.shown, found.share) == (2, 3, 2 / 3)
    assert (found.low, found.high) == pytest.approx((0.094299, 0.991596), abs=1e-6)  # of a table
    assert str(found) == "2 of 3 words shown are joined: 67 % (95 %: 9 to 99 %)"
    assert joined_share([" a"]).joined == 0
    assert joined_share([]) == JoinedShare(0, 0, 0.0, 1.0, 0.95)
    assert str(joined_share([])) == "no word was shown"
    assert "(99 %: " in str(joined_share(["a b"], 0.99))


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
    assert first.sd_totals == pytest.approx(math.sqrt(2 * 2 / 0.35))


def test_statistics_of_images_by_hand():
    image = -torch.ones(1, 1, 4, 4)
    image[..., 0, :3] = 1.0
    assert mean_pixel(image).item() == pytest.approx((3 - 13) / 16)
    assert bright_border(image).item() == pytest.approx(3 / 12)
    torch.testing.assert_close(joint(STATISTICS, image), torch.tensor([[-0.625, -0.5]]))
    blank = joint(STATISTICS, torch.ones(1, 1, 4, 4))
    torch.testing.assert_close(blank, torch.ones(1, 2))


def group(name, users, mean, sd=1.0):
    return Group(name, users, torch.full((2,), users * mean), torch.zeros(1), sd, sd)


def test_who_is_compared_with_whom_and_who_is_large_enough():
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


@pytest.mark.parametrize("dark", [0.5, 1.0])
def test_intervals_cover_the_true_means_of_dark_images(dark):
    """Half of the brightness, for half of the users or all: both statistics of such an image lie near their least."""
    data = WritersDataModule(clients=60, split_seed=3).load()
    own = [users.tensors for users in data.train.values()]
    own = [((x + 1) / 2 - 1, y) if k < dark * len(own) else (x, y) for k, (x, y) in enumerate(own)]
    records = Records(tuple(map(torch.cat, zip(*own, strict=True))), torch.arange(60).repeat_interleave(20), 60)
    release = ImageRelease(AllExamples(), ImageFeatures.of((1, 8, 8), 1), STATISTICS, None)
    total = torch.stack(list(release.given([records]))).sum(0)
    truth = [float(each.of(records.x).mean()) for each in STATISTICS]
    generator, rate, draws, z, missed = torch.Generator().manual_seed(0), 0.02, 2000, 1.0, 0
    for _ in range(draws):
        noised = total + z * torch.randn(total.shape, generator=generator, dtype=torch.float64)
        (found,) = release.layout.read(noised, z, ["all"])
        for k, each in enumerate(STATISTICS):
            mean = found.mean(k, critical(rate)).scaled(each.half, each.centre)
            missed += not mean.low <= truth[k] <= mean.high
    assert missed / (2 * draws) == pytest.approx(rate, abs=4 * math.sqrt(rate / draws))


@pytest.mark.parametrize("length", [0.0, 0.05, 1.0])
def test_the_length_of_a_difference_is_covered_at_the_stated_rate(length):
    generator, rate, draws, sd = torch.Generator().manual_seed(0), 0.2, 200, 0.1
    missed = 0
    for _ in range(draws):
        vector = sd * torch.randn(15, generator=generator, dtype=torch.float64)
        vector[3] += length
        found = distance(vector, sd, rate)
        assert found.low <= found.estimate <= found.high
        missed += not found.low <= length <= found.high
    expected = rate if length else rate / 2  # 0 is below no interval
    assert missed / draws == pytest.approx(expected, abs=4 * math.sqrt(expected / draws))


def written(users, seed, change=None):
    data = WritersDataModule(clients=users, split_seed=seed).load()
    x, y = map(torch.cat, zip(*(each.tensors for each in data.train.values()), strict=True))
    x, y = (x, y) if change is None else change(x, y)
    return Records((x, y), torch.arange(users).repeat_interleave(20), users), Records.of([data.val])


CHANGES = {
    "shift": lambda x, y: (torch.nn.functional.pad(x, (3, 0), value=-1.0)[..., :8], y),
    "mirror": lambda x, y: (x.flip(3), y),
    "rotation": lambda x, y: (x.rot90(1, (2, 3)), y),
    "half": lambda x, y: ((x + 1) / 2 - 1, y),
    "labels": lambda x, y: (x, 9 - y),
    "repeats": lambda x, y: (x[torch.arange(len(x)) // 20 * 20], y[torch.arange(len(y)) // 20 * 20]),
}


def test_a_fault_that_nobody_thought_of_sets_users_apart():
    """The likeness knows of no fault; each doubles at least what natural hands show, at all of the users."""
    clean, public = written(100, 7)
    like = Likeness.of(public, (1, 8, 8))
    apart = {name: (like(written(100, 7, change)[0]).mean(0) - like.centre).norm() for name, change in CHANGES.items()}
    own = (like(clean).mean(0) - like.centre).norm()
    assert own < 0.2
    assert all(each > 2 * own for each in apart.values()), (own, apart)
    assert all(each > 0.5 for each in apart.values()), (own, apart)


@settings(max_examples=40)
@given(pixels=st.lists(NUMBERS, min_size=0, max_size=6), labels=st.lists(st.integers(-3, 20), min_size=6, max_size=6))
def test_what_a_user_gives_for_the_likeness_has_a_norm_of_at_most_one(pixels, labels):
    images = torch.tensor(pixels)[:, None, None, None].expand(-1, 1, 8, 8)
    owner = torch.zeros(len(pixels)).long()
    images = torch.cat([images, torch.zeros(1, 1, 8, 8)])  # of another user
    records = Records((images, torch.tensor([*labels[: len(pixels)], 0])), torch.cat([owner, torch.tensor([1])]), 2)
    row = LIKE(records)[0]
    assert row.isfinite().all()
    assert float(row.norm()) <= 1 + 1e-9
    assert pixels or not row.any()


LIKE = Likeness.of(written(2, 5)[1], (1, 8, 8))


def test_a_likeness_needs_public_examples_that_differ():
    public = written(2, 5)[1]
    few = Records(tuple(entry[:399] for entry in public.entries), torch.zeros(399).long(), 1)
    assert Likeness.of(few, (1, 8, 8)) is None
    blank = Records((torch.zeros(400, 1, 8, 8),), torch.zeros(400).long(), 1)
    assert Likeness.of(blank, (1, 8, 8)) is None
    unlabelled = Likeness.of(Records(public.entries[:1], public.user, 1), (1, 8, 8))
    assert len(unlabelled.means) == 1


def test_the_gap_is_read_off_the_noised_sum_and_told():
    centre = torch.zeros(15, dtype=torch.float64)
    own = replace(LIKE, centre=centre)
    total = torch.zeros(15, dtype=torch.float64)
    total[0] = 0.5 * 200 * LIKENESS**0.5
    gap = own.gap(total, 200, 1.0, 0.01)
    assert gap.estimate == pytest.approx(0.5, abs=0.01)
    check = any_direction(gap, 0.2, 0.01)
    assert check.alarm
    assert not any_direction(gap, 0.5, 0.01).alarm
    assert "neither brightness nor the border" in unlike_next(check, [False])[0]
    assert "may be all of it" in unlike_next(check, [False, True])[0]
    assert unlike_next(any_direction(gap, 0.5, 0.01), []) == []
