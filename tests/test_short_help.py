"""Help that fits on a screen, and all of it where it is asked for."""

import re

import pytest

from lit_epgan.cli.main import PAGE, main, short_help


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_is_a_screen_of_common_keys(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert len(page.splitlines()) < 60
    assert all(len(line) <= 130 for line in page.splitlines())
    assert "--help all" in page
    assert f"lit_epgan {command} --config" in page


def test_help_all_lists_every_key_and_the_short_page_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help", "all"])
    assert ended.value.code == 0
    everything = capsys.readouterr().out
    assert len(everything.splitlines()) > 300
    ours = set(re.findall(r"--(trainer\.\w+|ckpt_path|accept_changes|seed_everything|config)\b", PAGE))
    assert ours
    assert all(f"--{key}" in everything for key in ours)


def test_a_class_is_explained_by_its_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--model.help", "GAN"])
    assert ended.value.code == 0
    assert "--model.generator" in capsys.readouterr().out


def test_other_words_ask_for_no_help() -> None:
    assert short_help(["fit", "--config", "a.yaml"]) is None
    assert short_help(["fit", "--help", "all"]) is None
    assert short_help(["study", "--help"]) is None


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"lit_epgan \d+\.\d+\.\d+\n", capsys.readouterr().out)
