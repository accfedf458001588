"""A corpus whose making is killed again and again is whole in the end; nothing half-made is ever taken for whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_epgan.datamodules.speech import SpeechDataModule
from lit_epgan.speech.corpora import read_audio
from lit_epgan.speech.stages import CONTENTS, PART, Stages, _mine, is_whole
from tests.processes import Started
from tests.speech import MAKERS, MINIATURE

pytestmark = pytest.mark.slow

# patterns of what must be new in the cache; in the order in which a build comes by
MOMENTS = {
    "while a session is spoken": [".session-3-*.part/0001.flac"],
    "between a session's last file and its name": [f".session-3-*.part/{CONTENTS}"],
    "after a session, in the next": ["session-3-*", ".session-3-*.part/0000.flac"],
    "while features are computed": ["features-1-*", ".features-1-*.part"],
    "while the mixtures are trained": [".alignment-2-*.part"],
    "while the graph is made": [".graph-1-*.part"],
}


def build(cache, linger=0.0):
    return Started([sys.executable, "-m", "tests.speech_build", str(cache), str(linger)])


def killed_when(cache, patterns, linger):
    """Build until every pattern has a path that was not there before, then SIGKILL.

    The build lingers before it gives a result its name, so that it is still at that result when it is killed.
    """
    before = set(cache.glob("*"))

    def is_new(path):
        return not before & {path, *path.parents}

    process = build(cache, linger)
    until = time.monotonic() + 120
    while not all(any(map(is_new, cache.glob(pattern))) for pattern in patterns):
        assert process.poll() is None, f"ended before {patterns}: {process.printed()}"
        assert time.monotonic() < until, f"never came to {patterns}"
        time.sleep(0.001)
    process.kill()
    assert process.poll() == -signal.SIGKILL


def finished(cache):
    """Every result under its name, with what shows that it was not made again."""
    return {path.name: (path / CONTENTS).stat().st_mtime_ns for path in cache.iterdir() if path.suffix != PART}


def test_a_build_that_is_killed_again_and_again(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    kept = {}
    for name, patterns in MOMENTS.items():
        killed_when(cache, patterns, 60.0 if "its name" in name else 0.3)
        now = finished(cache)
        assert kept.items() <= now.items(), name  # nothing is lost, nothing is made twice
        assert all(is_whole(cache / result) for result in now), name
        parts = [path for path in cache.iterdir() if path.suffix == PART]
        assert len(parts) == 1, name  # what the process before left is gone
        assert not any(parts[0].name.startswith(f".{result}.") for result in now), name
        kept = now
    assert {name.split("-")[0] for name in kept} == {"session", "features", "alignment"}
    last = build(cache)
    assert last.wait() == 0, last.printed()
    now = finished(cache)
    assert kept.items() <= now.items()
    assert sorted(name.split("-")[0] for name in now) == ["alignment", *["features"] * 6, "graph", *["session"] * 6]
    assert not list(cache.glob(f".*{PART}"))
    for made in MAKERS:
        monkeypatch.setattr(f"lit_epgan.speech.{made}", None)
    data = SpeechDataModule(**MINIATURE, cache_dir=str(cache))
    for split, sessions in (("train", 3), ("dev", 1), ("eval", 2)):
        own = data.utterances(split)
        assert len({u.recording.session for u in own}) == sessions
        assert all(len(read_audio(u.recording)) > 0 and len(u.mel) == len(u.pdfs) for u in own)


def test_what_a_living_process_makes_is_left_alone(tmp_path):
    """Only what the dead have left is removed."""
    stages = Stages(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()

    def make(beside: Path) -> None:
        (beside / "a.txt").write_text("whole")

    folder = stages.result("stage", 1, make)
    parts = [folder.with_name(f"{_mine(folder)}{pid}{PART}") for pid in (dead.pid, os.getppid())]
    for part in parts:
        part.mkdir()
    (folder / "a.txt").unlink()
    stages.result("stage", 1, make)
    assert [part.is_dir() for part in parts] == [False, True]
