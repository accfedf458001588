"""A study's claims: ratios with intervals, corrected p-values, bars and equality."""

import math
from pathlib import Path

import pytest
from scipy import stats

from lit_epgan.cli.report import Claim
from lit_epgan.cli.significance import RatioOfMeans, holm, ratio_of_means
from lit_epgan.cli.study import study
from lit_epgan.cli.study_plan import Ratio
from lit_epgan.errors import UserError
from tests.studies import read_study, rewritten, write_plan, write_stand_in

FIRST, SECOND = {0: 2.0, 1: 2.4, 2: 2.9, 3: 2.2}, {0: 1.0, 1: 1.3, 2: 1.4, 3: 1.2}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path)


def test_holm_by_hand() -> None:
    """Of four: the smallest times 4, then times 3, 2 and 1, never less than the one before; None stays."""
    assert holm([0.04, None, 0.01, 0.03, 0.5]) == pytest.approx([0.09, None, 0.04, 0.09, 0.5], nan_ok=True)
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_a_paired_ratio_is_that_of_the_logarithms_differences() -> None:
    found = ratio_of_means("paired", FIRST, SECOND)
    assert found is not None
    logs = [math.log(FIRST[s] / SECOND[s]) for s in FIRST]
    mean = sum(logs) / 4
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / 3 / 4)
    for level, low, high in ((0.975, found.low, found.high), (0.95, found.inner_low, found.inner_high)):
        reach = stats.t.ppf(level, 3) * error
        assert (low, found.ratio, high) == pytest.approx(
            (math.exp(mean - reach), math.exp(mean), math.exp(mean + reach))
        )
    assert found.p == pytest.approx(2 * stats.t.sf(mean / error, 3))


def test_an_unpaired_ratio_is_welchs() -> None:
    found = ratio_of_means("welch", FIRST, {s + 9: v for s, v in SECOND.items()})
    assert found is not None
    sides = [[math.log(v) for v in values.values()] for values in (FIRST, SECOND)]
    means = [sum(side) / 4 for side in sides]
    errors = [sum((x - m) ** 2 for x in side) / 3 / 4 for side, m in zip(sides, means, strict=True)]
    freedom = sum(errors) ** 2 / sum(e**2 / 3 for e in errors)
    reach = stats.t.ppf(0.975, freedom) * math.sqrt(sum(errors))
    assert found.low == pytest.approx(math.exp(means[0] - means[1] - reach))


@pytest.mark.parametrize("values", [{0: 1.0}, {0: 1.0, 1: 0.0}, {0: 1.0, 1: math.inf}, {}])
def test_too_few_values_or_none_above_zero_have_no_ratio(values: dict[int, float]) -> None:
    assert ratio_of_means("welch", values, SECOND) is None


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        ({"at_most": 1.3}, "at most 1.3: met"),
        ({"at_most": 0.8}, "at most 0.8: not met"),
        ({"at_most": 1.0}, "at most 1: undecided"),
        ({"equal_within": 1.25}, "equal within a factor 1.25: shown"),
        ({"equal_within": 1.1}, "equal within a factor 1.1: not shown"),
        ({}, ""),
    ],
)
def test_verdicts(ratio: dict[str, float], verdict: str) -> None:
    found = RatioOfMeans(1.0, 0.82, 1.3, 0.85, 1.2, 0.9)
    assert Claim(Ratio("fd", "a", "b", **ratio), found, 0.9).verdict == verdict


def test_claims_stand_in_a_file_and_on_the_page(plan: Path, tmp_path: Path) -> None:
    asked = rewritten(
        plan,
        "seeds: [0, 1, 2]",
        "seeds: [0, 1, 2]\nratios:\n- {metric: fd, of: clever, to: plain, at_most: 0.9}\n"
        "- {metric: cls, of: clever, to: plain}",
    )
    output = tmp_path / "out"
    assert study(["--config", str(asked), "--output", str(output)], write_stand_in(tmp_path)) == 0
    table = (output / "ratios.md").read_text()
    clever, plain = ({s: s + value for s in range(3)} for value in (10 / 3, 19 / 3))
    found = ratio_of_means("welch", clever, plain)
    assert found is not None
    assert table.startswith("| of | to | ratio |")
    assert "Clever, Frechet distance | Plain" in table
    assert f"| {found.ratio:.3g} | {found.low:.3g} - {found.high:.3g} | " in table
    assert "at most 0.9: undecided" in table
    assert "What is claimed" in (output / "index.html").read_text()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{metric: fd, of: clevr, to: plain}", "ratios\\[0\\] names 'clevr', which is none of"),
        ("{metric: fid, of: clever, to: plain}", "ratios\\[0\\] names 'fid', which is none of fd"),
        ("{metric: fd, of: clever}", "ratios\\[0\\]: to is missing"),
        ("{metric: fd, of: clever, to: plain, at_most: x}", "at_most is 'x'; it is a number above 0"),
        ("{metric: fd, of: clever, to: plain, equal_within: 0.5}", "equal_within is 0.5; it is a number above 1"),
    ],
)
def test_claims_that_are_not_clear_are_refused(plan: Path, entry: str, said: str) -> None:
    asked = rewritten(plan, "seeds: [0, 1, 2]", f"seeds: [0, 1, 2]\nratios: [{entry}]")
    with pytest.raises(UserError, match=said):
        read_study(asked)
