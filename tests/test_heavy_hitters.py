"""Heavy hitters: which words are shown, that one user's own hardly ever are, and what the ledger has of it."""

import math

import pytest
from scipy.stats import binom, norm

from lit_epgan.privacy import HeavyHitters, Ledger, Queries, Releases, spent
from tests.refusals import assert_refused


def queries(folder, **settings) -> Queries:
    return Queries(Ledger(folder / "ledger.jsonl"), **settings)


@pytest.mark.parametrize("words", [1, 2, 5, 20, 200])
@pytest.mark.parametrize("z", [0.1, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("delta", [1e-9, 5e-6, 0.05])
def test_a_users_own_words_are_shown_with_probability_delta_and_no_smaller_threshold_would_do(words, z, delta):
    t = HeavyHitters(words, z, delta).threshold
    shown = [-math.expm1(k * norm.logcdf((t - 1 / math.sqrt(k)) / z)) for k in range(1, words + 1)]
    assert max(shown) == pytest.approx(delta, rel=1e-6)


def test_it_is_so_in_a_simulation(tmp_path):
    """A user with k words of its own, asked 1,000 times; z = 1 and m = 4: four words are the worst case."""
    hitters, asked, draws = HeavyHitters(4, 1.0, 0.05), queries(tmp_path, noise_seed=1), 1000
    asked.ledger.release = lambda name: None  # the file is not what is tested
    asked.ledger.begin = lambda *_: ""
    asked.ledger.end = lambda name: None
    for own in (["a"], ["a", "b", "c", "d"]):
        shown = sum(bool(hitters.find(asked, [own, []], "own words")) for _ in range(draws))
        k = len(own)
        probability = 1 - norm.cdf(hitters.threshold - 1 / math.sqrt(k)) ** k
        assert probability <= 0.05 + 1e-12
        low, high = binom.interval(0.999, draws, probability)
        assert low <= shown <= high


@pytest.mark.parametrize("epsilon", [0.25, 1.0, 4.0])
def test_noise_and_selection_together_keep_the_stated_epsilon(epsilon):
    """A user's words are all its own but one; p is the chance that one is shown. With the user the answer has the law
    (1 - p) N + p (something new), and without it N': each way's exact divergence is at most delta."""
    delta = 1e-5
    hitters = HeavyHitters.within(epsilon, delta, 5)
    p, shift = hitters.delta, 1 / hitters.noise_multiplier

    def of_noise(epsilon: float) -> float:
        return norm.cdf(shift / 2 - epsilon / shift) - math.exp(epsilon) * norm.cdf(-shift / 2 - epsilon / shift)

    assert spent([hitters.releases], delta).epsilon <= epsilon
    assert p + (1 - p) * of_noise(epsilon - math.log1p(-p)) <= delta
    assert of_noise(epsilon + math.log1p(-p)) <= delta
    assert of_noise(epsilon * 0.98) > delta / 2  # z is not larger than it takes


def test_what_a_query_costs_where_a_user_is_replaced():
    """Twice the shift, and twice the chance that a word of its own is shown."""
    hitters = HeavyHitters.within(2.0, 1e-5, 5, "replace_one")
    assert hitters.delta == pytest.approx(2.5e-6)
    assert 1.99 < spent([hitters.releases], 1e-5, "replace_one").epsilon <= 2


@pytest.fixture
def anything(monkeypatch):
    """Numbers that guarantee nothing are not refused."""
    monkeypatch.setattr(HeavyHitters, "releases", Releases(math.inf, epsilon=1.0))


@pytest.mark.usefixtures("anything")
def test_a_user_gives_its_first_different_words_in_whatever_order(tmp_path):
    users, hitters = [["b", "c"], ["a"], ["c"], ["a", "b"]] * 4, HeavyHitters(2, 0.5, 0.4)
    answers = [hitters.find(queries(tmp_path, noise_seed=1), own, "words") for own in (users, users[::-1])]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3
    users = [["a", "a", "b", "c"]] * 9 + [["a"]] * 2 + [["d"], []]
    found = HeavyHitters(2, 1e-6, 1e-3).find(queries(tmp_path), users, "words")
    assert list(found) == ["a", "b"]
    assert found["a"] == pytest.approx(9 / math.sqrt(2) + 2, abs=1e-4)
    assert found["b"] == pytest.approx(9 / math.sqrt(2), abs=1e-4)


def test_the_ledger_has_the_delta_of_the_selection_and_refuses_before_anything_is_read(tmp_path):
    hitters = HeavyHitters.within(1.0, 1e-5, 5)
    asked = queries(tmp_path, budget=1.5)
    hitters.find(asked, [["a"]], "first")
    total = asked.ledger.read().total()
    assert total == spent([hitters.releases], 1e-5)
    assert total.epsilon == pytest.approx(1, rel=2e-3)
    assert total.epsilon <= 1
    assert "a delta of 5e-06 for what was selected" in str(total)

    def read():
        raise AssertionError("data were read")
        yield

    assert_refused("[Nn]othing was read", hitters.find, asked, read(), "second")
    assert_refused("there is no user to ask", HeavyHitters(1, 50.0, 1e-9).find, asked, [], "nobody")
    assert asked.ledger.read().total() == total


@pytest.mark.parametrize("settings", [(0, 1.0, 0.1), (1, 0.0, 0.1), (1, math.inf, 0.1), (1, 1.0, 0.0), (1, 1.0, 1.0)])
def test_what_cannot_be_is_refused(settings):
    assert_refused("heavy hitters", HeavyHitters, *settings)
