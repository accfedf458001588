"""The embedded corpus: planned sessions, spoken by espeak in a room, each kept by itself."""

import ctypes
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import butter, fftconvolve, resample_poly, sosfilt

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed
from lit_epgan.speech.corpora import Corpus, Recording, read_manifest, write_manifest
from lit_epgan.speech.frames import RATE
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.sessions import TOPICS, Conditions, SessionPlan, Speaker, draw_conditions, sentences, vocabulary
from lit_epgan.speech.stages import Stages

RETRIEVAL, UTF8, RATE_PARAMETER, PITCH_PARAMETER = 1, 1, 1, 3  # espeak's speak_lib.h
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
Samples = NDArray[np.float64]
LEVEL = 0.05  # root mean square of a recording; full scale is 1
COLOURS = {"white": 0.0, "pink": 0.5}  # amplitudes fall with frequency to this power
ECHO = 0.7  # norm of the echo, the direct sound's being 1
MANIFEST = "manifest.csv"
SILENCE = RATE // 6  # samples before and after each sentence


@lru_cache(maxsize=1)
def espeak() -> "Espeak":
    """The process's synthesiser: the library hangs if it is initialised twice."""
    return Espeak()


class Espeak:
    """The synthesiser; see ``espeak``. MissingFileError: the package espeakng-loader is not installed."""

    def __init__(self) -> None:
        loader = speech_package("espeakng_loader")
        self._library = ctypes.CDLL(loader.get_library_path())
        folder = str(Path(loader.get_data_path()).parent).encode()
        self._rate: int = self._library.espeak_Initialize(RETRIEVAL, 0, folder, 0)
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # by default the second of the day
        self._parts: list[NDArray[np.int16]] = []
        self._callback = Callback(self._collect)  # kept: the library holds only a pointer
        self._library.espeak_SetSynthCallback(self._callback)

    def say(self, text: str, speaker: Speaker) -> NDArray[np.float64]:
        """The sentence as samples (n,) at 16 kHz. UserError: espeak has no such voice, or gives no sound."""
        if self._library.espeak_SetVoiceByName(speaker.voice.encode()):
            raise UserError(f"espeak has no voice {speaker.voice}.")
        # a longer tract makes what is said slower, too
        self._library.espeak_SetParameter(RATE_PARAMETER, speaker.rate * speaker.tract // 100, 0)
        self._library.espeak_SetParameter(PITCH_PARAMETER, speaker.pitch, 0)
        self._parts.clear()
        words = text.encode()
        self._library.espeak_Synth(words, ctypes.c_size_t(len(words) + 1), 0, 0, 0, UTF8, None, None)
        self._library.espeak_Synchronize()
        if not self._parts:
            raise UserError(f"espeak gives no sound for {text!r} in the voice {speaker.voice}.")
        up, down = RATE * speaker.tract, self._rate * 100
        common = math.gcd(up, down)
        samples = np.concatenate(self._parts) / 32768
        return np.asarray(resample_poly(samples, up // common, down // common))

    def _collect(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: object) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0


def record(speech: Samples, others: list[Samples], conditions: Conditions, rng: np.random.Generator) -> Samples:
    """An utterance (n,) at 16 kHz, without room or noise, as the session's microphone hears it: samples (n,) with a
    root mean square of ``LEVEL``. Of ``others``, what else is spoken there, babble is made."""
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


def corpus(plans: list[SessionPlan], stages: Stages, workers: int = 1) -> list[Path]:
    """A folder with audio and ``manifest.csv`` for each session; those that are missing are spoken now.

    The same plan is the same audio, whatever was spoken before it. ``workers`` sessions are spoken at a time.
    """

    def session(plan: SessionPlan) -> Path:
        return stages.result("session-3", asdict(plan), lambda folder: _speak_alone(plan, folder))

    with ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(session, plans))


def _speak_alone(plan: SessionPlan, folder: Path) -> None:
    """Speak the session in a process of its own: what espeak has said before can be heard in what it says next."""
    # not forks of this process: espeak and torch hold threads that a fork would not carry over
    context: Any = get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload([__name__])  # imports once
    with ProcessPoolExecutor(1, mp_context=context) as alone:
        alone.submit(_speak_session, plan, folder).result()


def _speak_session(plan: SessionPlan, folder: Path) -> None:
    write = speech_package("soundfile").write
    rng = np.random.default_rng(derive_seed(plan.seed, "recording"))
    spoken = list(_spoken(plan))
    dry = [samples for _, _, samples in spoken]
    recordings = []
    for number, (speaker, text, samples) in enumerate(spoken):
        conditions = plan.own if rng.random() < plan.heterogeneity else draw_conditions(rng)[0]
        audio = folder / f"{number:04d}.flac"
        write(audio, record(samples, dry, conditions, rng), RATE, subtype="PCM_16")
        recordings.append(Recording(plan.name, speaker, text, audio, len(samples) / RATE, plan.split))
    write_manifest(folder / MANIFEST, recordings)


def _spoken(plan: SessionPlan) -> Iterator[tuple[str, str, Samples]]:
    """Speaker, text and samples of the session's sentences, until it is long enough."""
    seconds, words = 0.0, 0
    for number, text in enumerate(sentences(plan.split, plan.topics, plan.seed, "sentences")):
        if seconds >= plan.seconds and words >= plan.words:
            return
        speaker = plan.speakers[number % len(plan.speakers)]
        samples = np.pad(espeak().say(text, speaker), SILENCE)
        seconds, words = seconds + len(samples) / RATE, words + len(text.split())
        yield speaker.name, text, samples


def embedded(plans: list[SessionPlan], stages: Stages, grammar: int, workers: int, seed: int) -> Corpus:
    """The corpus that espeak speaks, with a text of ``grammar`` sentences, from all topics alike, for the grammar."""
    uniform = [1 / len(TOPICS)] * len(TOPICS)
    text = list(islice(sentences("language model", uniform, seed, "grammar"), grammar))
    recordings = [each for folder in corpus(plans, stages, workers) for each in read_manifest(folder / MANIFEST)]
    return Corpus(recordings, text, vocabulary())
