"""One writer a folder: the lock names its holder, goes with its process however that ends, and works without locks."""

import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from lit_epgan.cli.error_messages import disk_error
from lit_epgan.cli.main import main
from lit_epgan.lib import atomic, tensor_file
from lit_epgan.lib.atomic import naming, replacing, write_text
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.lock import locked
from lit_epgan.runs.loggers import MetricsFile
from tests.processes import environment
from tests.refusals import assert_refused
from tests.test_cli import refusal

HOLD = """
import errno, fcntl, os, sys, time
from lit_epgan.runs.lock import locked
def unsupported(*_):
    raise OSError(errno.ENOLCK, "No locks available")
if sys.argv[2] == "without":
    fcntl.flock = unsupported
with locked(sys.argv[1], "--output"):
    if os.fork() == 0:  # as the worker of a DataLoader, which outlives its killed run by a moment
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def held_by_another(folder, kind="locks"):
    """A process that holds the folder's lock, and is killed in the end at the latest; its child lives until then."""
    words = [sys.executable, "-c", HOLD, str(folder), kind]
    process = subprocess.Popen(words, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()  # closes what its child waits for, and waits for both


def no_locks(*args: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture(params=["locks", "without"])
def kind(request, monkeypatch):
    """A file system with locks, and one where the call fails as it does on some network file systems."""
    if request.param == "without":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    return str(request.param)


def test_another_process_is_refused_by_the_holders_number_host_and_time_until_it_is_killed(tmp_path, kind):
    folder = tmp_path / "digits"
    with held_by_another(folder, kind) as holder:
        with pytest.raises(UserError) as refused, locked(folder, "--output"):
            pass
        said = str(refused.value)
        since = f"on host {socket.gethostname()} since {time.strftime('%F %H:')}" if kind == "locks" else "(if that one"
        assert f"{folder} is being written by process {holder.pid} {since}" in said
        assert said.endswith("wait for it, or give another folder (--output).")
        holder.send_signal(signal.SIGKILL)
        assert holder.wait() == -signal.SIGKILL
        assert list(tmp_path.iterdir())  # the file is still there: it is the lock on it that went
        with locked(folder, "--output", patience=30):  # its child lets go as soon as it runs
            assert str(os.getpid()) in "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())


def test_whoever_waits_gets_it_when_the_holder_ends_and_may_enter_again(tmp_path, kind):
    with held_by_another(tmp_path / "digits", kind) as holder:
        threading.Timer(0.3, lambda: (holder.terminate(), holder.wait())).start()
        with locked(tmp_path / "digits", "--output", patience=60):
            assert holder.wait() == -signal.SIGTERM
    folder = tmp_path / "digits"
    with locked(folder, "--output"):
        with locked(folder, "--output"):
            pass
        assert_refused(f"process {os.getpid()} ", in_another_process, folder, kind)
    in_another_process(folder, kind)
    assert list(tmp_path.iterdir()) == []


def in_another_process(folder, kind):
    script = HOLD.replace("time.sleep(600)", "pass")
    words = [sys.executable, "-c", script, str(folder), kind]
    done = subprocess.run(words, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.splitlines()[-1])


def test_it_stays_when_the_folder_is_renamed(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    with held_by_another(folder):
        folder.rename(tmp_path / "digits.1")
        with pytest.raises(UserError, match="is being written"), locked(folder, "--output"):
            pass
        with locked(tmp_path / "digits.1", "--output"):
            pass


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_neither_holds_it_nor_gives_it_back(tmp_path):
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
        assert_refused("is being written", in_another_process, folder, "locks")


def end_as_a_child(folder, block):
    """Ask for the lock, leave the parent's block and close all files; 0 if the lock was refused."""
    try:
        with locked(folder, "--output"):
            return 1
    except UserError:
        block.close()
        os.closerange(3, 256)
        return 0


def test_what_another_hosts_process_left_is_refused_with_the_file_to_remove(tmp_path, monkeypatch):
    folder, left = tmp_path / "digits", tmp_path / ".digits.lock.held"
    with held_by_another(folder, "without") as holder:
        marker = left.read_text()
    left.write_text(marker.replace(socket.gethostname(), "elsewhere"))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert_refused(rf"by process {holder.pid} \(if that one is dead, remove {left}\)", enter, folder)
    left.write_text(marker)  # of a process of this host, which is dead
    enter(folder)


def enter(folder):
    with locked(folder, "--output"):
        pass


@pytest.fixture
def powerless():
    """Not the superuser, whom no permission binds."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_where_nothing_can_be_written_beside_the_folder_the_lock_lies_in_it(powerless):
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


def test_a_folder_whose_name_is_as_long_as_names_get(tmp_path):
    with locked(tmp_path / ("n" * 255), "--output"):
        (tmp_path / ("n" * 255)).mkdir()
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]


DIGITS = ["--config", "digits_classifier.yaml", "--data.clients", "2", "--trainer.enable_progress_bar", "true"]


@contextmanager
def files_up_to(size):
    """Within, the system refuses to write files of more bytes: as a full disk does, for whoever may not mount one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("folder")
def test_a_file_that_cannot_be_written_is_named_and_one_that_must_last_is_on_the_disk_first(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_text(path, "old")
    with pytest.raises(OSError, match=r"x\.json") as caught, files_up_to(10):
        write_text(path, "new" * 10)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "old"
    flushed = []

    def fsync(handle: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{handle}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "end.json"
    write_text(path, "new", durable=True)
    assert flushed == [(str(tmp_path / ".end.json.part"), False), (str(tmp_path), True)]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("save", [torch.save, tensor_file.save])
def test_torch_tells_no_cause_and_the_system_is_asked_again(tmp_path, save):
    path = tmp_path / "last.ckpt"
    tensor_file.save({"x": torch.ones(3)}, path)
    with pytest.raises(OSError, match=r"last\.ckpt") as caught, files_up_to(1000), replacing(path) as beside:
        save({"x": torch.zeros(10_000)}, beside)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert torch.load(path)["x"].sum() == 3
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.usefixtures("folder")
def test_a_cause_is_told_even_where_the_disk_has_room_again_and_what_is_no_error_of_the_disk_passes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(atomic, "PROBE", 0)  # bytes that are written to ask again
    with pytest.raises(OSError, match=r"last\.ckpt") as caught, files_up_to(1000):
        tensor_file.save({"x": torch.zeros(10_000)}, tmp_path / "last.ckpt")
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(RuntimeError, match="of its own"), replacing(tmp_path / "x"):
        raise RuntimeError("of its own")
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path / "x"):
        (tmp_path / "other").read_text()
    assert caught.value.filename == str(tmp_path / "other")
    assert disk_error(RuntimeError("of its own")) is None
    assert disk_error(ConnectionError(errno.ECONNREFUSED, "refused")) is None
    assert disk_error(ValueError()) is None


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "Make room"), (errno.EDQUOT, "quota"), (errno.EROFS, "only be read"), (errno.EIO, "")],
)
def test_every_refusal_is_a_sentence_even_without_a_name(number, words):
    hidden = RuntimeError("closing failed")
    hidden.__context__ = OSError(number, "why")
    for error in (OSError(number, "why"), OSError(number, "why", "a.csv"), hidden):
        sentence = disk_error(error)
        assert "why" in sentence
        assert words in sentence
    assert "b.csv" in str(disk_error(OSError(number, "why", "a.csv", None, "b.csv")))  # copied to b.csv


@pytest.mark.usefixtures("folder")
def test_a_row_of_metrics_that_was_refused_leaves_a_file_to_go_on_with(tmp_path):
    logger = MetricsFile(str(tmp_path))
    logger.log_metrics({"loss": 0.5, "epoch": 9}, 1)
    whole = logger.path.read_bytes()
    with pytest.raises(OSError, match=r"metrics\.csv") as caught, files_up_to(len(whole) + 1):
        logger.log_metrics({"loss": 0.25, "epoch": 10}, 2)  # of which "1" is written, another round's number
    assert caught.value.filename == str(logger.path)
    resumed = MetricsFile(str(tmp_path))
    resumed.rewind(10)
    assert logger.path.read_bytes() == whole


@pytest.mark.slow
def test_a_checkpoint_that_is_refused_ends_the_run_and_it_resumes_to_the_same_bits(folder, capsys):
    three = [*DIGITS, "--trainer.max_epochs", "3"]
    assert main(["fit", *three, "--trainer.default_root_dir", "whole"]) == 0
    parts = [*three, "--trainer.default_root_dir", "parts"]
    assert main(["fit", *parts, "--trainer.max_epochs", "1"]) == 0
    size = (folder / "parts" / "checkpoints" / "last.ckpt").stat().st_size
    with files_up_to(size - 1000), pytest.warns(UserWarning, match=r"partition\.png could not be written"):
        told = refusal(capsys, "fit", *parts, "--ckpt_path", "last")
    assert "parts/checkpoints/last.ckpt could not be written: File too large." in told
    assert told.endswith(
        "The last checkpoint is parts/checkpoints/last.ckpt (round 1); --ckpt_path last goes on from it."
    )
    assert main(["fit", *parts, "--ckpt_path", "last"]) == 0
    assert (folder / "parts" / "metrics.csv").read_bytes() == (folder / "whole" / "metrics.csv").read_bytes()
    ours, theirs = (torch.load(Path(n) / "checkpoints" / "last.ckpt")["state_dict"] for n in ("parts", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_folder_that_cannot_be_made(folder, capsys):
    (folder / "file").write_text("")
    told = refusal(capsys, "fit", *DIGITS, "--trainer.default_root_dir", "file/run")
    assert "file" in told
    assert "Not a directory" in told
    told = refusal(capsys, "fit", *DIGITS, "--trainer.default_root_dir", "x" * 300)
    assert "File name too long." in told
    with files_up_to(0):
        told = refusal(capsys, "fit", *DIGITS, "--trainer.default_root_dir", "full")
    assert told == "full cannot be written: File too large. Give another folder (--trainer.default_root_dir)."


def test_a_run_goes_on_without_its_conveniences(folder, recwarn):
    run = folder / "run"
    (run / "progress.json" / "x").mkdir(parents=True)
    (run / "pictures").write_text("")
    assert main(["fit", *DIGITS, "--trainer.max_epochs", "2", "--trainer.default_root_dir", "run"]) == 0
    said = {str(each.message) for each in recwarn if "goes on without it" in str(each.message)}
    assert {sentence.split(" could")[0] for sentence in said} == {"run/progress.json", "run/pictures/partition.png"}
    assert (run / "checkpoints" / "last.ckpt").is_file()
