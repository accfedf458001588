"""Features of signals whose features are known, and what is said where a package is missing."""

import random

import jiwer
import numpy as np
import pytest
import torch
from scipy.signal import welch
from torch import nn
from torchmetrics.text import WordErrorRate

from lit_epgan.bayes import StackedFrames, herd
from lit_epgan.lib.randomness import generator_for
from lit_epgan.speech import synthesis
from lit_epgan.speech.decoding import WordErrors, interval, total, word_errors
from lit_epgan.speech.frames import (
    CHUNK,
    FUTURE,
    HOP,
    INPUTS,
    MELS,
    RATE,
    cepstra,
    log_mel,
    mean_of_windows,
    normalise,
    window_rows,
    windows,
    with_future,
)
from lit_epgan.speech.sessions import FAMILIES, NOISES, SNR, SPLITS, Conditions, plan_sessions
from lit_epgan.speech.synthesis import ECHO, LEVEL, impulse_response, noise, record
from tests.refusals import assert_refused

SECOND = 16000


def mel(hertz):
    return 1127 * np.log(1 + hertz / 700)


@pytest.mark.parametrize("hertz", [300, 1000, 4000])
def test_a_tone_is_loudest_in_its_own_filter(hertz):
    """Kaldi's 40 triangles lie evenly on the mel scale from 20 Hz to 8 kHz; frames of 25 ms begin every 10 ms."""
    x = log_mel(0.1 * np.sin(2 * np.pi * hertz * np.arange(SECOND) / SECOND))
    assert x.shape == (1 + (SECOND - 400) // 160, MELS)
    width = (mel(8000) - mel(20)) / (MELS + 1)
    assert abs(x.mean(0).argmax() - ((mel(hertz) - mel(20)) / width - 1)) <= 0.75


def test_amplitudes_differences_and_speakers_norms_are_the_known_ones():
    x = 0.01 * np.random.default_rng(0).standard_normal(SECOND)
    np.testing.assert_allclose(log_mel(10 * x) - log_mel(x), np.log(100), atol=1e-2)
    ramp = np.outer(np.arange(20), np.ones(MELS)).astype(np.float32)
    features = cepstra(ramp)
    slope = features[1, 0] - features[0, 0]
    np.testing.assert_allclose(features[4:-4, 13], slope, rtol=1e-4)
    np.testing.assert_allclose(features[4:-4, 26], 0, atol=1e-4)
    rng = np.random.default_rng(0)
    utterances = [rng.normal(k, 1 + k, size=(200, 3)).astype(np.float32) for k in range(4)]
    done = normalise(utterances, ["anna", "bert", "anna", "bert"])
    for k in range(2):
        own = np.concatenate(done[k::2])
        np.testing.assert_allclose(own.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(own.std(0), 1, atol=1e-3)
    assert abs(done[0].mean()) > 0.1  # a speaker's utterances still differ


@pytest.mark.parametrize("frames", [CHUNK, CHUNK + 1, 43, 100])
def test_every_frame_has_the_mean_of_the_windows_that_it_is_in(frames):
    rows = window_rows(frames)
    values = torch.randn(len(rows), CHUNK, 3, generator=torch.Generator().manual_seed(0))
    mean = mean_of_windows(values, rows)
    assert mean.shape == (frames, 3)
    for frame in range(frames):
        starts = [*range(0, frames - CHUNK, HOP), frames - CHUNK]
        own = [values[k, frame - start] for k, start in enumerate(starts) if 0 <= frame - start < CHUNK]
        assert torch.allclose(mean[frame], torch.stack(own).mean(0), atol=1e-6)


@pytest.mark.parametrize("frames", [1, 7, CHUNK, 61])
def test_where_a_frame_stands_does_not_matter_nothing_changes(frames):
    x = torch.randn(frames, 5, generator=torch.Generator().manual_seed(0))
    rows = window_rows(frames)
    assert torch.allclose(mean_of_windows(windows(x, rows).tanh(), rows)[:frames], x.tanh(), atol=1e-6)


def test_a_frame_is_the_same_in_every_row_that_shows_it():
    code = StackedFrames((CHUNK, INPUTS), FUTURE + 1)
    codes = code.start(7, generator_for(0))
    chunks = code(codes)
    assert chunks.shape == (7, CHUNK, INPUTS)
    assert codes.shape == (7, len(code.spread)) == (7, 540)  # 9 / 16 of 24 x 40
    spectrogram = torch.cat([chunks[..., :MELS], chunks[:, -1, MELS:].unflatten(-1, (FUTURE, MELS))], 1)
    assert torch.equal(with_future(spectrogram), chunks)
    assert 1 < float(chunks.std()) < 2  # 0.6 x 3
    assert float(chunks.abs().max()) <= 3


def test_chunks_are_herded_to_a_mean_spectrogram():
    target = torch.linspace(-1, 1, 4, dtype=torch.float64).repeat(6, 1)  # (frames, columns): a slope over columns
    code = StackedFrames((4, 12), 3, dimensions=24)
    start = code.start(50, generator_for(1))
    phi = nn.Flatten()
    wanted = with_frames(target, 3).flatten()
    codes = herd(phi, wanted, code, start, 200, 1.0, 0.0, generator_for(2))
    torch.testing.assert_close(phi(code(codes)).mean(0), wanted, atol=0.05, rtol=0)


def with_frames(spectrogram, stacked):
    """Row t is the frames t, t + 1, ... side by side."""
    rows = len(spectrogram) - stacked + 1
    return torch.stack([spectrogram[t : t + stacked].flatten() for t in range(rows)])


@pytest.mark.parametrize(("shape", "stacked"), [((20, 200), 3), ((1, 8, 8), 2), ((20, 200), 0)])
def test_other_records_are_refused(shape, stacked):
    assert_refused("stacked is", StackedFrames, shape, stacked)


VOICES = [np.sin(np.arange(RATE) * pitch) for pitch in (0.1, 0.2)]


@pytest.mark.parametrize("kind", NOISES)
def test_every_noise_has_variance_one_and_is_drawn_afresh(kind):
    first, second = (noise(kind, 2 * RATE, VOICES, np.random.default_rng(seed)) for seed in (0, 1))
    assert (first.shape, first.std()) == ((2 * RATE,), pytest.approx(1))
    assert np.abs(np.corrcoef(first, second)[0, 1]) < 0.9
    assert np.array_equal(first, noise(kind, 2 * RATE, VOICES, np.random.default_rng(0)))


@pytest.mark.parametrize(("kind", "slope"), [("white", 0.0), ("pink", -1.0)])
def test_the_power_of_coloured_noise_falls_with_frequency(kind, slope):
    """Power 1 and 1 / f: slopes of log power over log frequency."""
    frequency, power = welch(noise(kind, 60 * RATE, VOICES, np.random.default_rng(0)), RATE, nperseg=4096)
    band = (frequency > 100) & (frequency < 4000)
    assert np.polyfit(np.log(frequency[band]), np.log(power[band]), 1)[0] == pytest.approx(slope, abs=0.05)


def test_the_hum_is_the_mains_and_a_recording_has_its_level():
    frequency, power = welch(noise("hum", 20 * RATE, VOICES, np.random.default_rng(0)), RATE, nperseg=RATE)
    assert frequency[power.argmax()] == 50
    assert power[frequency == 100] > 100 * power[frequency == 75]
    # Silence between two halves of speech is as loud as the noise: 20 dB below the speech
    rng = np.random.default_rng(0)
    speech = rng.standard_normal(4 * RATE)
    speech[RATE : 3 * RATE] = 0
    heard = record(speech, VOICES, Conditions(0.05, "white", 20.0, 50.0, 7900.0), rng)
    assert heard.std() == pytest.approx(LEVEL)
    quiet, loud = heard[RATE + RATE // 2 : 2 * RATE].std(), heard[:RATE].std()
    assert 20 * np.log10(loud / quiet) == pytest.approx(23, abs=1)  # speech is there half of the time


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


SESSIONS = {"train": 16, "dev": 6, "eval": 6}


def training_plans(heterogeneity, sessions=100):
    plans = plan_sessions({**SESSIONS, "train": sessions}, 60, 3000, heterogeneity)
    return [plan for plan in plans if plan.split == SPLITS[0]]


def test_topics_accents_voices_and_rates():
    def within(heterogeneity):
        train = training_plans(heterogeneity)
        accents = [len({s.voice.split("+")[0] for s in p.speakers}) for p in train]
        families = [len({s.voice.split("+")[1] in FAMILIES["female"] for s in p.speakers}) for p in train]
        rates = [min(s.rate for s in p.speakers) / max(s.rate for s in p.speakers) for p in train]
        return np.var([p.topics for p in train]), *(np.mean(each) for each in (accents, families, rates))

    none, many, both, varied = within(0.0)
    own, one, one_family, alike = within(1.0)
    assert none == pytest.approx(0, abs=1e-12)
    assert own > 0.03
    assert one == one_family == 1
    assert many > 2.5
    assert both > 1.9
    assert alike > 0.9
    assert varied < 0.75


@pytest.fixture
def conditions_of(tmp_path, monkeypatch):
    def recorded(plan):
        seen = []
        monkeypatch.setattr(synthesis, "_spoken", lambda plan: [("anna", "two", np.zeros(8))] * 200)
        monkeypatch.setattr(
            synthesis, "record", lambda samples, others, conditions, rng: (seen.append(conditions), samples)[1]
        )
        synthesis._speak_session(plan, tmp_path)
        return seen

    return recorded


@pytest.mark.parametrize("heterogeneity", [0.0, 0.4, 1.0])
def test_an_utterance_has_its_sessions_room_noise_and_channel_or_a_draw_of_its_own(heterogeneity, conditions_of):
    plan = training_plans(heterogeneity, 2)[1]
    seen = conditions_of(plan)
    own = [each for each in seen if each == plan.own]
    assert len(own) / len(seen) == pytest.approx(heterogeneity, abs=0.1)
    others = set(seen) - {plan.own}
    assert len(others) == len(seen) - len(own)  # no two alike
    if others:
        snr = [each.snr for each in others]
        assert SNR[0] <= min(snr) < SNR[0] + 1
        assert SNR[1] - 1 < max(snr) <= SNR[1]
        assert {each.noise for each in others} == {"white", "pink", "hum", "babble"}
        for name, low, high in (("reverberation", 0.2, 0.7), ("low", 50, 400), ("high", 2500, 7600)):
            assert np.std([getattr(each, name) for each in others]) == pytest.approx((high - low) / 12**0.5, rel=0.15)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y)))
    return row[-1]


@pytest.fixture
def pairs():
    rng = random.Random(0)
    return [[" ".join(rng.choices("abcd", k=rng.randint(1, 8))) for _ in range(2)] for _ in range(60)]


def test_errors_by_hand_and_the_binomials_interval():
    errors = word_errors("put the red tomatoes in the bowl", "put red tomatoes on the the bowl")
    assert ((errors.words, errors.errors), errors.substitutions) == ((7, 3), 1)
    assert errors.deletions == errors.insertions == 1
    assert errors.rate == pytest.approx(100 * 3 / 7)
    assert word_errors("", "two words") == WordErrors(insertions=2)
    assert word_errors("two words", "") == WordErrors(words=2, deletions=2)
    # Of 400 words 100 are wrong: 25 % +- 1.96 sqrt(.25 .75 / 400) = 25 +- 4.24
    low, high = interval([WordErrors(1, int(i % 4 == 0)) for i in range(400)], draws=20000)
    assert (low, high) == (pytest.approx(25 - 4.24, abs=0.4), pytest.approx(25 + 4.24, abs=0.4))


def test_errors_are_the_edit_distance_and_rates_jiwers_and_torchmetrics(pairs):
    for reference, hypothesis in pairs:
        assert word_errors(reference, hypothesis).errors == edit_distance(reference.split(), hypothesis.split())
    references, hypotheses = map(list, zip(*pairs, strict=True))
    rate = total([word_errors(*pair) for pair in pairs]).rate
    assert rate == pytest.approx(100 * jiwer.wer(references, hypotheses))
    assert rate == pytest.approx(100 * WordErrorRate()(hypotheses, references).item())
