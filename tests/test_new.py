"""``new NAME``: the folder's own test passes and its configuration runs; names that cannot be are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_epgan.cli.main import main
from tests.processes import environment
from tests.test_cli import refusal

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.slow
def test_what_it_makes_runs(capsys, monkeypatch):
    assert main(["new", "wards"]) == 0
    _, *commands = capsys.readouterr().out.splitlines()
    assert sorted(os.listdir("wards")) == ["test_wards.py", "wards.py", "wards.yaml"]
    monkeypatch.chdir("wards")
    for command in commands:
        subprocess.run([sys.executable, *command.split()[1:]], env=environment(), check=True, timeout=300)
    assert Path("runs/wards/metrics.csv").read_text().count("\n") == 6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Usage: python -m lit_epgan new NAME"),
        (["a", "b"], "Usage: python -m lit_epgan new NAME"),
        (["my-wards"], "'my-wards' cannot be a Python module's name: take letters"),
        (["../wards"], "cannot be a Python module's name"),
        (["class"], "cannot be a Python module's name"),
        (["torch"], "torch is the name of a Python module: take another."),
        (["there"], "there is there already: take another name"),
    ],
)
def test_names_that_cannot_be_are_refused(words, sentence, capsys):
    Path("there").mkdir()
    assert sentence in refusal(capsys, "new", *words)
    assert os.listdir() == ["there"]
