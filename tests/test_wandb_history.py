"""What the Weights & Biases logger logs again, and what it leaves: real offline files, without a run around it."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb
from PIL import Image

from lit_epgan.runs import MetricsFile, WandbHistory
from lit_epgan.runs.run_folder import round_picture
from tests.wandb_history import history, offline_files


@pytest.fixture(autouse=True)
def no_other_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What another test of this process has left open or set would be taken over."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    close()
    yield
    close()


def close() -> None:
    """End the run and W&B's process, which may write the file's end after ``finish`` has returned."""
    wandb.finish()
    wandb.teardown()


def logger(folder: Path, **options: Any) -> WandbHistory:
    return WandbHistory(save_dir=folder, project="test", id="abc", **options)


def table_of(folder: Path, rounds: int) -> MetricsFile:
    """Two rows a round, and a picture in the second one."""
    table = MetricsFile(str(folder))
    for epoch in range(rounds):
        table.log_metrics({"loss": 1 / (epoch + 3), "epoch": epoch}, 10 * epoch + 4)
        table.log_metrics({"fid": float("inf"), "epoch": epoch}, 10 * epoch + 9)
    picture = round_picture(folder, "samples", 1)
    picture.parent.mkdir()
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(picture)
    return table


def older_file(folder: Path, name: str = "offline-run-20260101_000000-abc", run_id: str = "abc") -> Path:
    file = folder / "wandb" / name / f"run-{run_id}.wandb"
    file.parent.mkdir(parents=True)
    file.write_bytes(b":W&B\xe1\xbe\0")
    return file


def numbers(file: Path) -> list[tuple[int, int, Any]]:
    rows = [row for row in history(file) if "epoch" in row]
    return [(row["epoch"], row["trainer/global_step"], row.get("loss", row.get("fid"))) for row in rows]


def test_finished_rounds_are_logged_again_and_older_files_set_aside(tmp_path: Path) -> None:
    """Rows of round 2, which is trained again, are left out; another run's folder stays."""
    table_of(tmp_path, 3)
    older, other = older_file(tmp_path), older_file(tmp_path, "offline-run-20260101_000000-xyz", "xyz")
    twin = older_file(tmp_path, f"superseded/{older.parent.name}")
    one = logger(tmp_path)
    one.rewind(2)
    one.rewind(2)  # another fit of this process
    one.log_metrics({"loss": 0.5, "epoch": 2}, 24)
    close()
    assert not older.exists()
    assert twin.exists()
    assert (twin.parent.with_name(f"{twin.parent.name}.1") / twin.name).exists()
    (newest,) = [file for file in offline_files(tmp_path) if file != other]
    expected = [(0, 4, 1 / 3), (0, 9, float("inf")), (1, 14, 1 / 4), (1, 19, float("inf")), (2, 24, 0.5)]
    assert numbers(newest) == expected
    (picture,) = [row for row in history(newest) if "epoch" not in row]
    assert (picture["_step"], picture["trainer/global_step"]) == (2, 19)
    assert len(list(newest.parent.glob("files/media/images/pictures/*.png"))) == 1


def test_what_a_killed_runs_service_writes_late_is_set_aside_at_the_end(tmp_path: Path) -> None:
    table_of(tmp_path, 1)
    one = logger(tmp_path)
    one.rewind(1)
    late = older_file(tmp_path)
    one.finalize("success")
    close()
    assert not late.exists()
    assert [file.parent.name for file in offline_files(tmp_path)] == [Path(one.experiment.dir).parent.name]


def test_without_a_table_older_files_stay(tmp_path: Path) -> None:
    older = older_file(tmp_path)
    one = logger(tmp_path)
    with pytest.warns(UserWarning, match=r"metrics.csv holds no finished round") as warned:
        one.rewind(2)
    assert len(warned) == 1
    assert older.exists()


def test_a_new_run_has_nothing_to_log_again(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    table_of(tmp_path, 1)
    one = logger(tmp_path)
    one.rewind(0)
    close()
    assert not list(recwarn)
    (file,) = offline_files(tmp_path)
    assert history(file) == []


def test_disabled_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    table_of(tmp_path, 2)
    older = older_file(tmp_path)
    logger(tmp_path).rewind(2)
    assert older.exists()


def test_a_server_gets_the_rounds_that_it_does_not_know(tmp_path: Path) -> None:
    """A run resumed online, as W&B presents it: here is no server."""
    table_of(tmp_path, 4)
    logged: list[dict[str, Any]] = []
    online = SimpleNamespace(
        disabled=False,
        resumed=True,
        step=7,
        starting_step=7,
        summary={"epoch": 1},
        dir=str(tmp_path / "wandb" / "run-20260101_000000-abc" / "files"),
        id="abc",
        log=logged.append,
    )
    one = logger(tmp_path)
    one._experiment = online  # type: ignore[assignment]
    one.rewind(4)
    assert [row["epoch"] for row in logged] == [2, 2, 3, 3]
