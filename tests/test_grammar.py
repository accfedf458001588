"""The grammar's weights are a tri-gram model's with Kneser-Ney smoothing, computed here from its equations alone."""

from collections import Counter

import numpy as np
import pytest

from lit_epgan.speech.decoding import grammar
from lit_epgan.speech.phones import lexicon

ORDER = 3
TEXTS = [
    *("turn it on", "turn it off", "two cats turn", "to turn it on", "to turn it off", "turn two cats on"),
    *("it turn on", "two cats on it", "cats on it turn", "turn it on it", "two turn to two", "off it to it"),
]


class KneserNey:
    """Back-off Kneser-Ney smoothing (Kneser and Ney 1995), one discount an order, unigrams without.

    p(w | h) = (c(h w) - D) / c(h) of n-grams that were seen, else b(h) p(w | h'), where h' lacks the first word of h,
    D = n1 / (n1 + 2 n2) of the n-grams seen once and twice, and c counts for orders below the highest the different
    words before (an n-gram that begins a sentence has none, and is counted as it is).
    """

    def __init__(self, texts):
        self.raw = [Counter() for _ in range(ORDER)]
        for text in texts:
            words = ("<s>", *text.split(), "</s>")
            for n in range(ORDER):
                self.raw[n].update(words[i : i + n + 1] for i in range(len(words) - n))
        del self.raw[0][("<s>",)]
        self.count = [Counter() for _ in range(ORDER - 1)] + [self.raw[-1]]
        for n in range(ORDER - 1):
            before = Counter(longer[1:] for longer in self.raw[n + 1])
            self.count[n] = Counter({gram: before[gram] or c for gram, c in self.raw[n].items()})
        self.discount = [0.0]
        for counts in self.raw[1:]:
            once, twice = (sum(c == k for c in counts.values()) for k in (1, 2))
            self.discount.append(once / (once + 2 * twice))

    def seen(self, history):
        """The words seen after a history, each with its discounted probability."""
        n = len(history)
        after = {gram[-1]: c for gram, c in self.count[n].items() if gram[:-1] == history}
        total = sum(after.values())
        return {word: (c - self.discount[n]) / total for word, c in after.items()}

    def p(self, word, history):
        seen = self.seen(history)
        if word in seen:
            return seen[word]
        lower = history[1:]
        if not seen:
            return self.p(word, lower)
        left = (1 - sum(seen.values())) / (1 - sum(self.p(w, lower) for w in seen))
        return left * self.p(word, lower)


@pytest.fixture(scope="module")
def model():
    return KneserNey(TEXTS)


@pytest.fixture(scope="module")
def costs():
    """The cost of a sentence in the grammar: each word's arc where there is one, else the arc that backs off."""
    kaldifst = pytest.importorskip("kaldifst")
    words = lexicon({word for text in TEXTS for word in text.split()})
    fst = grammar(words, TEXTS)
    back_off = words.words["#0"]

    def arcs(state):
        return {arc.ilabel: arc for arc in kaldifst.ArcIterator(fst, state)}

    def cost(text):
        state, total = fst.start, 0.0
        for label in [words.words[word] for word in text.split()]:
            while label not in arcs(state):
                total, state = total + arcs(state)[back_off].weight.value, arcs(state)[back_off].nextstate
            total, state = total + arcs(state)[label].weight.value, arcs(state)[label].nextstate
        while not np.isfinite(fst.final(state).value):
            total, state = total + arcs(state)[back_off].weight.value, arcs(state)[back_off].nextstate
        return total + fst.final(state).value

    return cost


def test_the_oracle_is_a_distribution(model):
    words = {gram[0] for gram in model.raw[0]}
    for history in [(), ("turn",), ("<s>",), ("<s>", "turn"), ("turn", "it"), ("on", "cats")]:
        assert sum(model.p(word, history) for word in words) == pytest.approx(1)


@pytest.mark.parametrize("text", [*TEXTS, "two cats", "cats turn it to", "on on on", "to it two off cats"])
def test_sentences_cost_what_kneser_ney_says(model, costs, text):
    """Seen ones, and such as back off once or twice."""
    history, expected = ("<s>",), 0.0
    for word in (*text.split(), "</s>"):
        expected -= np.log(model.p(word, history))
        history = (*history, word)[-ORDER + 1 :]
    assert costs(text) == pytest.approx(expected, abs=1e-4)
