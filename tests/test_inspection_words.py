"""Words outside a vocabulary: their order, their places, and the share of those shown that are joined."""

import pytest
import torch

from lit_epgan.inspection.words import JoinedShare, joined_share, share_outside, words_outside

SENTENCES = [["the", "b", "a"], ["b a", "the"], ["b a", "b"], ["c"]]


def test_words_outside_a_vocabulary_come_by_their_number() -> None:
    assert words_outside(SENTENCES, {"the"}) == ["b", "b", "b a", "b a", "a", "c"]
    assert words_outside(SENTENCES, {"the"}, position=0) == ["b a", "b a", "c"]
    assert words_outside(SENTENCES, {"the"}, position=2) == ["a"]
    assert words_outside([], {"the"}) == []


def test_their_share_by_place_has_a_norm_of_at_most_one() -> None:
    share = share_outside(SENTENCES, {"the"}, 4)
    torch.testing.assert_close(2 * share, torch.tensor([3 / 4, 2 / 3, 1, 0]).double())
    assert float(share_outside([["x", "y"]], set(), 2).norm()) == pytest.approx(1)


def test_the_share_of_joined_words_has_its_interval() -> None:
    found = joined_share(["return the", "this is", "apple"])
    assert (found.joined, found.shown, found.share) == (2, 3, 2 / 3)
    assert (found.low, found.high) == pytest.approx((0.094299, 0.991596), abs=1e-6)  # of a table
    assert str(found) == "2 of 3 words shown are joined: 67 % (95 %: 9 to 99 %)"
    assert joined_share([" a"]).joined == 0
    assert joined_share([]) == JoinedShare(0, 0, 0.0, 1.0, 0.95)
    assert str(joined_share([])) == "no word was shown"
    assert "(99 %: " in str(joined_share(["a b"], 0.99))
