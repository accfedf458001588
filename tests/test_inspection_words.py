"""Words outside a vocabulary: their order, and the share of those shown that are joined."""

import pytest

from lit_epgan.inspection.words_view import JoinedShare, joined_share, words_outside

SENTENCES = [["the", "b", "a"], ["b a", "the"], ["b a", "b"], ["c"]]


def test_words_outside_a_vocabulary_come_by_their_number() -> None:
    assert words_outside(SENTENCES, {"the"}) == ["b", "b", "b a", "b a", "a", "c"]
    assert words_outside(SENTENCES, {"the"}, position=0) == ["b a", "b a", "c"]
    assert words_outside(SENTENCES, {"the"}, position=2) == ["a"]
    assert words_outside([], {"the"}) == []


def test_the_share_of_joined_words_has_its_interval() -> None:
    found = joined_share(["return the", "this is", "apple"])
    assert (found.joined, found.shown, found.share) == (2, 3, 2 / 3)
    assert (found.low, found.high) == pytest.approx((0.094299, 0.991596), abs=1e-6)  # of a table
    assert str(found) == "2 of 3 words shown are joined: 67 % (95 %: 9 to 99 %)"
    assert joined_share([" a"]).joined == 0
    assert joined_share([]) == JoinedShare(0, 0, 0.0, 1.0, 0.95)
    assert str(joined_share([])) == "no word was shown"
    assert "(99 %: " in str(joined_share(["a b"], 0.99))
