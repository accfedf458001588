"""Loggers by one switch beside metrics.csv, and a resumed run whose curve is that of one never stopped."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from jsonargparse import Namespace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_epgan.cli.main import main
from lit_epgan.cli.run_setup import LOGGERS, place_loggers, with_loggers
from lit_epgan.runs.loggers import MetricsFile
from lit_epgan.runs.run_folder import MLFLOW_ID
from tests.test_cli import BARE, refusal

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ["--trainer.enable_progress_bar", "false"]


def fit(folder: str, rounds: int, *words: str) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of the run."""
    place = ["--trainer.default_root_dir", folder, "--trainer.max_epochs", str(rounds)]
    assert main(["fit", *BARE, *QUIET, "--trainer.logger+", "tensorboard", *place, *words]) == 0
    events = EventAccumulator(f"{folder}/lightning_logs").Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_one_tensorboard_curve_and_one_csv():
    """The resume begins a round before the run's last one, as after a kill; that round is there once."""
    whole, _ = fit("whole", 3), fit("resumed", 2)
    resumed = fit("resumed", 3, "--ckpt_path", "resumed/checkpoints/previous.ckpt")
    assert resumed == whole
    assert [len(values) for values in whole.values()] == [3] * len(whole)
    assert Path("resumed/metrics.csv").read_bytes() == Path("whole/metrics.csv").read_bytes()


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_one_mlflow_run_with_each_step_once():
    mlflow = pytest.importorskip("mlflow", reason="the curve is read back from MLflow")
    curves = []
    for rounds, *words in ([2], [3, "--ckpt_path", "run/checkpoints/previous.ckpt"]):
        place = ["--trainer.default_root_dir", "run", "--trainer.max_epochs", str(rounds)]
        assert main(["fit", *BARE, *QUIET, "--trainer.logger+", "mlflow", *place, *words]) == 0
        client = mlflow.MlflowClient(f"sqlite:///{Path('run/mlflow.db').absolute()}")
        (experiment,) = client.search_experiments(filter_string="name = 'lit_epgan'")
        (run,) = client.search_runs([experiment.experiment_id])
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        curves.append({name: [(each.step, each.value) for each in history] for name, history in histories.items()})
    assert {len(values) for values in curves[1].values()} == {3}
    assert all(values[:2] == curves[0][name] for name, values in curves[1].items())


@pytest.mark.parametrize(
    ("word", "name"),
    [(["--trainer.logger+", "TensorBoard"], "tensorboard"), (["--trainer.logger+=mlflow"], "mlflow")],
)
def test_a_short_name_is_the_logger(word, name):
    *_, last = with_loggers(["fit", "--config", "tensorboard", *word])
    assert LOGGERS[name]["class_path"] in last
    for others in (["--model", "tensorboard"], ["--trainer.logger", "false"], ["--trainer.logger+=mine.Logger"]):
        assert with_loggers(others) == others


@pytest.mark.parametrize("logger", [None, True])
def test_without_a_word_on_loggers_the_numbers_are_in_one_csv(logger):
    config = Namespace(trainer=Namespace(logger=logger), ckpt_path=None)
    place_loggers(config, Path("run"), "fit")
    placed = config.trainer.logger
    assert (placed.class_path, placed.init_args) == (
        f"lit_epgan.runs.{MetricsFile.__name__}",
        Namespace(file="metrics.csv", save_dir="run"),
    )


@pytest.mark.parametrize(("subcommand", "known"), [("fit", "abc"), ("fit", None), ("test", "abc")])
def test_mlflow_goes_on_in_the_runs_own_run(subcommand, known, tmp_path):
    if known:
        (tmp_path / MLFLOW_ID).write_text(known)
    names = ("run_id", "run_name", "tracking_uri", "artifact_location")
    logger = Namespace(class_path=LOGGERS["mlflow"]["class_path"], init_args=Namespace(dict.fromkeys(names)))
    config = Namespace(trainer=Namespace(logger=[logger]), seed_everything=3, ckpt_path=None)
    place_loggers(config, tmp_path, subcommand)
    assert logger.init_args.run_id == (known if subcommand == "fit" else None)
    assert logger.init_args.run_name.startswith(f"{tmp_path.name}, seed 3")
    assert logger.init_args.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_missing_package_is_named_before_anything_is_moved(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "mlflow" else find_spec(name, *a))
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/config.yaml").touch()
    words = ["fit", *BARE, "--trainer.default_root_dir", "run", "--trainer.logger+", "mlflow"]
    assert refusal(capsys, *words) == "trainer.logger: MLflowHistory needs a package: run `pip install mlflow`."
    assert not Path("run.1").exists()
