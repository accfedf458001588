"""docs/institutions.md, followed to the letter by three sites, a server and who keeps the authority."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from lit_epgan.carriers.policy import Policy
from lit_epgan.cli.main import main
from tests.processes import ROOT, environment
from tests.test_kits import free_port

PAGE = (ROOT / "docs" / "institutions.md").read_text()
SITES, HOST, OPERATOR = ("east", "north", "south"), "localhost", "operator@example.org"
FILES = {"members.yaml": "name: ", "hospital.yaml": "seed_everything", "own.yaml": "data:", "policy.yaml": "algorithms"}


def blocks() -> list[str]:
    """What is indented in the walk, unindented; the server on this machine."""
    walk = PAGE.split("## From two laptops")[1].split("\n## ")[0]
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", walk, re.MULTILINE)
    return [
        re.sub("^    ", "", each.strip("\n") + "\n", flags=re.MULTILINE).replace("fl.example.org", HOST)
        for each in found
    ]


def file(name: str) -> str:
    return next(each for each in blocks() if each.startswith(FILES[name]))


def words(sign: str, name: str = "north") -> list[str]:
    """The words after ``python -m lit_epgan`` of the command with this sign, of another member."""
    command = next(each for each in blocks() if sign in each and each.startswith("python -m"))
    return [word if word.startswith("operator@") else word.replace("north", name) for word in command.split()[3:]]


def test_what_the_page_shows_is_well_formed():
    assert {len([each for each in blocks() if each.startswith(sign)]) for sign in FILES.values()} == {1}
    for name in FILES:
        assert isinstance(yaml.safe_load(file(name)), dict)
    assert Policy.of(yaml.safe_load(file("policy.yaml")), "policy.yaml").secure
    rules = next(each for each in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE) if "mechanisms:" in each)
    Policy.of(yaml.safe_load(rules), "all rules")


@pytest.mark.slow
def test_the_page_followed_to_the_letter_works(tmp_path, monkeypatch, capsys):
    port, authority = str(free_port()), tmp_path / "authority"
    authority.mkdir()
    (authority / "members.yaml").write_text(file("members.yaml").replace("8002", port))
    for name in (HOST, *SITES, OPERATOR):
        enter(tmp_path / name, monkeypatch)
        assert main(words("--request", name)) == 0
        shutil.copy(f"{name}.csr", authority)
    enter(authority, monkeypatch)
    assert main(words("--sites")) == 0
    for name in (HOST, *SITES, OPERATOR):
        enter(tmp_path / name, monkeypatch)
        shutil.copytree(authority / "kits" / name, f"kits/{name}")
        assert main(words("--assemble", name)) == 0
        Path("hospital.yaml").write_text(file("hospital.yaml"))
    shutil.move(tmp_path / OPERATOR / "kits" / OPERATOR, tmp_path / HOST / "kits")
    assert len(set(re.findall(r"Members: ([0-9a-f ]+)", capsys.readouterr().err))) == 1
    for name in SITES:
        place(tmp_path / name)
    processes = [started(tmp_path / name, words("--site ", name)) for name in SITES]
    processes.append(started(tmp_path / HOST, words("--server")))
    try:
        code = processes[-1].wait(300)
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)
    told = {name: (tmp_path / name / "terminal.log").read_text() for name in (HOST, *SITES)}
    assert code == 0, told
    assert "without certificates" not in str(told)
    rows = list(csv.DictReader((tmp_path / HOST / "runs/hospital/contributions.csv").open()))
    assert len(rows) == 60
    assert {row["counted"] for row in rows} == {"1"}
    shutil.copy(tmp_path / HOST / "runs/hospital/checkpoints/last.ckpt", tmp_path / "north")
    enter(tmp_path / "north", monkeypatch)
    assert main(words("--ckpt_path last.ckpt")) == 0
    assert "accuracy" in capsys.readouterr().out


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)


def place(folder: Path) -> None:
    """A site's own files."""
    rows = [(f"{i}.png", folder.name, ("benign", "malignant")[i % 2], "test" if i > 8 else "train") for i in range(12)]
    for i, (name, *_) in enumerate(rows):
        Image.new("L", (40, 40), 20 * i).save(folder / name)
    with (folder / "manifest.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([("path", "client", "label", "split"), *rows])
    for name in ("own.yaml", "policy.yaml"):
        (folder / name).write_text(file(name))


def started(folder: Path, told: list[str]) -> subprocess.Popen[bytes]:
    log = (folder / "terminal.log").open("ab")
    command, paths = [sys.executable, "-m", "lit_epgan", *told], {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder, env=environment() | paths, stdout=log, stderr=log, start_new_session=True
    )
