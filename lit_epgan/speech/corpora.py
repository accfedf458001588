"""Who said what in which file: transcripts, manifests, CHiME-5, and samples from audio files."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

from lit_epgan.lib.atomic import write_text
from lit_epgan.lib.csv_table import named_file, read_csv_table
from lit_epgan.lib.errors import UserError
from lit_epgan.speech.frames import RATE
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.sessions import SPLITS, Split

TAGS = ("[]", "<>", "()", "{}")
APOSTROPHES = "\u2019\u2018\u201b\u02bc\u02b9\u02bb\u2032\uff07\u00b4`"  # all of which people type within a word
COLUMNS = ("session", "speaker", "text", "audio", "seconds")
SHORTEST = 0.1  # seconds
WHOLE = 0.9  # share of the seconds said that a file must hold; else it was cut, and its text is not all there
OnError = Literal["refuse", "skip"]
SAID = ("words", "speaker")  # what an utterance's entry must have


def plain_words(text: str, tags: Sequence[str] = TAGS) -> str:
    """Words in lower case without punctuation, their letters composed (Unicode's NFC), each apostrophe the same. Tags
    are pairs of brackets, such as ``<>``: what stands within one, such as <noise>, is no word."""
    spoken = unicodedata.normalize("NFC", text.lower())
    for pair in tags:
        check_tag(pair)
        spoken = re.sub(f"{re.escape(pair[0])}[^{re.escape(pair[1])}]*{re.escape(pair[1])}", " ", spoken)
    spoken = spoken.translate(str.maketrans(APOSTROPHES, "'" * len(APOSTROPHES)))
    spoken = re.sub(r"(?<=\b[a-z])\.(?=[a-z]\b)", "", spoken)  # u.s.
    seen = (
        letter for letter in spoken if unicodedata.category(letter) != "Cf"
    )  # soft hyphens and joiners part no word
    words = "".join(letter if _is_spoken(letter) else " " for letter in seen).split()
    bare = [word if word.strip("'") in ("em", "cause") else word.strip("'") for word in words]
    return " ".join(word for word in bare if word)


def check_tag(pair: str) -> None:
    """Refuse what is no pair of brackets."""
    if len(pair) != 2:
        raise UserError(f"data.tags has {pair!r}, but each is a pair of brackets, such as '<>'.")


def _is_spoken(letter: str) -> bool:
    """Whether it is part of a word: many scripts write vowels as marks (M) of a letter."""
    return letter.isalnum() or letter == "'" or unicodedata.category(letter).startswith("M")


@dataclass(frozen=True)
class Recording:
    """A row of a manifest.

    Attributes:
        session: the client.
        speaker: whose mean and variance normalise the features.
        text: words in lower case, separated by blanks.
        audio: file.
        seconds: its length, or of its part.
        split: train, dev or eval.
        start: where in the file it begins, in seconds.
    """

    session: str
    speaker: str
    text: str
    audio: Path
    seconds: float
    split: Split = "train"
    start: float = 0.0


def read_manifest(path: Path, outside: bool = False, tags: Sequence[str] = TAGS) -> list[Recording]:
    """The recordings of a CSV file, which may name audio ``outside`` of its folder or not.

    Its first row names the columns session, speaker, text, audio (relative to the manifest's folder) and seconds, and
    if wanted split (train, dev or eval; by default train) and start (seconds into the file, by default 0). UserError:
    names the first mistake and its line.
    """
    if not path.is_file():
        raise UserError(f"there is no manifest {path}: a CSV file with the columns {', '.join(COLUMNS)}.")
    table = read_csv_table(path, COLUMNS, any_case=True)
    if not table.rows:
        raise UserError(f"{path} has no recordings: each is a row with {', '.join(COLUMNS)}.")
    return [_recording(path, f"{path}, line {line}", row, outside, tags) for line, row in table.records()]


def write_manifest(path: Path, recordings: Iterable[Recording]) -> None:
    """Write what ``read_manifest`` reads; files in the manifest's folder are named relative to it."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    rows = list(recordings)
    parts = any(each.start for each in rows)
    writer.writerow([*COLUMNS, "split", *(["start"] if parts else [])])
    for each in rows:
        audio = each.audio.relative_to(path.parent) if each.audio.is_relative_to(path.parent) else each.audio
        start = [f"{each.start:.4f}"] if parts else []
        writer.writerow([each.session, each.speaker, each.text, audio, f"{each.seconds:.4f}", each.split, *start])
    write_text(path, table.getvalue())


def _recording(path: Path, where: str, values: dict[str, str], outside: bool, tags: Sequence[str]) -> Recording:
    for column in COLUMNS:
        if not values[column]:
            raise UserError(f"{where}: the {column} is empty.")
    split = values.get("split") or "train"
    if split not in SPLITS:
        raise UserError(f"{where}: the split is {split!r}; it must be one of {', '.join(SPLITS)}.")
    try:
        seconds, start = float(values["seconds"]), float(values.get("start") or 0)
    except ValueError as error:
        raise UserError(f"{where}: seconds and start must be numbers ({error}).") from error
    if not (0 < seconds < float("inf") and 0 <= start < float("inf")):
        raise UserError(f"{where}: seconds must be positive and start not negative.")
    audio = named_file(path.parent, values["audio"], where, outside)
    text = plain_words(values["text"], tags)
    return Recording(values["session"], values["speaker"], text, audio, seconds, split, start)


def read_audio(recording: Recording) -> NDArray[np.float64]:
    """Samples (n,) of the recording's part of its file: first channel, 16 kHz. UserError: names the file that is not
    there, cannot be read, was cut, is too short or silent, or is not a number somewhere."""
    soundfile = speech_package("soundfile")
    if not recording.audio.is_file():
        raise UserError(f"{recording.audio} is not there")
    try:
        with soundfile.SoundFile(recording.audio) as file:
            file.seek(min(round(recording.start * file.samplerate), file.frames))
            samples = file.read(round(recording.seconds * file.samplerate), dtype="float64", always_2d=True)[:, 0]
            rate = file.samplerate
    except (soundfile.LibsndfileError, RuntimeError, OSError) as error:
        raise UserError(f"{recording.audio} cannot be read as audio ({error})") from error
    held = len(samples) / rate
    if held < WHOLE * recording.seconds:
        where = f"{recording.seconds:.2f} s of sound from {recording.start:.2f} s on"
        raise UserError(f"{recording.audio} holds {held:.2f} of {where}")
    if held < SHORTEST:
        raise UserError(f"{recording.audio} from {recording.start:.2f} s on is shorter than {SHORTEST} s")
    if not np.isfinite(samples).all():
        raise UserError(f"{recording.audio} holds samples that are no numbers")
    if samples.std() == 0:
        raise UserError(f"{recording.audio} holds nothing but silence in its first channel")
    common = np.gcd(RATE, rate)
    return samples if rate == RATE else np.asarray(resample_poly(samples, RATE // common, rate // common))


def readable(
    recordings: Sequence[Recording], on_error: OnError, skipped: list[str]
) -> Iterator[tuple[Recording, NDArray[np.float64]]]:
    """The recordings with their samples. The first that cannot be used raises a UserError under ``refuse``; under
    ``skip`` it is left out, and ``skipped`` collects a sentence on it."""
    for recording in recordings:
        try:
            samples = read_audio(recording)
        except UserError as error:
            if on_error == "refuse":
                hint = "mend or remove it, or set --data.on_error skip to leave such audio out."
                raise UserError(f"{error}: {hint}") from error
            skipped.append(str(error))
            continue
        yield recording, samples


@dataclass(frozen=True)
class Corpus:
    """Recordings of all splits, sentences that the grammar is made of, none of a held-out session's, and the words that
    can be recognised."""

    recordings: list[Recording]
    grammar: list[str]
    words: list[str]


def from_manifest(path: Path, outside: bool = False, tags: Sequence[str] = TAGS) -> Corpus:
    """A user's own corpus, see ``read_manifest``; the grammar is that of its training sessions. UserError: names the
    first mistake in the manifest."""
    return _of_recordings(read_manifest(path, outside, tags), str(path))


def chime5(root: Path) -> Corpus:
    """CHiME-5 in its published layout: ``audio/SPLIT/SESSION_SPEAKER.wav`` and ``transcriptions/SPLIT/SESSION.json``.

    Every utterance is heard by its own speaker's binaural microphone, of which the left channel is taken; redacted ones
    and those without words are left out (Barker et al. 2018). UserError: there is no such layout, or a transcription
    that cannot be read.
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
