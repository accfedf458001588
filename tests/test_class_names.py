"""One way to name a class: by the room that offers it, in every configuration and page."""

import importlib
import re
from pathlib import Path

import pytest

from lit_epgan.runs.config_files import config_folders

ROOT = Path(__file__).parent.parent
CONFIGS = [ROOT / "README.md", *config_folders()[-1].rglob("*.yaml"), *(ROOT / "docs").rglob("*.md")]
CLASS = re.compile(r"\b(lit_epgan(?:\.\w+)*)\.([A-Z]\w*)")
NOT_BY_ROOM = re.compile(r"(?:class_path: |(?<![\w./]))(?:callbacks|datamodules)\.(?:\w+\.)*[A-Z]\w*")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_class_is_named_by_its_room(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not NOT_BY_ROOM.findall(text)
    for module, name in set(CLASS.findall(text)):
        assert module.count(".") == 1, f"{module}.{name}"
        room = importlib.import_module(module)
        assert name in room.__all__, f"{module} does not offer {name}"


def test_this_test_sees_classes() -> None:
    found = {match for path in CONFIGS for match in CLASS.findall(path.read_text(encoding="utf-8"))}
    assert {("lit_epgan.callbacks", "FederationCallback"), ("lit_epgan.federated", "FedAvg")} <= found
