"""What an installation holds: one name, ``lit_epgan``, with all that a checkout has under it."""

import contextlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from setuptools import build_meta

ROOT = Path(__file__).parent.parent
TOP = ("lit_epgan", "datamodules", "callbacks", "configs")
CHECKOUT = (*TOP, "tests", "benchmarks", "docs", "pyproject.toml", "MANIFEST.in", "README.md")
FROM = """
import sys
sys.path.insert(0, {folder!r})  # before the editable install
import lit_epgan.cli.main as cli
print(cli.__file__)
"""
SHOW = """
sys.exit(cli.main(["fit", "--config", "digits.yaml", "--model.lr", "0.5", "--print_config"]))
"""
BESIDE_A_USERS_OWN = """
import callbacks, datamodules
from torch import nn, optim, randn
from torch.utils.data import TensorDataset
from lightning.pytorch import LightningModule

class YourModule(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.1)

a, b, c = (TensorDataset(randn(8, 3), randn(8, 1)) for _ in range(3))
{example}
assert callbacks.OWNER == datamodules.OWNER == "user"
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    copy = tmp_path_factory.mktemp("checkout")
    for part in CHECKOUT:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, copy / part)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


def build_wheel(source, folder):
    """As pip does it, by the package's own build system."""
    with contextlib.chdir(source):
        return folder / build_meta.build_wheel(str(folder))


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def in_checkout(pattern):
    within = {"lit_epgan": "", "datamodules": "lit_epgan/", "callbacks": "lit_epgan/", "configs": "lit_epgan/"}
    files = {within[top] + path.relative_to(ROOT).as_posix() for top in TOP for path in (ROOT / top).rglob(pattern)}
    return {path for path in files if "__pycache__" not in path}


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    assert contents(wheel) == {
        "lit_epgan/py.typed",
        "lit_epgan/configs/typefaces.txt",
        *(path for kind in ("*.py", "*.yaml", "*.html") for path in in_checkout(kind)),
    }


@pytest.mark.slow
def test_a_source_distribution_builds_the_same_wheel(wheel, checkout, tmp_path):
    with contextlib.chdir(checkout):
        archive = build_meta.build_sdist(str(tmp_path))
    shutil.unpack_archive(tmp_path / archive, tmp_path)
    source = tmp_path / archive.removesuffix(".tar.gz")
    assert contents(build_wheel(source, tmp_path)) == contents(wheel)


@pytest.mark.slow
def test_an_installed_wheel_runs_the_readmes_example_beside_a_users_own_packages_and_finds_its_configs(wheel, tmp_path):
    unpacked, own = tmp_path / "site", tmp_path / "own"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    for name in ("callbacks", "datamodules", "configs"):
        (own / name).mkdir(parents=True)
        (own / name / "__init__.py").write_text('OWNER = "user"\n')
    example = next(block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
    script = BESIDE_A_USERS_OWN.format(example=example.replace("20,", "2,"))
    (own / "train.py").write_text(FROM.format(folder=str(unpacked)) + script + SHOW)
    ran = subprocess.run([sys.executable, "train.py"], cwd=own, capture_output=True, text=True, timeout=300)
    assert list(own.rglob("last.ckpt")), ran.stderr
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0].startswith(str(unpacked))
    assert "lr: 0.5" in ran.stdout


def test_what_is_installed_here_claims_one_name(tmp_path):
    """Under ``pip install -e`` too, whose interpreter must not see the checkout's other folders."""
    code = (
        "import sys; from importlib.util import find_spec; import lit_epgan.configs;"
        "print(*[spec.origin for name in sys.argv[1:] if (spec := find_spec(name))])"
    )
    names = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier()]
    assert {"callbacks", "datamodules", "configs", "tests", "benchmarks", "evidence"} <= set(names)
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, *names], cwd=tmp_path, capture_output=True, text=True, check=True, env={}
    )
    # another distribution may have a package called tests
    assert [path for path in found.stdout.split() if Path(path).is_relative_to(ROOT) and ".venv" not in path] == [
        str(ROOT / "lit_epgan" / "__init__.py")
    ]


def test_release_files_ask_for_commands_that_there_are():
    files = sorted((ROOT / ".github").rglob("*.yaml")) if (ROOT / ".github").is_dir() else []
    assert {path.name for path in files} == {"ci.yaml", "release.yaml"}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for path in files:
        steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
        words = "\n".join(step.get("run", "") for step in steps)
        assert set(re.findall(r"^make (\w+)", words, re.M)) <= targets
        assert all((ROOT / script).is_file() for script in re.findall(r"^(\.ci/\w+)", words, re.M))
