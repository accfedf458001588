"""A disk that refuses: one sentence, exit code 2, and the last round is safe."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lit_epgan import atomic, tensor_file
from lit_epgan.atomic import naming, replacing, write_text
from lit_epgan.cli.error_messages import disk_error
from lit_epgan.cli.main import main
from lit_epgan.runs.loggers import MetricsFile
from tests.test_cli import folder, refusal

__all__ = ["folder"]  # the fixture: an empty working directory

DIGITS = ["--config", "digits_classifier.yaml", "--data.clients", "2", "--trainer.enable_progress_bar", "true"]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Within, the system refuses to write files of more bytes: as a full disk does, for whoever may not mount one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# One file -------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_named_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_text(path, "old")
    with pytest.raises(OSError, match=r"x\.json") as caught, files_up_to(10):
        write_text(path, "new" * 10)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("save", [torch.save, tensor_file.save])
def test_torch_tells_no_cause_and_the_system_is_asked_again(
    tmp_path: Path, save: Callable[[object, Path], None]
) -> None:
    path = tmp_path / "last.ckpt"
    tensor_file.save({"x": torch.ones(3)}, path)
    with pytest.raises(OSError, match=r"last\.ckpt") as caught, files_up_to(1000), replacing(path) as beside:
        save({"x": torch.zeros(10_000)}, beside)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert torch.load(path)["x"].sum() == 3
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_cause_that_is_known_is_told_though_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "PROBE", 0)  # bytes that are written to ask again
    with pytest.raises(OSError, match=r"last\.ckpt") as caught, files_up_to(1000):
        tensor_file.save({"x": torch.zeros(10_000)}, tmp_path / "last.ckpt")
    assert caught.value.errno == errno.EFBIG


def test_a_file_that_must_outlast_a_power_cut_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []

    def fsync(handle: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{handle}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "end.json"
    write_text(path, "new", durable=True)
    assert flushed == [(str(tmp_path / ".end.json.part"), False), (str(tmp_path), True)]


def test_what_is_no_error_of_the_disk_passes(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="of its own"), replacing(tmp_path / "x"):
        raise RuntimeError("of its own")
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path / "x"):
        (tmp_path / "other").read_text()
    assert caught.value.filename == str(tmp_path / "other")
    assert disk_error(RuntimeError("of its own")) is None
    assert disk_error(ConnectionError(errno.ECONNREFUSED, "refused")) is None
    assert disk_error(ValueError()) is None


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "Make room"), (errno.EDQUOT, "quota"), (errno.EROFS, "only be read"), (errno.EIO, "")],
)
def test_every_refusal_is_a_sentence_even_without_a_name(number: int, words: str) -> None:
    hidden = RuntimeError("closing failed")
    hidden.__context__ = OSError(number, "why")
    for error in (OSError(number, "why"), OSError(number, "why", "a.csv"), hidden):
        sentence = disk_error(error)
        assert sentence is not None
        assert "why" in sentence
        assert words in sentence
    assert "b.csv" in str(disk_error(OSError(number, "why", "a.csv", None, "b.csv")))  # copied to b.csv


def test_a_row_of_metrics_that_was_refused_leaves_a_file_to_go_on_with(tmp_path: Path) -> None:
    logger = MetricsFile(str(tmp_path))
    logger.log_metrics({"loss": 0.5, "epoch": 9}, 1)
    whole = logger.path.read_bytes()
    with pytest.raises(OSError, match=r"metrics\.csv") as caught, files_up_to(len(whole) + 1):
        logger.log_metrics({"loss": 0.25, "epoch": 10}, 2)  # of which "1" is written, another round's number
    assert caught.value.filename == str(logger.path)
    resumed = MetricsFile(str(tmp_path))
    resumed.rewind(10)
    assert logger.path.read_bytes() == whole


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_that_is_refused_ends_the_run_and_it_resumes_to_the_same_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_folder_that_cannot_be_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").write_text("")
    told = refusal(capsys, "fit", *DIGITS, "--trainer.default_root_dir", "file/run")
    assert "file" in told
    assert "Not a directory" in told
    told = refusal(capsys, "fit", *DIGITS, "--trainer.default_root_dir", "x" * 300)
    assert "File name too long." in told
    with files_up_to(0):
        told = refusal(capsys, "fit", *DIGITS, "--trainer.default_root_dir", "full")
    assert told == "full cannot be written: File too large. Give another folder (--trainer.default_root_dir)."


def test_a_run_goes_on_without_its_conveniences(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    run = folder / "run"
    (run / "progress.json" / "x").mkdir(parents=True)
    (run / "pictures").write_text("")
    assert main(["fit", *DIGITS, "--trainer.max_epochs", "2", "--trainer.default_root_dir", "run"]) == 0
    said = {str(each.message) for each in recwarn if "goes on without it" in str(each.message)}
    assert {sentence.split(" could")[0] for sentence in said} == {"run/progress.json", "run/pictures/partition.png"}
    assert (run / "checkpoints" / "last.ckpt").is_file()
