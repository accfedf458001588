"""Where a corpus comes from: spoken for the purpose, a user's manifest, or CHiME-5."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lit_epgan.errors import UserError
from lit_epgan.speech.manifest import Recording, read_manifest
from lit_epgan.speech.sentences import TOPICS, sentences, vocabulary
from lit_epgan.speech.sessions import SPLITS, SessionPlan
from lit_epgan.speech.stages import Stages
from lit_epgan.speech.synthesis import corpus, recordings_of
from lit_epgan.speech.transcripts import TAGS, plain_words

SAID = ("words", "speaker")  # what an utterance's entry must have


@dataclass(frozen=True)
class Corpus:
    """Recordings, and the text that the grammar is made of.

    Attributes:
        recordings: of all splits.
        grammar: sentences; none of a held-out session's.
        words: that can be recognised.
    """

    recordings: list[Recording]
    grammar: list[str]
    words: list[str]


def embedded(plans: list[SessionPlan], stages: Stages, grammar: int, workers: int, seed: int) -> Corpus:
    """The corpus that espeak speaks.

    Args:
        plans: its sessions.
        stages: where they are kept.
        grammar: number of sentences of the grammar's text, from all topics alike.
        workers: processes.
        seed: of the grammar's text.
    """
    uniform = [1 / len(TOPICS)] * len(TOPICS)
    text = list(islice(sentences("language model", uniform, seed, "grammar"), grammar))
    return Corpus(recordings_of(corpus(plans, stages, workers)), text, vocabulary())


def from_manifest(path: Path, outside: bool = False, tags: Sequence[str] = TAGS) -> Corpus:
    """A user's own corpus; the grammar is that of its training sessions.

    Args:
        path: the manifest.
        outside: whether it may name audio outside of its folder.
        tags: pairs of brackets within which there are no words.

    Raises:
        UserError: names the first mistake in the manifest.
    """
    return _of_recordings(read_manifest(path, outside, tags), str(path))


def chime5(root: Path) -> Corpus:
    """CHiME-5 in its published layout: ``audio/SPLIT/SESSION_SPEAKER.wav`` and ``transcriptions/SPLIT/SESSION.json``.

    Every utterance is heard by its own speaker's binaural microphone, of which the left channel is taken; redacted ones
    and those without words are left out (Barker et al. 2018).

    Raises:
        UserError: there is no such layout, or a transcription that cannot be read.
    """
    recordings = []
    for split in SPLITS:
        files = sorted((root / "transcriptions" / split).glob("S*.json"))
        if not files and split == "train":
            raise UserError(
                f"{root} is not CHiME-5's folder: it must hold transcriptions/train/S03.json and so on, "
                "and audio/train/S03_P09.wav and so on."
            )
        for file in files:
            recordings += [each for entry in _entries(file) if (each := _utterance(root, split, file, entry))]
    return _of_recordings(recordings, str(root))


def _of_recordings(recordings: list[Recording], source: str) -> Corpus:
    for split in SPLITS:
        if not any(each.split == split and each.text for each in recordings):
            raise UserError(f"{source} has no recording of the split {split}: one or more sessions of each are needed.")
    train = [each.text for each in recordings if each.split == "train" and each.text]
    return Corpus(recordings, train, sorted({word for text in train for word in text.split()}))


def _entries(file: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is no transcription in JSON ({error}).") from error
    if not isinstance(entries, list):
        raise UserError(f"{file} is no transcription: a list of utterances is expected.")
    return [each for each in entries if isinstance(each, dict) and all(isinstance(each.get(k), str) for k in SAID)]


def _utterance(root: Path, split: Any, file: Path, entry: dict[str, Any]) -> Recording | None:
    text = plain_words(entry["words"])
    if not text or "[redacted]" in entry["words"]:
        return None
    try:
        start, end = (_seconds(entry[key]) for key in ("start_time", "end_time"))
    except (KeyError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: an utterance has no start_time and end_time as h:mm:ss.ss ({error}).") from error
    session, speaker = file.stem, entry["speaker"]
    if Path(speaker).name != speaker:
        raise UserError(f"{file}: the speaker {speaker!r} is no part of a file's name.")
    audio = root / "audio" / split / f"{session}_{speaker}.wav"
    return Recording(session, speaker, text, audio, end - start, split, start) if end > start else None


def _seconds(time: str | dict[str, str]) -> float:
    """Seconds of ``h:mm:ss.ss``, on the binaural recordings' clock where several devices' are given."""
    text = time["original"] if isinstance(time, dict) else time
    hours, minutes, seconds = text.split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
