"""Statistics of clients add up to those of all their audio; what is learnt from them is what the data say."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from lit_epgan.speech.gmm import Mixtures
from lit_epgan.speech.phones import PDFS, phone_models

DIMENSION, FRAMES = 3, 120


@pytest.fixture(scope="module")
def phones():
    return phone_models()


@pytest.fixture
def clients(phones):
    """Two clients' utterances, with transitions of the first two pdfs."""
    rng = np.random.default_rng(0)
    transitions = [int(np.flatnonzero(phones.pdfs == pdf)[0]) + 1 for pdf in (0, 1)]
    utterances = [[rng.normal(k, 1 + k, size=(FRAMES, DIMENSION)).astype(np.float32)] for k in range(2)]
    return [(own, [[transitions[i % 2] for i in range(FRAMES)]]) for own in utterances]


def fresh():
    return Mixtures(np.zeros(DIMENSION), np.ones(DIMENSION))


def test_clients_statistics_add_up_to_those_of_all_audio(clients, phones):
    mixtures = fresh()
    one, other = (mixtures.statistics(*own, phones) for own in clients)
    together = mixtures.statistics(*(a + b for a, b in zip(*clients, strict=True)), phones)
    for name in together.__dataclass_fields__:
        np.testing.assert_allclose(getattr(one + other, name), getattr(together, name))
    assert together.frames == 2 * FRAMES


def test_one_gaussian_learns_mean_and_variance_and_their_likelihood(clients, phones):
    mixtures = fresh()
    total = mixtures.statistics(*clients[0], phones) + mixtures.statistics(*clients[1], phones)
    mixtures.learn(total)
    frames = np.concatenate([own[0][0][::2] for own in clients])  # those of pdf 0
    learnt = mixtures.model.get_pdf(0)
    np.testing.assert_allclose(learnt.means[0], frames.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(1 / learnt.inv_vars[0], frames.var(0), rtol=1e-3)
    again = mixtures.statistics(*clients[0], phones)
    expected = 0.0
    for pdf in range(2):
        x = np.concatenate([own[0][0][pdf::2] for own in clients])
        expected += multivariate_normal(x.mean(0), np.diag(x.var(0))).logpdf(clients[0][0][0][pdf::2]).sum()
    assert again.log_likelihood == pytest.approx(expected, rel=1e-4)


def test_every_iteration_is_likelier_and_more_gaussians_are_likelier_still(clients, phones):
    mixtures, likelihoods = fresh(), []
    for gaussians in (None, PDFS + 2, *[None] * 20):
        total = mixtures.statistics(*clients[0], phones) + mixtures.statistics(*clients[1], phones)
        likelihoods.append(total.log_likelihood)
        mixtures.learn(total, gaussians)
    assert mixtures.gaussians == PDFS + 2
    assert np.all(np.diff(likelihoods[2:]) > -1e-3)
    assert likelihoods[-1] > likelihoods[1] + 1


def test_an_utterance_without_alignment_is_left_out(phones):
    nothing = fresh().statistics([np.ones((5, DIMENSION), np.float32)], [[]], phones)
    assert nothing.frames == 0
    assert nothing.occupancy.sum() == 0


def test_mixtures_are_what_their_state_says(clients, phones):
    mixtures = fresh()
    mixtures.learn(mixtures.statistics(*clients[0], phones), PDFS + 2)
    state = mixtures.state()
    restored = Mixtures.from_state(state)
    for name, tensor in restored.state().items():
        assert torch.equal(tensor, state[name])
