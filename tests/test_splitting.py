"""Which mixtures grow, against Kaldi's own; where halves of a Gaussian lie; the same every time."""

import numpy as np
import pytest

from lit_epgan.speech.gmm import Mixtures, split, split_targets
from lit_epgan.speech.phones import PDFS


@pytest.mark.parametrize("wanted", [PDFS, PDFS + 40, 3 * PDFS, 10**6])
def test_mixtures_grow_as_kaldis_do(wanted):
    occupancy = np.random.default_rng(0).gamma(0.5, 800.0, PDFS).astype(np.float32)
    kaldis = Mixtures(np.zeros(2), np.ones(2)).model
    kaldis.split_by_count(occupancy, min(wanted, 4000), 0.01, 0.2, 20.0)
    expected = [kaldis.get_pdf(j).num_gauss for j in range(PDFS)]
    assert split_targets(occupancy.tolist(), min(wanted, 4000)) == expected


def test_the_heaviest_gaussian_is_halved():
    model = Mixtures(np.array([1.0, -2.0]), np.array([4.0, 0.25])).model
    mixture = model.get_pdf(0)
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal(2), rng.standard_normal(2)
    split(mixture, 3, np.random.default_rng(0))
    scale = 0.01 * np.array([2.0, 0.5])
    low, high = np.array([1.0, -2.0]) - scale * first, np.array([1.0, -2.0]) + scale * first
    np.testing.assert_allclose(mixture.weights, [0.25, 0.5, 0.25])
    np.testing.assert_allclose(mixture.means, [low - scale * second, high, low + scale * second], rtol=1e-5)
    np.testing.assert_allclose(1 / np.array(mixture.inv_vars), [[4.0, 0.25]] * 3, rtol=1e-6)
    assert model.num_gauss == PDFS + 2
    other = Mixtures(np.array([1.0, -2.0]), np.array([4.0, 0.25])).model
    split(other.get_pdf(0), 3, np.random.default_rng(0))
    assert np.array_equal(other.get_pdf(0).means, mixture.means)
