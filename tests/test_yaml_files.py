"""Aliases of a YAML file are counted before they are expanded, wherever a file is read."""

from pathlib import Path

import pytest
import yaml

from lit_epgan.errors import UserError
from lit_epgan.runs.yaml_files import MOST_NODES, load_yaml
from tests.test_cli import folder, refusal

__all__ = ["folder"]  # the fixture: an empty working directory

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 30)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 10)}]}}\n" for k in range(1, 30))
ITSELF = "a: &a [1, *a]\n"
DEEP = "[" * 600 + "]" * 600


@pytest.mark.parametrize("text", [BOMB, MERGES, ITSELF, DEEP], ids=["lists", "merges", "itself", "deep"])
def test_a_file_that_stands_for_too_much_is_refused_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (folder / "bomb.yaml").write_text(text)
    said = r"bomb.yaml (stands for more than 100,000 values|is nested too deep)"
    with pytest.raises(UserError, match=said):
        load_yaml(folder / "bomb.yaml")
    (folder / "base.yaml").write_text("base: bomb.yaml\n")
    for words in (["fit", "--config", "bomb.yaml"], ["fit", "--config=base.yaml"], ["study", "--config", "bomb.yaml"]):
        assert "bomb.yaml" in refusal(capsys, *words)
    assert "bomb.yaml" in refusal(capsys, "fit", "--config", "toy.yaml", "--model", "bomb.yaml")
    assert "bomb.yaml" in refusal(capsys, "fit", "--config", "toy.yaml", "--model=bomb.yaml")


def test_aliases_that_people_write_are_what_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text("a: &a {x: 1, y: [2.5, null]}\nb: *a\nc: {<<: *a, x: 3}\n")
    assert load_yaml(path) == yaml.safe_load(path.read_text())
    path.write_text("")
    assert load_yaml(path) is None
    path.write_text(f"[{'1, ' * (MOST_NODES - 1)}]")
    assert len(load_yaml(path)) == MOST_NODES - 1
