"""One writer a folder: the lock names its holder, goes with its process however that ends, and works without locks."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lit_epgan.errors import UserError
from lit_epgan.runs import lock
from lit_epgan.runs.lock import Holder, locked
from tests.processes import environment

HOLD = """
import os, sys, time
from lit_epgan.runs import lock
if sys.argv[2] == "without":
    lock.fcntl = None
with lock.locked(sys.argv[1], "--output"):
    if os.fork() == 0:  # as the worker of a DataLoader, which outlives its killed run by a moment
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def held_by_another(folder: Path, kind: str = "locks") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder's lock, and is killed in the end at the latest; its child lives until then."""
    words = [sys.executable, "-c", HOLD, str(folder), kind]
    process = subprocess.Popen(words, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()  # closes what its child waits for, and waits for both


@pytest.fixture(params=["locks", "without"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system with locks, and one where the call fails as it does on some network file systems."""
    if request.param == "without":

        def unsupported(*args: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "lockf", unsupported)
    return str(request.param)


def test_another_process_is_refused_by_the_holders_number_host_and_time(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "digits"
    with held_by_another(folder, kind) as holder:
        with pytest.raises(UserError) as refused, locked(folder, "--output"):
            pass
        said = str(refused.value)
        since = time.strftime("%H:")
        assert f"{folder} is being written by process {holder.pid} on host {socket.gethostname()} since {since}" in said
        assert said.endswith("wait for it, or give another folder (--output).")


def test_it_goes_with_a_killed_process(tmp_path: Path, kind: str) -> None:
    with held_by_another(tmp_path / "digits", kind) as holder:
        holder.send_signal(signal.SIGKILL)
        assert holder.wait() == -signal.SIGKILL
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left  # the file is still there: it is the lock on it that went
        with locked(tmp_path / "digits", "--output"):
            assert str(os.getpid()) in "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())


def test_whoever_waits_gets_it_when_the_holder_ends(tmp_path: Path, kind: str) -> None:
    with held_by_another(tmp_path / "digits", kind) as holder:
        threading.Timer(0.3, holder.terminate).start()
        with locked(tmp_path / "digits", "--output", patience=30):
            assert holder.wait() == -signal.SIGTERM


def test_the_same_process_may_enter_again_and_leaves_nothing_behind(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "digits"
    with locked(folder, "--output"):
        with locked(folder, "--output"):
            pass
        with pytest.raises(UserError, match=f"process {os.getpid()} "):
            in_another_process(folder, kind)
    in_another_process(folder, kind)
    assert list(tmp_path.iterdir()) == []


def in_another_process(folder: Path, kind: str) -> None:
    """Take the lock there, and give it back."""
    script = HOLD.replace("time.sleep(600)", "pass")
    words = [sys.executable, "-c", script, str(folder), kind]
    done = subprocess.run(words, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.splitlines()[-1])


def test_it_stays_when_the_folder_is_renamed(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    folder.mkdir()
    with held_by_another(folder):
        folder.rename(tmp_path / "digits.1")
        with pytest.raises(UserError, match="is being written"), locked(folder, "--output"):
            pass
        with locked(tmp_path / "digits.1", "--output"):
            pass


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_neither_holds_it_nor_gives_it_back(tmp_path: Path) -> None:
    """As the workers of a DataLoader, which close all they have inherited when they end."""
    folder = tmp_path / "digits"
    with ExitStack() as block:
        block.enter_context(locked(folder, "--output"))
        child = os.fork()
        if child == 0:
            code = 2
            try:
                code = end_as_a_child(folder, block)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(UserError, match="is being written"):
            in_another_process(folder, "locks")


def end_as_a_child(folder: Path, block: ExitStack) -> int:
    """Ask for the lock, leave the parent's block and close all files; 0 if the lock was refused."""
    try:
        with locked(folder, "--output"):
            return 1
    except UserError:
        block.close()
        os.closerange(3, 256)
        return 0


def test_what_another_hosts_process_left_is_refused_with_the_file_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    left = tmp_path / ".digits.lock.held"
    left.write_text(Holder(1, "elsewhere", 0.0, "7").text())
    with pytest.raises(UserError) as refused, locked(tmp_path / "digits", "--output"):
        pass
    assert "process 1 on host elsewhere since 1970-01-01" in str(refused.value)
    assert f"if that one is dead, remove {left}" in str(refused.value)
    # a number that is used again is not the process that left the file
    left.write_text(Holder(os.getpid(), socket.gethostname(), 0.0, "7").text())
    with locked(tmp_path / "digits", "--output"):
        assert json.loads(left.read_text())["started"] != "7"


@pytest.fixture
def powerless() -> Iterator[None]:
    """Not the superuser, whom no permission binds."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_where_nothing_can_be_written_beside_the_folder_the_lock_lies_in_it(powerless: None) -> None:
    with tempfile.TemporaryDirectory() as name:
        parent, folder = Path(name), Path(name, "digits")
        folder.mkdir()
        parent.chmod(0o555)
        with locked(folder, "--output"):
            assert [path.name for path in folder.iterdir()] == [".lock"]
        assert list(folder.iterdir()) == []
        folder.chmod(0o555)
        for place in (folder, parent / "new"):
            with pytest.raises(UserError, match=f"{place} cannot be written: Permission denied"), locked(place, "--o"):
                pass
        for path in (parent, folder):
            path.chmod(0o755)


def test_a_folder_whose_name_is_as_long_as_names_get(tmp_path: Path) -> None:
    with locked(tmp_path / ("n" * 255), "--output"):
        (tmp_path / ("n" * 255)).mkdir()
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]
