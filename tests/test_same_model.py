"""One configuration, the same server's model: in one process, on four ranks, and through FLARE with four sites."""

import importlib
from types import ModuleType

import pytest
import torch

from tests.processes import ROOT


@pytest.fixture
def same_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, which compares all algorithms."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    return importlib.import_module("same_model")


def test_a_difference_is_relative_to_its_tensors_largest_value(same_model: ModuleType) -> None:
    expected = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([1e-3]), "none": torch.zeros(0)}
    found = {"a": torch.tensor([1.5, -4.0]), "b": torch.tensor([1.1e-3]), "none": torch.zeros(0)}
    assert same_model.difference(found, expected) == pytest.approx(0.5 / 4)
    assert not same_model.met([0.0, same_model.difference({}, expected)])
