"""What to look at next, in plain words: which group is named, what of it, and what is said where nothing is found."""

import pytest

from lit_epgan.inspection.image_view import PUBLIC, Detection, look_next
from lit_epgan.inspection.release import Interval, difference, image_statistics

MEAN, BORDER = image_statistics(0.1)
RATE = 0.001


def interval(middle, half=0.05):
    return Interval(middle, middle - half, middle + half)


def compared(statistic, first, second, a, b, half=0.05):
    means = interval(a, half), interval(b, half if second != PUBLIC else 0.0)
    return Detection(statistic, first, second, means, difference(*means), RATE)


def test_the_odd_group_is_named_and_not_those_that_differ_from_it():
    """ "low" is unlike the public data; "high" is like them, and differs from "low" alone."""
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
    assert "“low” light and dark have changed places against “high” and “public data”" in sentences[0]
    assert "is bright" in sentences[0]
    assert "Once the fault is mended" in sentences[1]


def test_where_the_first_of_two_is_odd_by_the_other_alone_it_is_said_of_the_odd_one():
    found = [compared(MEAN, "high", "low", -0.4, 0.3), compared(MEAN, "low", PUBLIC, 0.3, -0.4)]
    sentences = look_next(found, [])
    assert len(sentences) == 2
    assert sentences[0].startswith("The group “low” is brighter than “public data”")


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(MEAN, 0.3, -0.4), (BORDER, 0.1, 0.7)], "have changed places against “b”: the mean pixel has the other sign, "
         "and the border, which is background, is dark"),
        ([(MEAN, -0.1, -0.4), (BORDER, 0.7, 0.1)], "is brighter than “b”. Look at scaling"),
        ([(MEAN, -0.4, -0.1)], "is darker than “b”. Look at scaling"),
        ([(MEAN, 0.3, -0.4)], "is brighter than “b”. Look at scaling"),
        ([(BORDER, 0.7, 0.1)], "the border is brighter than in “b”, and the images as a whole are not"),
        ([(BORDER, 0.1, 0.7)], "the border is darker"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_group(pairs, expected):
    assert expected in look_next([compared(statistic, "a", "b", a, b) for statistic, a, b in pairs], [])[0]


def test_no_alarm_is_told_with_what_would_have_raised_one():
    quiet = [compared(MEAN, "a", "b", 0.0, 0.0, half) for half in (0.05, 0.2)]
    (sentence,) = look_next(quiet, [])
    assert f"from {quiet[1].detectable:.2f} on" in sentence
    assert f"{quiet[0].detectable:.2f}" != f"{quiet[1].detectable:.2f}"
    assert look_next([], []) == []


def test_a_group_that_is_too_small_is_an_answer():
    sentences = look_next([compared(MEAN, "a", "b", 0.0, 0.0)], ["few"])
    assert "“few” has too few users" in sentences[0]
    assert "No alarm" in sentences[1]
