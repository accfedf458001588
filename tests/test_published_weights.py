"""Weights that others publish are known by their whole digest, and no code in them is ever run."""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_epgan.errors import UserError
from lit_epgan.metrics import pretrained_extractors
from lit_epgan.metrics.pretrained_extractors import Inception, Lite0, published_weights
from tests.inception_weights import stand_in
from tests.traps import Trap


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-was-run"


@pytest.fixture(params=["zip", "as before torch 1.6"])
def trap(request: pytest.FixtureRequest, tmp_path: Path, marker: Path) -> Path:
    """A file that makes the marker when it is unpickled."""
    path = tmp_path / "weights.pth"
    torch.save({"w": Trap(marker)}, path, _use_new_zipfile_serialization=request.param == "zip")
    torch.load(path, weights_only=False)
    assert marker.exists(), "the trap must work, or this test shows nothing"
    marker.unlink()
    return path


def test_a_file_that_shares_the_first_digits_of_the_digest_is_refused(trap: Path, marker: Path) -> None:
    found = hashlib.sha256(trap.read_bytes()).hexdigest()

    class Near(Inception):
        sha256 = found[:8] + "0" * 56

    with pytest.raises(UserError, match=rf"is not Inception's weights file \(its SHA-256 is {found}"):
        Near(trap)
    assert not marker.exists()


def test_no_code_is_run_whatever_the_digest_says(trap: Path, marker: Path) -> None:
    with pytest.raises(pickle.UnpicklingError):
        stand_in(trap)
    assert not marker.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_loaded_is_what_was_checked(tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read once: whoever replaces it in between replaces nothing."""
    path, weights = tmp_path / "weights.pth", {"w": torch.arange(3)}
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    digest, load = hashlib.sha256(path.read_bytes()).hexdigest(), torch.load

    def replaced(*args: Any, **kwargs: Any) -> Any:
        torch.save({"w": torch.zeros(3)}, path)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", replaced)
    assert torch.equal(published_weights(path, digest, "Somebody", "there")["w"], weights["w"])


def test_lite0s_are_known_by_their_digest(trap: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained_extractors, "weights_file", lambda: trap)
    with pytest.raises(UserError, match="is not EfficientNet-Lite0's weights file"):
        Lite0()
    assert not marker.exists()


def test_the_published_digests_are_whole_and_those_of_the_files_names() -> None:
    for extractor, name in ((Inception, "6726825d"), (Lite0, "57934424")):
        assert len(bytes.fromhex(extractor.sha256)) == 32
        assert extractor.sha256.startswith(name)
        assert name in extractor.file


def test_the_network_unpickles_no_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch-fidelity's constructor would; all that it is given is empty and was never a file."""
    read: list[object] = []
    load = torch.load

    def seen(source: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(source)
        return load(source, *args, **kwargs)

    path = tmp_path / "weights.pth"
    torch.save({}, path)
    monkeypatch.setattr(torch, "load", seen)
    with pytest.raises(RuntimeError, match="Missing key"):
        stand_in(path)
    assert all(isinstance(source, io.BytesIO) for source in read)
