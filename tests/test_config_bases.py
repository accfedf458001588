"""Configurations that start from another one, or go on top of one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_epgan.cli.main import main
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
    config = printed(capsys, "--config", "cifar_f2a.yaml", "--config", "algorithms/fedprox.yaml")
    federation = config["federation"]["init_args"]
    assert federation["algorithm"] == {"class_path": "lit_epgan.federated.FedProx", "init_args": {"mu": 0.01}}
    assert (federation["optimizer_state"], federation["buffers"]) == ("keep", "merge")  # the experiment's


@pytest.mark.parametrize("order", [("scaffold", "median", "norm_clipping"), ("norm_clipping", "median", "scaffold")])
def test_what_is_done_to_reports_goes_with_any_algorithm(order: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_top = [word for name in order for word in ("--config", f"algorithms/{name}.yaml")]
    federation = printed(capsys, "--config", "digits.yaml", *on_top)["federation"]["init_args"]
    names = [federation[key]["class_path"].split(".")[-1] for key in ("algorithm", "aggregator", "mechanism")]
    assert names == ["SCAFFOLD", "Median", "NormClipping"]


def test_a_base_may_be_several(folder: Path) -> None:
    (folder / "both.yaml").write_text("base: [middle.yaml, algorithms/scaffold.yaml]\n")
    assert [path.name for path in with_bases(Path("both.yaml"))] == [
        *("toy.yaml", "middle.yaml", "scaffold.yaml", "both.yaml"),
    ]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["configs/toy.yaml", "configs/toy_probgan.yaml"], "toy_probgan"),
        (["configs/digits.yaml", "configs/algorithms/scaffold.yaml"], "digits_scaffold"),
        (["a/digits.yaml", "b/algorithms/scaffold.yaml", "b/algorithms/median.yaml"], "digits_scaffold_median"),
        (["cifar100.yaml", "algorithms/fednp.yaml", "tiny_imagenet.yaml"], "tiny_imagenet"),
        (["a.yaml", "algorithms/fednp.yaml", "tiny_imagenet.yaml", "algorithms/moon.yaml"], "tiny_imagenet_moon"),
        ([], "run"),
    ],
)
def test_the_run_has_the_name_of_what_was_asked_for(files: list[str], name: str) -> None:
    assert default_folder(files) == Path("runs") / name


def test_a_circle_and_a_missing_base_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("base: b.yaml\n")
    Path("b.yaml").write_text("base: a.yaml\n")
    Path("c.yaml").write_text("base: nowhere.yaml\n")
    with pytest.raises(UserError, match=r"starts from itself"):
        with_bases(Path("a.yaml"))
    with pytest.raises(UserError, match=r"no config 'nowhere.yaml'"):
        with_bases(Path("c.yaml"))
