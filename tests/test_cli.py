"""The command line: where configs are found, what a mistake is answered with, and what a run's folder holds."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from lit_epgan.cli.main import console, main
from lit_epgan.runs.config_files import config_folders, known_configs
from tests.processes import run_words

pytestmark = pytest.mark.usefixtures("folder")

TINY = [
    *("--config", "toy.yaml", "--trainer.max_epochs", "2", "--trainer.enable_progress_bar", "true"),
    *("--data.points", "32", "--data.warmup_steps", "2", "--data.local_steps", "2", "--data.clients", "2"),
    *("--federation.algorithm.pool", "20", "--model.lr_decay", "null"),
]
BARE = [*TINY, "--trainer.callbacks", "lit_epgan.callbacks.RoundCheckpoint"]  # nothing is drawn or measured


def refusal(capsys, *args: str) -> str:
    capsys.readouterr()
    assert main(list(args)) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    return told[0].removeprefix("error: ")


def test_configs_are_there_and_the_working_directorys_come_first(folder, capsys):
    assert {"toy.yaml", "digits.yaml", "cifar.yaml"} <= set(known_configs())
    assert "algorithms/scaffold.yaml" in known_configs("algorithms")
    assert "studies/demo.yaml" in known_configs("studies")
    (folder / "toy.yaml").write_text("trainer: {max_epochs: nonsense}\n")
    assert "trainer.max_epochs is 'nonsense'" in refusal(capsys, "fit", "--config", "toy.yaml")


def test_an_unknown_config_is_answered_with_the_nearest_names(capsys):
    sentence = refusal(capsys, "fit", "--config", "digit.yaml")
    assert "Did you mean digits.yaml" in sentence
    assert sum(name in sentence for name in [*known_configs(), *known_configs("algorithms")]) <= 3
    assert "Did you mean algorithms/scaffold.yaml" in refusal(capsys, "fit", "--config", "scafold.yaml")
    for pair in ("digits_scaffold", "cifar100_quad_fednp"):
        experiment, algorithm = pair.split("_", 1)
        both = f"Did you mean {experiment}.yaml --config algorithms/{algorithm}.yaml?"
        assert both in refusal(capsys, "fit", "--config", f"{pair}.yaml")
    assert "studies/demo.yaml" in refusal(capsys, "study", "--config=studies/dmo.yaml")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model.objectiv", "lsgan"], "There is no key model.objectiv; did you mean model.objective?"),
        (["--trainer.max_epoch", "2"], "There is no key trainer.max_epoch; did you mean trainer.max_epochs?"),
        (["--modle.lr", "2"], "There is no key modle.lr; did you mean model.lr?"),
        (["--lr", "2"], "There is no key lr; did you mean model.lr?"),
        (["--federation.algorithm.pol", "2"], "There is no key federation.algorithm.pol; did you mean"),
        (["--model.objective", "gan"], "model.objective is 'gan', but one of 'wgan-gp', 'lsgan', 'non-saturating'"),
        (["--model.lr", "fast"], "model.lr is 'fast', but a number is expected."),
        (["--model.lr", "nan"], "nan"),
        (["--trainer.max_epochs", "1.5"], "trainer.max_epochs is '1.5', but a whole number is expected."),
        (["--model", "lit_epgan.modules.GAM"], "there is no class lit_epgan.modules.GAM; did you mean lit_epgan.mod"),
        (["--data", "nowhere.Data"], "data: there is no module nowhere."),
        (["--data.seed", "3"], "give --seed_everything instead"),
        (["--trainer.strategy", "dpp"], "invalid strategy name"),
        (["--ckpt_path", "last"], "There is no checkpoint in runs/toy/checkpoints"),
        (["--ckpt_path", "no.ckpt"], "The checkpoint no.ckpt does not exist."),
        (["--ckpt_path", "hpc"], "name a file, `last`, or `best`"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(capsys, arguments, sentence):
    assert sentence in refusal(capsys, "fit", *TINY, *arguments)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("    lr: ", "    lrate: ", "There is no key model.lrate; did you mean model.lr?"),
        ("  max_epochs:", "  max_epoch:", "There is no key trainer.max_epoch; did you mean trainer.max_epochs?"),
        ("federation:", "fedration:", "did you mean federation"),
        ("init_args: {own_rows: 16, refine: 0.3}", "init_args: {own_rows: 16, refine: 0.3", "mine.yaml, line"),
        ("callbacks.RoundCheckpoint", "callbacks.RoundChekpoint", "did you mean lit_epgan.callbacks.RoundCheckpoint?"),
    ],
)
def test_a_mistake_in_a_config_is_named_too(folder, capsys, old, new, sentence):
    text = (config_folders()[-1] / "toy.yaml").read_text()
    assert old in text
    (folder / "mine.yaml").write_text(text.replace(old, new, 1))
    assert sentence in refusal(capsys, "fit", "--config", "mine.yaml")


def test_the_console_command_finds_the_users_own_modules(folder, monkeypatch):
    (folder / "module_of_mine.py").write_text("")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    monkeypatch.setattr(sys, "argv", ["lit-epgan", "--help"])
    assert find_spec("module_of_mine") is None
    assert console() == 0
    assert find_spec("module_of_mine") is not None


def test_an_unknown_command_and_none(capsys):
    assert "Did you mean predict?" in refusal(capsys, "predit")
    assert "Put the command first" in refusal(capsys, "--config", "toy.yaml")
    assert main([]) == 0
    assert "toy.yaml" in capsys.readouterr().out


def test_tracebacks_are_for_debugging_and_for_errors_of_the_program(monkeypatch):
    monkeypatch.setenv("LIT_EPGAN_DEBUG", "1")
    with pytest.raises(Exception, match="no command"):
        main(["fti"])
    monkeypatch.delenv("LIT_EPGAN_DEBUG")
    monkeypatch.setattr("lit_epgan.cli.main._run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["fit"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of TINY."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        patch.setenv("WANDB_MODE", "disabled")
        patch.setattr("lit_epgan.callbacks.toy_metrics.draw", lambda *_: np.zeros((8, 8, 3), np.uint8))
        assert main(["fit", *TINY]) == 0
        return Path("runs/toy").absolute()


@pytest.fixture
def run(folder, trained):
    return Path(shutil.copytree(trained, folder / "runs" / "toy"))


def test_a_checkpoint_of_another_model_and_a_damaged_one(folder, run, capsys):
    last = run / "checkpoints" / "last.ckpt"
    other = [*TINY, "--model.generator.hidden", "[8]", "--ckpt_path", str(last)]
    assert "checkpoint" in (sentence := refusal(capsys, "test", *other))
    assert "another model" in sentence
    (folder / "torn.ckpt").write_bytes(last.read_bytes()[:-1000])
    assert "torn" in refusal(capsys, "fit", *TINY, "--ckpt_path", "torn.ckpt")


def test_help_lists_commands_and_configs_and_imports_nothing_heavy():
    code = "import sys; from lit_epgan.cli.main import main; main(['--help']); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "False"
    assert "cifar.yaml" in shown.stdout
    assert "study" in shown.stdout


def test_print_config_shows_overrides(capsys):
    overrides = ["--model.objective", "lsgan", "--model.lr", "0.125", "--data.data_dir", "x", "--data.download", "true"]
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "digits.yaml", *overrides, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["objective"] == "lsgan"
    assert printed["model"]["init_args"]["lr"] == 0.125
    assert printed["data"]["init_args"]["data_dir"] == "x"
    assert printed["data"]["init_args"]["download"] is True
    assert printed["weights_only"] is True


def test_a_run_leaves_everything_in_one_folder_and_resumes_in_it(folder, run):
    assert {"config.yaml", "metrics.csv", "checkpoints", "progress.json", "pictures"} <= {p.name for p in run.iterdir()}
    assert {p.name for p in folder.iterdir()} == {"runs"}
    assert json.loads((run / "progress.json").read_text())["done"] == 2
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    assert main(["fit", *TINY, "--trainer.max_epochs", "3", "--ckpt_path", "last"]) == 0
    assert sorted(pd.read_csv(run / "metrics.csv")["epoch"].unique()) == [0, 1, 2]
    assert not (folder / "runs" / "toy.1").exists()


def test_a_torn_checkpoint_is_said_and_a_run_goes_on_from_the_one_before_as_if_never_stopped(run, trained, caplog):
    last = run / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-500])
    assert main(["fit", *TINY, "--ckpt_path", "last"]) == 0
    assert "last.ckpt is torn" in caplog.text
    assert "previous.ckpt (round 1)" in caplog.text
    assert (run / "metrics.csv").read_bytes() == (trained / "metrics.csv").read_bytes()
    resumed, whole = (torch.load(path / "checkpoints" / "last.ckpt")["state_dict"] for path in (run, trained))
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def test_a_new_run_moves_the_old_one_aside(folder, run, capsys):
    (folder / "runs" / "toy.1").mkdir()
    assert main(["fit", *BARE]) == 0
    told = capsys.readouterr().err
    assert sorted(p.name for p in (folder / "runs").iterdir()) == ["toy", "toy.1", "toy.2"]
    assert "runs/toy held a run; it is now runs/toy.2" in told
    assert "--ckpt_path last" in told
    # a callback by itself takes the configuration's place
    assert (folder / "runs" / "toy" / "checkpoints" / "last.ckpt").exists()
    assert not (folder / "runs" / "toy" / "pictures").exists()


def test_a_refused_fit_leaves_no_run_to_move_aside(folder, capsys):
    refused = [*BARE, "--federation.algorithm.generator", "nobody"]
    for _ in range(2):
        assert "submodule" in refusal(capsys, "fit", *refused)
        assert [path.name for path in (folder / "runs").glob("[!.]*")] == ["toy"]


def test_another_rank_moves_nothing(folder, monkeypatch):
    from lit_epgan.cli.run_setup import make_room

    (folder / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    make_room(folder / "run")
    assert (folder / "run").is_dir()
    monkeypatch.setenv("LOCAL_RANK", "0")
    make_room(folder / "run")
    assert [path.name for path in folder.iterdir()] == ["run.1"]


def test_test_and_predict_use_the_newest_checkpoint(run, capsys):
    assert main(["test", *TINY]) == 0
    assert (run / "test_metrics.csv").is_file()
    assert main(["predict", *TINY]) == 0
    assert (run / "samples" / "samples.npy").is_file()
    assert "untrained" not in capsys.readouterr().err
    assert main(["predict", *TINY, "--trainer.default_root_dir", "empty"]) == 0
    assert "this is the untrained model" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["test", "validate"])
def test_an_untrained_model_is_not_evaluated(folder, capsys, command):
    sentence = refusal(capsys, command, *TINY)
    assert sentence.startswith("There is no checkpoint in runs/toy/checkpoints")
    assert "--trainer.default_root_dir, or a file with --ckpt_path" in sentence
    assert not (folder / "runs" / "toy" / f"{command}_metrics.csv").exists()


def test_the_best_checkpoint_is_the_monitors(folder, run, capsys, caplog):
    """The toy's clients hold no data of their own; the first round of two is best by its own number."""
    monitor = '{"class_path": "ModelCheckpoint", "init_args": {"monitor": "client/steps", "mode": "min"}}'
    told = refusal(capsys, "test", *TINY, "--ckpt_path", "best")
    assert "No best checkpoint is known in runs/toy/checkpoints" in told
    assert main(["fit", *BARE, "--data.warmup_steps", "1", "--trainer.callbacks+", monitor]) == 0
    best = next((folder / "runs" / "toy" / "checkpoints").glob("epoch=*.ckpt"))
    assert best.name.startswith("epoch=0-")  # rounds 0 and 1 have 1 and 2 steps
    (folder / "runs" / "toy").rename(folder / "moved")
    there = ["--trainer.default_root_dir", "moved"]
    with caplog.at_level("INFO"):
        assert main(["test", *TINY, *there, "--ckpt_path", "best"]) == 0
    assert f"Restoring states from the checkpoint path at moved/checkpoints/{best.name}" in caplog.messages
    (folder / "moved" / "checkpoints" / best.name).unlink()
    assert "does not exist" in refusal(capsys, "test", *TINY, *there, "--ckpt_path", "best")


def test_the_seed_decides_everything_and_reaches_the_data(folder, trained):
    """Of the trained run it was 0, which toy.yaml says; its metrics count the average's statistics anew."""
    for name, seed in (("a", "0"), ("b", "4")):
        assert main(["fit", *BARE, "--seed_everything", seed, "--trainer.default_root_dir", name]) == 0
    folders = (trained, Path("a"), Path("b"))
    states = [torch.load(own / "checkpoints" / "last.ckpt")["state_dict"] for own in folders]
    kept = [key for key in states[0] if not re.match(r"average\..*(running|num_batches)", key)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in kept)
    assert any(not torch.equal(states[0][key], states[2][key]) for key in kept)
    config = yaml.safe_load((folder / "b" / "config.yaml").read_text())
    assert config["seed_everything"] == 4


@pytest.mark.parametrize(
    ("devices", "nodes", "federated", "expected"),
    [("2", 1, True, "federated"), ("1", 4, True, "federated"), ("auto", 1, True, "auto"), ("2", 1, False, "auto")],
)
def test_several_processes_get_the_federations_strategy(devices, nodes, federated, expected):
    from jsonargparse import Namespace

    from lit_epgan.cli.run_setup import choose_strategy

    trainer = Namespace(accelerator="cpu", devices=devices, num_nodes=nodes, strategy="auto")
    choose_strategy(trainer, federated)
    assert trainer.strategy == expected


@pytest.mark.slow
def test_two_ranks_from_the_command_line_give_the_same_metrics(run):
    there = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.default_root_dir", "two"]
    run_words([sys.executable, "-m", "lit_epgan", "fit", *TINY, *there])
    one, two = (pd.read_csv(folder / "metrics.csv").drop(columns="step") for folder in (run, Path("two")))
    pd.testing.assert_frame_equal(one, two, rtol=1e-4)


@pytest.mark.parametrize("class_path", ["lit_epgan.runs.WandbHistory", "lightning.pytorch.loggers.WandbLogger"])
def test_wandb_is_offline_without_a_key_only(class_path, folder, monkeypatch):
    from jsonargparse import Namespace

    from lit_epgan.cli.run_setup import place_loggers

    def placed(subcommand: str = "fit") -> Namespace:
        arguments = Namespace(save_dir=".", offline=False, id=None, name=None)
        logger = Namespace(class_path=class_path, init_args=arguments)
        config = Namespace(trainer=Namespace(logger=[logger]), seed_everything=3)
        config["federation.init_args.algorithm.class_path"] = "lit_epgan.federated.FedProx"
        place_loggers(config, Path("run"), subcommand)
        assert arguments.job_type == subcommand
        return arguments

    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert not placed().offline  # WANDB_MODE is set and decides
    monkeypatch.delenv("WANDB_MODE")
    first = placed()
    assert first.offline
    assert first.save_dir == "run"
    assert first.name == "run, FedProx, seed 3"
    assert placed().id == first.id  # a resumed run goes on in the same W&B run
    assert (placed("test").id, placed("test").name) == (None, "run, FedProx, seed 3, test")
    monkeypatch.setenv("WANDB_NAME", "mine")
    assert placed().name is None  # W&B takes the environment's
    (folder / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert not placed().offline
    (folder / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert not placed().offline
