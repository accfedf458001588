"""How a fit ended stands in its folder, and a study goes by that and by the rounds, not by exit codes."""

import csv
import json
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_epgan.cli.main import main
from lit_epgan.cli.run_end import summary
from lit_epgan.cli.study import study
from lit_epgan.cli.study_run import runs_of
from lit_epgan.errors import UserError
from lit_epgan.runs.run_folder import END, FitEnd, read_end, write_end
from tests.studies import calls, read_study, run_quietly, write_plan, write_stand_in
from tests.test_cli import TINY, folder, refusal

__all__ = ["folder"]  # the fixture: an empty working directory


class Fails(Callback):
    """A mistake of the program in the second round."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("out of luck")


class Refuses(Callback):
    """A mistake of the user that is found before the first round."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise UserError("out of order")


def test_a_fit_says_its_rounds_and_that_it_ended_by_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, resume = folder / "runs" / "toy", ["--ckpt_path", "last"]
    assert main(["fit", *TINY]) == 0
    assert read_end(run) == FitEnd(rounds=2, of=2, finished=True, logged=2)
    assert main(["fit", *TINY, *resume]) == 0  # nothing is left to do
    assert read_end(run) == FitEnd(rounds=2, of=2, finished=True, logged=2)
    more = ["--trainer.max_epochs", "3", "--trainer.callbacks+", "tests.test_ended.Refuses"]
    assert "out of order" in refusal(capsys, "fit", *TINY, *more, *resume)
    assert read_end(run) == FitEnd(rounds=2, of=2, finished=True, logged=2)
    with pytest.raises(RuntimeError, match="out of luck"):
        main(["fit", *TINY, "--trainer.callbacks+", "tests.test_ended.Fails"])
    assert read_end(run) == FitEnd(rounds=1, of=2, finished=False, logged=1)


def test_it_is_forgotten_as_soon_as_a_resumed_fit_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = folder / "runs" / "toy", []
    assert main(["fit", *TINY]) == 0
    monkeypatch.setattr(Fails, "on_train_epoch_start", lambda *args: seen.append((run / END).exists()))
    more = ["--trainer.max_epochs", "3", "--trainer.callbacks+", "tests.test_ended.Fails"]
    assert main(["fit", *TINY, *more, "--ckpt_path", "last"]) == 0
    assert seen == [False]
    assert read_end(run) == FitEnd(rounds=3, of=3, finished=True, logged=3)


def test_early_stopping_is_an_end(folder: Path) -> None:
    stop = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "loss/generator", "mode": "max", "patience": 1, "min_delta": 1e9},
    }
    words = ["--trainer.max_epochs", "9", "--trainer.callbacks+", json.dumps(stop)]
    assert main(["fit", *TINY, *words]) == 0
    end = read_end(folder / "runs" / "toy")
    assert end is not None
    assert end.finished
    assert end.rounds == end.logged < 9


def test_a_fit_ends_with_its_numbers_and_every_path_worth_opening(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *TINY]) == 0
    told, run = capsys.readouterr().err.splitlines(), Path("runs") / "toy"
    with (run / "metrics.csv").open() as file:
        values = [float(row["coverage"]) for row in csv.DictReader(file)]
    assert len(values) == 2
    best = max(values)
    said = f"{'coverage':<12}last {values[1]:.4g} (round 2), best {best:.4g} (round {values.index(best) + 1})"
    paths = {"checkpoint": "checkpoints/last.ckpt", "numbers": "metrics.csv", "settings": "config.yaml"}
    assert {said, *(f"{what:<12}{run / where}" for what, where in paths.items())} <= set(told)
    assert f"{'picture':<12}{run / 'pictures' / 'density.png'}" in told
    assert not any("-round-" in line for line in told)


def test_last_and_best_of_headline_metrics_by_hand(tmp_path: Path) -> None:
    """Of one metric a family; what is no number is never the best; a metric may end before the run does."""
    head = "epoch,step,loss/generator,fid_digits,union/fid_digits,fid_digits_val,is_digits,wer"
    rows = ["0,1,.1,8.0,1.0,7,2.5,", "1,2,.1,nan,,,9.5,", "2,3,.2,4.0,,,inf,", "3,4,.2,5.0,,,3.5,"]
    (tmp_path / "metrics.csv").write_text("\n".join([head, *rows, ""]))
    measured = [line.split() for line in summary(tmp_path)][:-1]
    assert [" ".join(words) for words in measured] == [
        "fid_digits last 5 (round 4), best 4 (round 3)",
        "is_digits last 3.5 (round 4), best 9.5 (round 2)",
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rounds": 3}'])
def test_a_torn_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / END).write_text(text)
    assert read_end(tmp_path) is None


@pytest.mark.parametrize("fault", ["no end", "stopped", "a row is missing"])
def test_a_run_that_is_short_is_repaired_whatever_its_exit_code(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts in no table, and goes on from its checkpoint when the study does."""
    plan, stand_in = write_plan(tmp_path), write_stand_in(tmp_path)
    runs = runs_of(read_study(plan), tmp_path / "out")
    assert run_quietly(runs, stand_in) == []
    short = runs[0]
    if fault == "no end":
        (short.folder / END).unlink()
    elif fault == "stopped":
        write_end(short.folder, FitEnd(3, 5, finished=False, logged=3))
    else:
        table = short.folder / "metrics.csv"
        table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    assert short.record().exit_code == 0
    assert [run.is_finished() for run in runs] == [False, *[True] * 5]
    assert study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in) == 0
    assert [calls(run) for run in runs] == [["", "--ckpt_path last"], *[[""]] * 5]
    with (tmp_path / "out" / "runs.csv").open() as file:
        assert [line["rounds"] for line in csv.DictReader(file)] == ["3"] * 9


def test_an_exit_code_of_0_alone_is_a_failure_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, stand_in = write_plan(tmp_path), write_stand_in(tmp_path)
    script = tmp_path / "stand_in.py"
    script.write_text(script.read_text().replace("rows = [", "sys.exit(0)\nrows = ["))
    assert study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in) == 1
    told = capsys.readouterr()
    assert "plain/seed-0: FAILED with exit code 0 after 0 rounds; the last lines of" in told.out
    assert "6 of 6 runs failed" in told.err
    assert "The same command goes on with them." in told.err
