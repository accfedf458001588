"""Noises with known spectra, and recordings with known levels."""

import numpy as np
import pytest
from scipy.signal import welch

from lit_epgan.speech.frames import RATE
from lit_epgan.speech.sessions import NOISES, Conditions
from lit_epgan.speech.synthesis import LEVEL, noise, record

VOICES = [np.sin(np.arange(RATE) * pitch) for pitch in (0.1, 0.2)]


@pytest.mark.parametrize("kind", NOISES)
def test_every_noise_has_variance_one_and_is_drawn_afresh(kind):
    first, second = (noise(kind, 2 * RATE, VOICES, np.random.default_rng(seed)) for seed in (0, 1))
    assert first.shape == (2 * RATE,)
    assert first.std() == pytest.approx(1)
    assert np.abs(np.corrcoef(first, second)[0, 1]) < 0.9
    assert np.array_equal(first, noise(kind, 2 * RATE, VOICES, np.random.default_rng(0)))


@pytest.mark.parametrize(("kind", "slope"), [("white", 0.0), ("pink", -1.0)])
def test_the_power_of_coloured_noise_falls_with_frequency(kind, slope):
    """Power 1 and 1 / f: slopes of log power over log frequency."""
    frequency, power = welch(noise(kind, 60 * RATE, VOICES, np.random.default_rng(0)), RATE, nperseg=4096)
    band = (frequency > 100) & (frequency < 4000)
    assert np.polyfit(np.log(frequency[band]), np.log(power[band]), 1)[0] == pytest.approx(slope, abs=0.05)


def test_the_hum_is_the_mains():
    frequency, power = welch(noise("hum", 20 * RATE, VOICES, np.random.default_rng(0)), RATE, nperseg=RATE)
    assert frequency[power.argmax()] == 50
    assert power[frequency == 100] > 100 * power[frequency == 75]


def test_a_recording_has_its_level_and_its_noise():
    """Silence between two halves of speech is as loud as the noise: 20 dB below the speech."""
    rng = np.random.default_rng(0)
    speech = rng.standard_normal(4 * RATE)
    speech[RATE : 3 * RATE] = 0
    heard = record(speech, VOICES, Conditions(0.05, "white", 20.0, 50.0, 7900.0), rng)
    assert heard.std() == pytest.approx(LEVEL)
    quiet, loud = heard[RATE + RATE // 2 : 2 * RATE].std(), heard[:RATE].std()
    assert 20 * np.log10(loud / quiet) == pytest.approx(23, abs=1)  # speech is there half of the time
