"""TrieHH: a trie worked by hand, the theorem's epsilon against exact probabilities, and from where on it holds."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import hypergeom

from evidence.trie_hh import TrieHH, delta_of, fewest_users, fewest_votes
from lit_epgan.privacy import Ledger, Queries, Releases, spent
from tests.refusals import assert_refused


def queries(folder):
    return Queries(Ledger(folder / "ledger.jsonl"), noise_seed=0)


@pytest.mark.parametrize(("n", "epsilon", "longest"), [(2500, 2.0, 10), (4000, 6.0, 10)])
def test_a_rounds_exact_probabilities_keep_the_theorem(n, epsilon, longest):
    """k of n users hold a prefix; one of them is emptied. A round tells whether theta of m drawn users hold it."""
    trie = TrieHH(n, epsilon, 1e-5, longest)
    assert trie.cohort >= math.sqrt(n)
    assert 1 + 1 / (n / (trie.cohort * trie.votes) - 1) <= math.exp(epsilon / longest) + 1e-12
    e = 1 / (1 - trie.votes * trie.cohort / n)
    k, votes = np.arange(n // 8)[:, None], np.arange(trie.cohort + 1)
    probability = hypergeom.pmf(votes, n, k, trie.cohort)
    joins, not_joins = probability[:, trie.votes :].sum(1), probability[:, : trie.votes].sum(1)
    more = joins[1:] > e * joins[:-1] * (1 + 1e-9)
    assert 0 < joins[1:][more].max() <= delta_of(trie.votes)
    assert (not_joins[:-1] <= e * not_joins[1:] * (1 + 1e-9)).all()


def test_delta_is_the_theorems_from_as_many_users_on_as_it_takes():
    assert delta_of(9) == pytest.approx(7 / 6 / 362_880)
    assert (fewest_votes(1e-5), fewest_votes(1e-3), fewest_votes(0.5)) == (9, 7, 4)
    needed = fewest_users(2.0, 1e-5, 10)
    assert needed == pytest.approx((9 / (1 - math.exp(-0.2))) ** 2, rel=0.03)
    trie = TrieHH(needed, 2.0, 1e-5, 10)
    assert trie.cohort >= math.sqrt(needed)
    assert_refused(f"takes at least {needed} users", TrieHH, needed - 1, 2.0, 1e-5, 10)
    assert_refused("cannot be", TrieHH, 1000, 0.0, 1e-5)


def of(monkeypatch, longest, **numbers):
    """One of such numbers as have no guarantee."""
    trie = TrieHH(2500, 8.0, 1e-5, longest)
    for name, value in numbers.items():
        object.__setattr__(trie, name, value)
    monkeypatch.setattr(TrieHH, "releases", Releases(math.inf, epsilon=1.0))
    return trie


def test_a_trie_by_hand_ends_with_the_round_in_which_nothing_joins(tmp_path, monkeypatch):
    """All users are drawn and four votes are asked for: five hold "ab", four "a", three "ac", nine "abcdef"."""
    trie = of(monkeypatch, 4, users=21, cohort=21, votes=4)
    held = [["ab"]] * 5 + [["a"]] * 4 + [["ac"]] * 3 + [["abcdef"]] * 8 + [[]]
    users = [lambda own=own: own for own in held]  # type: ignore[misc]
    assert trie.find(queries(tmp_path), users, "words") == ["a", "ab"]
    trie, read = TrieHH(5000, 4.0, 1e-5, 5), Counter[int]()
    users = [lambda k=k: read.update([k]) or [chr(k)] for k in range(5000)]  # type: ignore[misc]
    assert trie.find(queries(tmp_path), users, "own words") == []
    assert read.total() == trie.cohort


class Scripted:
    def __init__(self, *drawn: Sequence[int]) -> None:
        self.drawn = iter(drawn)

    def sample(self, users: Sequence[Any], m: int) -> list[Any]:
        return [users[k] for k in next(self.drawn)]

    def choice(self, words: Sequence[str]) -> str:
        return words[-1]


def test_each_round_draws_anew_and_a_prefix_joins_after_the_one_before_it(tmp_path, monkeypatch):
    """Five users vote for "ad", four for "bc". First "b" has three votes in round 1, then "ad" has three in round 2."""
    trie = of(monkeypatch, 3, users=14, cohort=12, votes=4)
    held = [["b", "ad"]] * 5 + [["bc"]] * 4 + [[]] * 5
    rounds = ([*range(1, 8), *range(9, 14)], range(12), range(12))
    monkeypatch.setattr("evidence.trie_hh.drawing", lambda queries, what, group: Scripted(*rounds))
    users = [lambda own=own: own for own in held]  # type: ignore[misc]
    assert trie.find(queries(tmp_path), users, "words") == ["ad"]
    rounds = (range(12), range(2, 14), range(2, 14))
    assert trie.find(queries(tmp_path), users, "words") == ["bc"]


def test_one_trie_costs_what_was_asked_for_and_reads_those_drawn_alone(tmp_path):
    trie, asked = TrieHH(5000, 4.0, 1e-5, 5), queries(tmp_path)
    read: list[int] = []

    def user(k: int) -> list[str]:
        read.append(k)
        return ["same"] if k % 1000 else ["mine"]

    assert trie.find(asked, [lambda k=k: user(k) for k in range(5000)], "words") == ["same"]  # type: ignore[misc]
    assert len(read) == 5 * trie.cohort
    assert asked.ledger.read().total() == spent([trie.releases], 1e-5)
    assert 3.9 < trie.releases.epsilon <= 4
    assert trie.releases.delta == pytest.approx(7 / 6 / 362_880)  # nine votes
    assert_refused("made for 5000 users", trie.find, asked, [list], "words")
