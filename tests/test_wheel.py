"""The wheel holds what a checkout holds: its configurations are found by name, far from any checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("lit_epgan", "datamodules", "callbacks", "configs", "pyproject.toml", "README.md")


@pytest.mark.slow
def test_an_installed_wheel_finds_its_configs(tmp_path: Path) -> None:
    source, unpacked, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for part in PARTS:
        path = ROOT / part
        (shutil.copytree if path.is_dir() else shutil.copy)(path, source / part)
    offline = ["--no-deps", "--no-build-isolation"]
    build = [sys.executable, "-m", "pip", "wheel", *offline, "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(unpacked)
    # -P and the path put the unpacked wheel before the editable install and leave the working directory out
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import lit_epgan.cli as cli; print(cli.__file__);"
        "sys.exit(cli.main(['fit', '--config', 'digits.yaml', '--model.lr', '0.5', '--print_config']))"
    )
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code, str(unpacked)], cwd=elsewhere, capture_output=True, text=True, timeout=300
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[0].startswith(str(unpacked))
    assert "lr: 0.5" in shown.stdout
    assert (unpacked / "configs" / "studies" / "demo.yaml").is_file()
    assert (unpacked / "lit_epgan" / "templates" / "study.html").is_file()
