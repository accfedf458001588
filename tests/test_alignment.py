"""Alignment by clients that keep their audio: the mixtures are those of one party that has all of it."""

import numpy as np
import pytest
import torch

from lit_epgan.speech.gmm import AlignedClient, flat_start, train_mixtures, training_graphs
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.phones import PDFS, lexicon, phone_models

TEXTS = ["one two", "three", "two one three", "three two", "one", "one three two"]


@pytest.fixture
def utterances():
    """Cepstra that say which word is spoken: each has a mean of its own."""
    rng = np.random.default_rng(0)
    means = dict(zip(("one", "two", "three"), 3 * rng.normal(size=(3, 39)), strict=True))
    spoken = [[rng.normal(means[word], 1 + k / 3, size=(40, 39)) for word in text.split()]
              for k, text in enumerate(TEXTS)]  # fmt: skip
    return [np.concatenate(words).astype(np.float32) for words in spoken]


def clients(utterances, phones, shares):
    graphs = training_graphs(lexicon({"one", "two", "three"}), phones, TEXTS)
    return [AlignedClient(utterances[own], graphs[own]) for own in shares]


APART, TOGETHER = [slice(0, 1), slice(1, 4), slice(4, 6)], [slice(0, 6)]


def test_a_flat_start_is_mean_and_variance_of_all_frames(utterances):
    mixtures = flat_start(clients(utterances, phone_models(), APART))
    frames = np.concatenate(utterances)
    for pdf in (0, PDFS - 1):
        gaussian = mixtures.model.get_pdf(pdf)
        np.testing.assert_allclose(gaussian.means[0], frames.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(1 / gaussian.inv_vars[0], frames.var(0), rtol=1e-4)


def test_three_clients_learn_the_mixtures_of_one(utterances, monkeypatch):
    """Nothing but sums leaves a client, and yet alignments, mixtures and transition probabilities are the same.

    Were it not for what the first alignment draws, optional silences: its seeds are a client's own, here all alike.
    """
    kaldifst = speech_package("kaldifst")
    equally = kaldifst.equal_align
    monkeypatch.setattr(kaldifst, "equal_align", lambda graph, n, seed, tries: equally(graph, n, n, tries))
    learnt = []
    for shares in (APART, TOGETHER):
        phones = phone_models()
        parties = clients(utterances, phones, shares)
        mixtures = train_mixtures(parties, phones, iterations=10, gaussians=PDFS + 10)
        learnt.append((mixtures.state(), phones.counts, [path for each in parties for path in each.alignments]))
    (apart, counts, paths), (together, all_counts, all_paths) = learnt
    assert paths == all_paths
    assert len({state for path in paths for state in path}) > 10
    np.testing.assert_allclose(counts, all_counts)
    assert apart.keys() == together.keys()
    for name, tensor in apart.items():
        torch.testing.assert_close(tensor, together[name], rtol=1e-3, atol=1e-4)
