"""Configurations that start from another one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_epgan.command.cli import main
from lit_epgan.errors import UserError
from lit_epgan.runs.config_files import resolve_configs, with_bases
from lit_epgan.runs.run_folder import default_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "top.yaml").write_text("base: middle.yaml\nmodel: {init_args: {lr: 3e-3}}\n")
    (tmp_path / "middle.yaml").write_text("base: toy.yaml\nmodel: {init_args: {lr: 2e-4, r1: 0.25}}\n")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *words, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_bases_come_first(folder: Path) -> None:
    assert [path.name for path in with_bases(Path("top.yaml"))] == ["toy.yaml", "middle.yaml", "top.yaml"]
    words = resolve_configs(["fit", "--config", "top.yaml", "--model.lr", "1", "-c=middle.yaml"])
    assert [Path(word).name for word in words] == [
        "fit", "--config", "toy.yaml", "--config", "middle.yaml", "--config", "top.yaml", "--model.lr", "1",
        "-c", "toy.yaml", "-c", "middle.yaml",
    ]  # fmt: skip


def test_the_later_file_wins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed(capsys, "--config", "top.yaml")
    model = config["model"]["init_args"]
    assert (model["lr"], model["r1"], model["objective"]) == (3e-3, 0.25, "lsgan")
    assert config["data"]["init_args"]["warmup_steps"] == 800
    assert printed(capsys, "--config", "top.yaml", "--model.lr", "5")["model"]["init_args"]["lr"] == 5


def test_another_algorithm_takes_none_of_the_bases_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    federation = printed(capsys, "--config", "toy_fedprox_probgan.yaml")["federation"]["init_args"]
    assert federation["algorithm"] == {"class_path": "lit_epgan.federated.FedProx", "init_args": {"mu": 1.0}}
    assert federation["optimizer_state"] == "reset"


def test_the_run_has_the_name_of_the_file_that_was_asked_for() -> None:
    assert default_folder(["configs/toy.yaml", "configs/toy_probgan.yaml"]) == Path("runs/toy_probgan")


def test_a_circle_and_a_missing_base_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("base: b.yaml\n")
    Path("b.yaml").write_text("base: a.yaml\n")
    Path("c.yaml").write_text("base: nowhere.yaml\n")
    with pytest.raises(UserError, match=r"starts from itself"):
        with_bases(Path("a.yaml"))
    with pytest.raises(UserError, match=r"no config 'nowhere.yaml'"):
        with_bases(Path("c.yaml"))
