"""What a session does to its speech, measured on the samples: echo, noise and pass band are those of its conditions."""

import numpy as np
import pytest
from scipy.signal import welch

from lit_epgan.speech.frames import RATE
from lit_epgan.speech.sessions import Conditions
from lit_epgan.speech.synthesis import ECHO, LEVEL, impulse_response, noise, record


def rng():
    return np.random.default_rng(0)


def power(samples):
    return np.mean(np.square(samples))


@pytest.mark.parametrize("seconds", [0.2, 0.5, 0.9])
def test_an_echo_falls_by_60_db_in_its_time(seconds):
    """By Schroeder's backward integration, from -5 to -35 dB."""
    echo = impulse_response(seconds, rng())
    echo[0] -= 1  # the direct sound
    assert np.linalg.norm(echo) == pytest.approx(ECHO)
    left = 10 * np.log10(np.cumsum(np.square(echo)[::-1])[::-1] / np.square(echo).sum())
    times = np.searchsorted(-left, [5, 35]) / RATE
    assert 2 * np.diff(times)[0] == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("snr", [0.0, 10.0])
@pytest.mark.parametrize("kind", ["white", "pink", "hum", "babble"])
def test_noise_is_as_loud_as_it_should_be(kind, snr):
    """What is heard, scaled back to the speech's level, is the speech and the noise."""
    speech = rng().standard_normal(2 * RATE) * np.repeat(rng().random(2 * RATE // 400), 400)
    others = [rng().standard_normal(RATE) for _ in range(3)]
    wide = {"reverberation": 0.2, "noise": kind, "low": 1.0, "high": 7999.0}
    quiet, noisy = (record(speech, others, Conditions(snr=s, **wide), rng()) for s in (200.0, snr))
    share = np.dot(noisy, quiet) / np.dot(quiet, quiet)
    ratio = 10 * np.log10(power(share * quiet) / power(noisy - share * quiet))
    assert ratio == pytest.approx(snr, abs=0.5)
    assert np.sqrt(power(noisy)) == pytest.approx(LEVEL, rel=1e-2)


def test_the_channel_passes_its_band():
    conditions = Conditions(reverberation=0.2, noise="white", snr=0.0, low=400.0, high=3000.0)
    frequencies, density = welch(record(rng().standard_normal(20 * RATE), [], conditions, rng()), RATE, nperseg=1024)
    inside = density[(frequencies > 700) & (frequencies < 2000)].mean()
    assert 10 * np.log10(density[frequencies < 100].mean() / inside) < -20
    assert 10 * np.log10(density[frequencies > 7000].mean() / inside) < -20
    edges = np.interp([400, 3000], frequencies, density)
    assert 10 * np.log10(edges / inside) == pytest.approx([-3, -3], abs=1.5)


def test_pink_noise_falls_by_three_db_an_octave():
    frequencies, density = welch(noise("pink", 40 * RATE, [], rng()), RATE, nperseg=4096)
    at = 10 * np.log10(np.interp([200, 3200], frequencies, density))
    assert np.diff(at)[0] == pytest.approx(-12, abs=1.5)
