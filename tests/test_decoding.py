"""Frames whose states are known decode into the words they were made of; the grammar decides where they are not."""

import numpy as np
import pytest

from lit_epgan.speech.decoding import Decoder, decoding_graph, log_prior
from lit_epgan.speech.gmm import aligned, training_graphs
from lit_epgan.speech.phones import PDFS, UNKNOWN_WORD, lexicon, phone_models

TEXTS = ["turn it on", "turn it off", "two cats turn", "blorf it on", "to turn it on", "to turn it off"]


@pytest.fixture(scope="module")
def decoder():
    words, phones = lexicon({word for text in TEXTS for word in text.split()}), phone_models()
    return Decoder(decoding_graph(words, phones, TEXTS), phones, words, np.full(PDFS, -np.log(PDFS)))


def posteriors(decoder, text, frames=80, sure=0.99):
    """log p(state | frame) (frames, states) that is ``sure`` of a path of ``text``."""
    (graph,) = training_graphs(decoder.lexicon, decoder.phones, [text])
    rng = np.random.default_rng(0)
    anything = decoder.phones.decodable(rng.normal(size=(frames, PDFS)).astype(np.float32))
    path = aligned(graph, anything, decoder.phones, beam=1000.0)
    scores = np.full((frames, PDFS), np.log((1 - sure) / PDFS))
    scores[np.arange(frames), decoder.phones.pdfs[np.array(path) - 1]] = np.log(sure)
    return scores


@pytest.mark.parametrize("text", TEXTS)
def test_known_states_become_their_words(decoder, text):
    assert decoder.words(posteriors(decoder, text), scale=1.0) == " ".join(decoder.lexicon.known(text))


def test_a_word_without_pronunciation_is_unknown(decoder):
    assert decoder.lexicon.known("blorf it on") == [UNKNOWN_WORD, "it", "on"]


def test_the_grammar_tells_homophones_apart(decoder):
    """``two`` sounds like ``to``, which alone stands before ``turn`` in the grammar's text."""
    assert decoder.words(posteriors(decoder, "two turn it on"), scale=1.0) == "to turn it on"


def test_the_prior_is_how_often_a_state_was_aligned():
    prior = np.exp(log_prior([np.array([0, 0, 1]), np.array([1, 1])], 3))
    np.testing.assert_allclose(prior, np.array([3, 4, 1]) / 8)


def test_posteriors_become_scaled_likelihoods(decoder, monkeypatch):
    """Bayes' rule: scale (log p(s | x) - log p(s)) is what the search reads."""
    seen = []
    monkeypatch.setattr(type(decoder.phones), "decodable", lambda self, scores: seen.append(scores))
    monkeypatch.setattr(Decoder, "_best", lambda self, decodable: "")
    prior = np.log(np.linspace(1, 2, PDFS))
    Decoder(decoder.graph, decoder.phones, decoder.lexicon, prior).words(np.full((2, PDFS), -1.0), scale=0.5)
    np.testing.assert_allclose(seen[0], np.tile(0.5 * (-1 - prior), (2, 1)), rtol=1e-6)
