"""The embedded corpus: planned sessions, spoken by espeak, each kept by itself."""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lit_epgan.randomness import derive_seed
from lit_epgan.speech.espeak import RATE, espeak
from lit_epgan.speech.manifest import Recording, read_manifest, write_manifest
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.rooms import Samples, record
from lit_epgan.speech.sentences import sentences
from lit_epgan.speech.sessions import SessionPlan, draw_conditions
from lit_epgan.speech.stages import Stages

MANIFEST = "manifest.csv"
SILENCE = RATE // 6  # samples before and after each sentence


def corpus(plans: list[SessionPlan], stages: Stages, workers: int = 1) -> list[Path]:
    """A folder with audio and ``manifest.csv`` for each session; those that are missing are spoken now.

    The same plan is the same audio, whatever was spoken before it.

    Args:
        plans: the sessions.
        stages: where they are kept.
        workers: sessions that are spoken at a time.
    """
    with ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(lambda plan: session_folder(plan, stages), plans))


def session_folder(plan: SessionPlan, stages: Stages) -> Path:
    """The folder of one session."""
    return stages.result("session-3", asdict(plan), lambda folder: _speak_alone(plan, folder))


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


def recordings_of(folders: list[Path]) -> list[Recording]:
    """All sessions' recordings."""
    return [each for folder in folders for each in read_manifest(folder / MANIFEST)]
