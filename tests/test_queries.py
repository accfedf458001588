"""One question about users: what a user can move, what the noise is, and what the ledger has of it."""

import math

import pytest
import torch

from lit_epgan.errors import UserError
from lit_epgan.privacy import Ledger, Queries, Releases


def queries(tmp_path, **settings):
    return Queries(Ledger(tmp_path / "ledger.jsonl"), **settings)


@pytest.mark.parametrize("entry", [1e-3, 1.0, 1e300, math.nan, math.inf])
def test_no_user_moves_the_sum_by_more_than_one(tmp_path, entry):
    """The same noise twice: the difference is what the user has moved."""
    others, user = [torch.full((3,), 0.2)] * 4, torch.full((3,), entry, dtype=torch.float64)
    without = queries(tmp_path, noise_seed=3).sum(others, 1.0, "a sum")
    moved = queries(tmp_path, noise_seed=3).sum([*others, user], 1.0, "a sum") - without
    expected = min(entry * math.sqrt(3), 1.0) if math.isfinite(entry * entry) else 0.0
    assert float(moved.norm()) == pytest.approx(expected, abs=1e-12)


def test_the_noise_is_there(tmp_path):
    answer = queries(tmp_path).sum([torch.zeros(40_000)], 2.5, "zeros")
    assert float(answer.std()) == pytest.approx(2.5, rel=0.02)
    assert not torch.equal(answer, queries(tmp_path).sum([torch.zeros(40_000)], 2.5, "zeros"))


def test_every_answer_stands_in_the_ledger_and_disjoint_groups_do_not_add_up(tmp_path):
    asked = queries(tmp_path)
    for group in ("low", "high"):
        asked.sum([torch.ones(2)], 2.0, "embedding", group)
    book = asked.ledger.read()
    assert [a.made for a in book.accounts.values()] == [1, 1]
    assert book.total() == asked.price(Releases(2.0))
    asked.sum([torch.ones(1)], 2.0, "how many", "low")
    assert asked.ledger.read().total() == asked.price(Releases(2.0, 2))


def test_what_passes_the_budget_reads_nothing(tmp_path):
    asked = queries(tmp_path, budget=1.0)

    def read():
        raise AssertionError("data were read")
        yield

    with pytest.raises(UserError, match=r"allows epsilon 1 .* nothing was read"):
        asked.sum(read(), 1.0, "too much")
    with pytest.raises(UserError, match="there is no user to ask"):
        asked.sum([], 40.0, "nobody")


def test_a_question_that_fails_costs_nothing(tmp_path):
    def broken():
        yield torch.ones(2)
        raise ValueError("a user's data are damaged")

    asked = queries(tmp_path)
    with pytest.raises(ValueError, match="damaged"):
        asked.sum(broken(), 2.0, "embedding")
    (account,) = asked.ledger.read().accounts.values()
    assert (account.made, account.ended) == (0, True)
    assert asked.ledger.read().total().epsilon == 0
