"""Who said what in which file: a corpus as a CSV table, ours or a user's own."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_epgan.atomic import write_text
from lit_epgan.csv_table import named_file, read_csv_table
from lit_epgan.errors import UserError
from lit_epgan.speech.sessions import SPLITS, Split
from lit_epgan.speech.transcripts import TAGS, plain_words

COLUMNS = ("session", "speaker", "text", "audio", "seconds")


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
    """The recordings of a CSV file.

    Its first row names the columns session, speaker, text, audio (relative to the manifest's folder) and seconds, and
    if wanted split (train, dev or eval; by default train) and start (seconds into the file, by default 0).

    Args:
        path: the file.
        outside: whether it may name audio outside of its folder.
        tags: see ``plain_words``.

    Raises:
        UserError: names the first mistake and its line.
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
