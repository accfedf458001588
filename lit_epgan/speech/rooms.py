"""What happens to speech on its way to the recording: a room's echo, noise, a channel's pass band."""

import numpy as np
from numpy.typing import NDArray
from scipy.signal import butter, fftconvolve, sosfilt

from lit_epgan.speech.espeak import RATE
from lit_epgan.speech.sessions import Conditions

Samples = NDArray[np.float64]
LEVEL = 0.05  # root mean square of a recording; full scale is 1
COLOURS = {"white": 0.0, "pink": 0.5}  # amplitudes fall with frequency to this power
ECHO = 0.7  # norm of the echo, the direct sound's being 1


def record(speech: Samples, others: list[Samples], conditions: Conditions, rng: np.random.Generator) -> Samples:
    """An utterance as the session's microphone hears it.

    Args:
        speech: samples (n,) at 16 kHz without room or noise.
        others: what else is spoken there, of which babble is made.
        conditions: room, noise and channel.
        rng: draws the echo and the noise.

    Returns:
        samples (n,) with a root mean square of ``LEVEL``.
    """
    wet = fftconvolve(speech, impulse_response(conditions.reverberation, rng))[: len(speech)]
    wet = wet / wet.std() + 10 ** (-conditions.snr / 20) * noise(conditions.noise, len(wet), others, rng)
    band = butter(2, [conditions.low, conditions.high], "bandpass", fs=RATE, output="sos")
    heard = sosfilt(band, wet)
    return np.asarray(LEVEL * heard / heard.std())


def impulse_response(reverberation: float, rng: np.random.Generator) -> Samples:
    """Direct sound and an echo of exponentially decaying noise: 60 dB in ``reverberation`` seconds."""
    t = np.arange(int(RATE * reverberation)) / RATE
    echo = rng.standard_normal(len(t)) * 10 ** (-3 * t / reverberation)
    echo *= ECHO / np.linalg.norm(echo)
    echo[0] += 1
    return echo


def noise(kind: str, n: int, others: list[Samples], rng: np.random.Generator) -> Samples:
    """n samples of noise with unit variance; babble is five others who talk, hum the mains'."""
    seconds = np.arange(n) / RATE
    if kind == "babble":
        drawn = [others[rng.integers(len(others))] for _ in range(5)]
        x = np.sum([np.roll(np.resize(each, n), rng.integers(n)) for each in drawn], axis=0)
    elif kind == "hum":
        x = harmonics(50 * seconds, 29, rng) + 0.3 * rng.standard_normal(n)
    else:
        spectrum = np.fft.rfft(rng.standard_normal(n))
        x = np.fft.irfft(spectrum / np.maximum(1, np.arange(len(spectrum))) ** COLOURS[kind], n)
    return np.asarray(x / x.std())


def harmonics(cycles: Samples, count: int, rng: np.random.Generator) -> Samples:
    """The sum over k of sin(2 pi k cycles) / k, each in a random phase."""
    return np.asarray(sum(np.sin(2 * np.pi * (k * cycles + rng.random())) / k for k in range(1, count + 1)))
