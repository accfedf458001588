"""The audit's bound: against enumeration, and against mechanisms that make the most of their epsilon and delta."""

import importlib
import itertools
import math
from types import ModuleType

import pytest

from tests.processes import ROOT


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("one_run_audit")


def at_least(correct: int, guesses: int, chance: float) -> float:
    """By all outcomes of so many guesses, each right with the same chance."""
    outcomes = itertools.product([0, 1], repeat=guesses)
    return sum(chance ** sum(o) * (1 - chance) ** (guesses - sum(o)) for o in outcomes if sum(o) >= correct)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("delta", [0.0, 0.01])
def test_the_p_value_is_the_papers(audit: ModuleType, epsilon: float, delta: float) -> None:
    q, canaries = 1 / (1 + math.exp(-epsilon)), 9
    for correct in range(9):
        beta = at_least(correct, 8, q)
        more = [(at_least(correct - i, 8, q) - beta) / i for i in range(1, correct + 1)]
        expected = min(1.0, beta + 2 * canaries * delta * max(more, default=0.0))
        assert audit.p_value(8, correct, canaries, epsilon, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.3, 1.5])
def test_what_is_private_is_not_refuted_more_often_than_the_p_value_says(audit: ModuleType, epsilon: float) -> None:
    """Randomised response that gives each canary away with probability delta, and one that gives all away at once."""
    q, delta = 1 / (1 + math.exp(-epsilon)), 0.02
    for correct in range(9):
        p = audit.p_value(8, correct, 8, epsilon, delta)
        assert at_least(correct, 8, delta + (1 - delta) * q) <= p * (1 + 1e-12)
        assert delta + (1 - delta) * at_least(correct, 8, q) <= p * (1 + 1e-12)


def test_the_lower_bound_is_where_the_p_value_passes_the_confidence(audit: ModuleType) -> None:
    bound = audit.lower_bound(100, 90, 500, 1e-5)
    assert audit.p_value(100, 90, 500, bound, 1e-5) < 0.05 < audit.p_value(100, 90, 500, bound + 2e-3, 1e-5)
    assert audit.lower_bound(100, 52, 500, 1e-5) == pytest.approx(0, abs=2e-3)
    assert audit.lower_bound(200, 200, 500, 0.0) == pytest.approx(-math.log(0.05 ** (-1 / 200) - 1), abs=2e-3)
