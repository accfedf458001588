"""metrics.csv: readable after a kill, and the same bytes after a resume as without one."""

import math
import random

import pandas as pd
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_epgan.errors import UserError
from lit_epgan.runs.loggers import MetricsFile


def log_round(logger: MetricsFile, epoch: int) -> None:
    step = 20 * (epoch + 1)
    logger.log_metrics({"loss": 1 / (epoch + 3), "epoch": epoch}, step - 10)
    if epoch % 2:
        logger.log_metrics({"fid": 0.1 * epoch, "epoch": epoch}, step)
    if epoch >= 4:
        logger.log_metrics({"late, quoted": float("nan"), "epoch": epoch}, step)


def uninterrupted(folder, rounds: int) -> bytes:
    logger = MetricsFile(str(folder))
    logger.rewind(0)
    for epoch in range(rounds):
        log_round(logger, epoch)
    return logger.path.read_bytes()


@pytest.mark.parametrize("finished", range(7))
def test_killed_and_resumed_gives_the_same_bytes(tmp_path, finished):
    expected = uninterrupted(tmp_path / "whole", 8)
    killed = MetricsFile(str(tmp_path / "killed"))
    for epoch in range(finished + 1):  # round `finished` was logged, but no checkpoint holds it
        log_round(killed, epoch)
    resumed = MetricsFile(str(tmp_path / "killed"))
    resumed.rewind(finished)
    for epoch in range(finished, 8):
        log_round(resumed, epoch)
    assert resumed.path.read_bytes() == expected


def test_cut_anywhere_it_resumes_to_the_same_bytes(tmp_path):
    expected = uninterrupted(tmp_path / "whole", 8)
    draw = random.Random(0)
    path = tmp_path / "cut" / "metrics.csv"
    uninterrupted(tmp_path / "cut", 6)
    content = path.read_bytes()
    end_of_round_2 = content.index(b"\n3,") + 1
    for length in draw.sample(range(end_of_round_2, len(content)), 40):
        path.write_bytes(content[:length])
        logger = MetricsFile(str(path.parent))
        logger.rewind(3)
        for epoch in range(3, 8):
            log_round(logger, epoch)
        assert path.read_bytes() == expected


def test_values_read_back_exactly(tmp_path):
    logger = MetricsFile(str(tmp_path))
    values = [1 / 3, 1e-300, 123456789.125]
    for i, value in enumerate(values):
        logger.log_metrics({"x": value, "epoch": i}, i)
    assert pd.read_csv(tmp_path / "metrics.csv", float_precision="round_trip")["x"].tolist() == values


def test_finished_rounds_come_back_as_they_were_logged(tmp_path):
    logger = MetricsFile(str(tmp_path))
    rows = [{"a": 1 / 3, "epoch": 0}, {"b": math.inf}, {"a": -math.inf, "c": 7, "epoch": 1}, {"a": 0.0, "epoch": 2}]
    for step, row in enumerate(rows):
        logger.log_metrics(row, step)
    logger.log_metrics({"a": math.nan, "epoch": 2})
    with_steps = [{**row, "step": step} for step, row in enumerate(rows)]
    assert logger.finished(2) == {0: with_steps[:2], 1: with_steps[2:3]}
    assert isinstance(logger.finished(2)[1][0]["c"], int)
    last = logger.finished(3)[2][1]
    assert last.keys() == {"a", "epoch"}
    assert math.isnan(last["a"])
    assert MetricsFile(str(tmp_path / "none")).finished(3) == {}


def test_a_row_without_a_round_belongs_to_the_row_before(tmp_path):
    logger = MetricsFile(str(tmp_path))
    for row in ({"a": 1.0, "epoch": 0}, {"b": 2.0}, {"a": 3.0, "epoch": 1}, {"b": 4.0}):
        logger.log_metrics(row, 0)
    logger.rewind(1)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,a,b\n0,0,1.0,\n,0,,2.0\n"


def test_a_new_run_begins_an_empty_file(tmp_path):
    MetricsFile(str(tmp_path)).log_metrics({"a": 1.0, "epoch": 0}, 0)
    logger = MetricsFile(str(tmp_path))
    logger.rewind(0)
    logger.log_metrics({"b": 2.0, "epoch": 0}, 5)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,b\n0,5,2.0\n"


def test_without_rewind_it_appends(tmp_path):
    MetricsFile(str(tmp_path)).log_metrics({"a": 1.0, "epoch": 0}, 0)
    MetricsFile(str(tmp_path)).log_metrics({"a": 2.0, "epoch": 1}, 1)
    assert pd.read_csv(tmp_path / "metrics.csv")["a"].tolist() == [1.0, 2.0]


def test_lightnings_own_checkpoints_stand_in_the_runs_folder(tmp_path):
    """Of a run without RoundCheckpoint; once they were to lie in a folder of the file's own name."""
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=1,
        limit_val_batches=0,
        logger=MetricsFile(str(tmp_path)),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert len(list((tmp_path / "checkpoints").glob("*.ckpt"))) == 1


def test_a_round_has_one_row_and_so_has_a_step_within_it(tmp_path):
    """Of the same step, unless the name is there: what was logged is never lost."""
    logger = MetricsFile(str(tmp_path))
    for name, epoch, step in [
        ("a", 0, 4),
        ("b", 0, 9),
        ("c", 0, 9),
        ("b", 0, 9),
        ("a", 0, 9),
        ("a", 1, 9),
        ("b", 1, 9),
    ]:
        logger.log_metrics({name: 1, "epoch": epoch}, step)
    rows = ["0,4,1,,", "0,9,,1,1", "0,9,1,1,", "1,9,1,1,"]
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["epoch,step,a,b,c", *rows]
    resumed = MetricsFile(str(tmp_path))
    resumed.log_metrics({"c": 2, "epoch": 1}, 9)  # another process's row is left as it is
    assert (tmp_path / "metrics.csv").read_text().splitlines()[-2:] == ["1,9,1,1,", "1,9,,,2"]


def test_a_table_removed_under_a_run_begins_with_its_columns_again(tmp_path):
    table = MetricsFile(tmp_path)
    table.log_metrics({"epoch": 0, "loss": 1.0}, 1)
    table.path.unlink()
    table.log_metrics({"epoch": 1, "loss": 0.5}, 2)
    assert table.path.read_text() == "epoch,step,loss\n1,2,0.5\n"


def test_a_table_without_columns_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "metrics.csv").write_text("4,1299,8.5\n4,1299,8.6\n")
    with pytest.raises(UserError, match="no column epoch; put the file away"):
        MetricsFile(tmp_path).rewind(5)
