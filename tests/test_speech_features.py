"""Features of signals whose features are known, and what is said where a package is missing."""

import sys

import numpy as np
import pytest

from lit_epgan.errors import UserError
from lit_epgan.speech.frames import MELS, cepstra, log_mel, normalise
from lit_epgan.speech.packages import speech_package

RATE = 16000


def mel(hertz):
    return 1127 * np.log(1 + hertz / 700)


@pytest.mark.parametrize("hertz", [300, 1000, 4000])
def test_a_tone_is_loudest_in_its_own_filter(hertz):
    """Kaldi's 40 triangles lie evenly on the mel scale from 20 Hz to 8 kHz; frames of 25 ms begin every 10 ms."""
    x = log_mel(0.1 * np.sin(2 * np.pi * hertz * np.arange(RATE) / RATE))
    assert x.shape == (1 + (RATE - 400) // 160, MELS)
    width = (mel(8000) - mel(20)) / (MELS + 1)
    assert abs(x.mean(0).argmax() - ((mel(hertz) - mel(20)) / width - 1)) <= 0.75


def test_ten_times_the_amplitude_is_two_tens_of_the_logarithm():
    x = 0.01 * np.random.default_rng(0).standard_normal(RATE)
    np.testing.assert_allclose(log_mel(10 * x) - log_mel(x), np.log(100), atol=1e-2)


def test_differences_of_a_ramp_are_its_slope():
    ramp = np.outer(np.arange(20), np.ones(MELS)).astype(np.float32)
    features = cepstra(ramp)
    slope = features[1, 0] - features[0, 0]
    np.testing.assert_allclose(features[4:-4, 13], slope, rtol=1e-4)
    np.testing.assert_allclose(features[4:-4, 26], 0, atol=1e-4)


def test_each_speaker_has_mean_zero_and_variance_one():
    rng = np.random.default_rng(0)
    utterances = [rng.normal(k, 1 + k, size=(200, 3)).astype(np.float32) for k in range(4)]
    done = normalise(utterances, ["anna", "bert", "anna", "bert"])
    for k in range(2):
        own = np.concatenate(done[k::2])
        np.testing.assert_allclose(own.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(own.std(0), 1, atol=1e-3)
    assert abs(done[0].mean()) > 0.1  # a speaker's utterances still differ


def test_a_missing_package_is_one_sentence_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kaldifst", None)
    with pytest.raises(UserError, match=r'kaldifst.*pip install -e "\.\[speech\]"'):
        speech_package("kaldifst")
