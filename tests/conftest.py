"""What many tests share."""

import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

if not (Path(__file__).parent.parent / "callbacks").is_dir():  # no checkout: these read its folders
    collect_ignore = ["test_evidence.py", "test_imports.py", "test_wheel.py"]


gc.disable()  # imports make nearly a million objects and no garbage: a quarter of the collection's time


def pytest_collection_finish():
    gc.enable()


def pytest_addoption(parser):
    parser.addoption("--accelerator", default="cpu", help="cpu, or gpu where there is one: where configurations train")


def pytest_collection_modifyitems(items):
    """Files with slow tests first, so that no worker is left alone with one in the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def no_ledgers_at_home(tmp_path_factory):
    """What wider fixtures train writes to no ledger of the user's."""
    os.environ["LIT_EPGAN_LEDGERS"] = str(tmp_path_factory.mktemp("ledgers"))


@pytest.fixture(autouse=True)
def ledgers(no_ledgers_at_home, tmp_path_factory, monkeypatch):
    """Every test has data sets that nobody has looked at before."""
    folder = tmp_path_factory.mktemp("ledgers")
    monkeypatch.setenv("LIT_EPGAN_LEDGERS", str(folder))
    return folder


@pytest.fixture(autouse=True)
def seeds():
    """Every test begins at seed 0, so that what it draws does not depend on the tests that its process ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of all the processes that run the tests."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if own.name.startswith("popen-") else own


@pytest.fixture(scope="session")
def classifier_cache(shared):
    """Where the classifiers that judge samples are kept, so that all processes together train each of them once."""
    return shared / "classifiers"


@pytest.fixture(scope="session")
def speech_cache(shared):
    """Where the miniature speech corpus is kept, so that all processes together speak it once."""
    return shared / "speech"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, no W&B, and a density map that is a file but not drawn: a third of a run's time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr("lit_epgan.callbacks.toy_metrics.draw", lambda *_: np.zeros((8, 8, 3), np.uint8))
    return tmp_path
