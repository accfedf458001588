"""A configuration that cannot be meant is refused in one sentence with the file's name."""

from pathlib import Path

import pytest
from wandb.errors import AuthenticationError

from lit_epgan.cli.error_messages import explain
from lit_epgan.errors import UserError
from lit_epgan.runs.yaml_files import load_yaml
from tests.test_cli import folder, refusal

__all__ = ["folder"]  # the fixture: an empty working directory

LOGGER = "base: toy.yaml\ntrainer:\n  logger:\n  - class_path: lit_epgan.runs.WandbHistory\n    "


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b"trainer: {max_epochs: 1}\ntrainer: {}\n",
            "mine.yaml, line 2: the key 'trainer' is there already, in line 1.",
        ),
        (b"base: toy.yaml\nmodel: {a: 1, lr: 1, a: 2}\n", "mine.yaml, line 2: the key 'a' is there already"),
        (b"", "mine.yaml is empty"),
        (b"# nothing\n", "mine.yaml is empty"),
        (b"- toy.yaml\n", "mine.yaml has no keys"),
        (b"trainer:\n\tmax_epochs: 1\n", "mine.yaml, line 2: a tab stands where YAML takes blanks."),
        (b"# one\n# caf\xe9\n", "mine.yaml, line 2: it is not UTF-8"),
        (b"trainer: {max_epochs: 1\n", "mine.yaml, line 2: it is no YAML"),
        (b"base: toy.yaml\ntrainer: {max_epochs: soon}\n", "mine.yaml: trainer.max_epochs is 'soon'"),
        (b"base: toy.yaml\ndata: {batch_size: 0}\n", "mine.yaml: data.batch_size is 0"),
        (LOGGER.encode() + b"init_args: {mode: ofline}\n", "mine.yaml: trainer.logger.mode is 'ofline', but one of"),
        (LOGGER.encode() + b"init_args: {projekt: x}\n", "mine.yaml: There is no key trainer.logger.projekt"),
        (LOGGER.encode() + b"dict_kwargs: {grup: x}\n", "mine.yaml: trainer.logger.grup: Weights & Biases has no such"),
    ],
)
def test_a_mistake_in_a_file_has_the_files_name(
    folder: Path, capsys: pytest.CaptureFixture[str], content: bytes, sentence: str
) -> None:
    (folder / "mine.yaml").write_bytes(content)
    assert refusal(capsys, "fit", "--config", "mine.yaml").startswith(sentence)
    (folder / "on_top.yaml").write_text("base: mine.yaml\n")
    assert refusal(capsys, "fit", "--config", "on_top.yaml").startswith(sentence)


def test_what_the_command_line_overrides_is_not_the_files_mistake(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.yaml").write_text("base: toy.yaml\ntrainer: {max_epochs: 1}\n")
    told = refusal(capsys, "fit", "--config", "mine.yaml", "--trainer.max_epochs", "soon")
    assert told.startswith("trainer.max_epochs is 'soon'")


def test_an_alias_within_a_mapping_is_no_second_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: [*a, *a, {x: 1}]\n")
    assert load_yaml(tmp_path / "a.yaml") == {"a": {"x": 1}, "b": [{"x": 1}] * 3}
    (tmp_path / "b.yaml").write_text("a: [{x: 1}, {x: 1, 'x': 2}]\n")
    with pytest.raises(UserError, match=r"b\.yaml, line 1: the key 'x'"):
        load_yaml(tmp_path / "b.yaml")


def test_a_mode_of_wandb_that_the_environment_misspells_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "foo")
    told = refusal(capsys, "fit", "--config", "digits.yaml")
    assert told.startswith("WANDB_MODE is 'foo' in the environment; it must be one of online, offline")


def test_what_wandb_refuses_is_a_sentence() -> None:
    sentence = explain(AuthenticationError("WANDB_API_KEY invalid: API key must have 40+ characters, has 3."))
    assert sentence is not None
    assert sentence.startswith(
        "Weights & Biases cannot be used: WANDB_API_KEY invalid: API key must have 40+ characters"
    )
