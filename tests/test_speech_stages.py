"""A stage's result is made once for what it came from; one that is not whole is never taken for one that is."""

import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lit_epgan.datamodules.speech import SpeechDataModule
from lit_epgan.lib import atomic
from lit_epgan.lib.errors import UserError
from lit_epgan.speech.corpora import read_audio
from lit_epgan.speech.stages import CONTENTS, PART, Stages, _mine, digest_of_result, is_whole
from tests.processes import Started
from tests.speech import MAKERS, MINIATURE
from tests.traps import flipped


@pytest.fixture
def stages(tmp_path):
    return Stages(tmp_path)


class Maker:
    def __init__(self, text="whole"):
        self.text, self.calls = text, 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "a.txt").write_text(self.text)
        (folder / "b.txt").write_text(self.text)


def test_the_same_origin_is_made_once_and_called_by_its_content(stages):
    make = Maker()
    folder = stages.result("stage", {"x": 1}, make)
    assert stages.result("stage", {"x": 1}, make) == folder
    assert make.calls == 1
    assert stages.result("stage", {"x": 2}, make) != folder
    assert make.calls == 2
    one, same = (stages.result("stage", k, Maker()) for k in (1, 2))
    other = stages.result("stage", 3, Maker("other"))
    assert digest_of_result(one) == digest_of_result(same) != digest_of_result(other)


def test_what_breaks_off_leaves_nothing_behind_its_name(stages):
    def breaks_off(folder):
        (folder / "a.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages.result("stage", 1, breaks_off)
    make = Maker()
    folder = stages.result("stage", 1, make)
    assert make.calls == 1
    assert (folder / "a.txt").read_text() == "whole"


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no list", "torn list"])
def test_a_damaged_result_is_named_set_aside_and_made_anew(stages, damage, caplog):
    folder = stages.result("stage", 1, Maker())
    if damage == "cut":
        (folder / "b.txt").write_text("who")
    elif damage == "changed":  # of the same size
        (folder / "b.txt").write_text("whale")
    elif damage == "missing":
        (folder / "b.txt").unlink()
    elif damage == "no list":
        (folder / CONTENTS).unlink()
    else:
        (folder / CONTENTS).write_text('{"a.txt": [5,')
    assert not is_whole(folder)
    make = Maker()
    with caplog.at_level(logging.WARNING):
        assert is_whole(stages.result("stage", 1, make))
    assert make.calls == 1
    assert f"{folder} is damaged" in caplog.text
    assert sorted(path.name for path in stages.root.iterdir()) == [folder.name, f"{folder.name}.damaged"]
    (folder / "a.txt").unlink()  # and once more
    assert is_whole(stages.result("stage", 1, make))


def test_what_another_process_has_finished_meanwhile_is_left_to_its_readers(stages, monkeypatch):
    """Both make the same; the later one takes the earlier one's, whose files stay what they were."""
    kept = []

    def make(folder):
        Maker()(folder)
        monkeypatch.setattr("os.getpid", lambda: -1)
        kept.append((stages.result("stage", 1, Maker()) / "a.txt").stat().st_ino)

    folder = stages.result("stage", 1, make)
    assert [(folder / "a.txt").stat().st_ino] == kept
    assert [path.name for path in stages.root.iterdir()] == [folder.name]


def test_a_single_changed_byte_never_reaches_who_reads(stages):
    """In the tensors or in the list of their digests."""
    tensors = {"mel": torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), "rows": torch.arange(3)}
    folder = stages.result("stage", 1, lambda beside: torch.save(tensors, beside / "features.pt"))
    for name, count in (("features.pt", 50), (CONTENTS, 20)):
        for damaged in flipped((folder / name).read_bytes(), count):
            (folder / name).write_bytes(damaged)
            again = stages.result("stage", 1, lambda beside: torch.save(tensors, beside / "features.pt"))
            found = torch.load(again / "features.pt", weights_only=True)
            assert all(torch.equal(found[key], tensors[key]) for key in tensors)


@pytest.fixture
def unsaid(monkeypatch):
    monkeypatch.setattr(atomic, "_said", set())


def test_without_a_place_results_are_kept_elsewhere_while_they_are_used(unsaid, caplog):
    stages = Stages(Path("/proc/nowhere/cache"))
    make = Maker()
    with caplog.at_level(logging.WARNING):
        folder = stages.result("stage", 1, make)
        assert pickle.loads(pickle.dumps(stages)).result("stage", 1, make) == folder  # another process's copy finds it
        stages.result("stage", 2, make)
    assert make.calls == 2
    assert (folder / "a.txt").read_text() == "whole"
    assert caplog.text.count("Nothing can be kept in the cache /proc/nowhere/cache") == 1
    del stages
    assert not folder.exists()


def test_a_full_disk_is_no_obstacle_and_a_mistake_is_still_one(tmp_path, unsaid, caplog):
    """The limit of a file's size stands for the disk's; elsewhere the library that writes has to find room."""
    stages, lengths = Stages(tmp_path / "cache"), [100_000, 10]

    def make(beside):
        torch.save(torch.zeros(lengths.pop(0)), beside / "a.pt")  # torch says RuntimeError where there is no room

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        folder = stages.result("stage", 1, make)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(torch.load(folder / "a.pt"), torch.zeros(10))
    assert "Nothing can be kept in the cache" in caplog.text
    assert not list((tmp_path / "cache").iterdir())

    def fails(beside):
        raise RuntimeError("a mistake of the program")

    with pytest.raises(RuntimeError, match="a mistake of the program"):
        stages.result("stage", 2, fails)

    def refuses(beside):
        raise UserError("a mistake of the user")

    with pytest.raises(UserError, match="a mistake of the user"):
        stages.result("stage", 3, refuses)


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
    return {path.name: (path / CONTENTS).stat().st_mtime_ns for path in cache.iterdir() if path.suffix != PART}


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_a_living_process_makes_is_left_alone(tmp_path):
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
