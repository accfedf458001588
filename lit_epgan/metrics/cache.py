"""The user's cache folder, and a tensor file in it that is never seen half-written."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/lit_epgan``, by default ``~/.cache/lit_epgan``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_epgan"


def load_tensors(path: Path) -> dict[str, Any] | None:
    """The state dict at ``path``, or None where there is no readable one."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever a torn file makes torch raise, the remedy is the same: make it anew
        return None
    return state


def save_tensors(state: dict[str, Any], path: Path) -> None:
    """Write beside ``path``, then rename; a cache that cannot be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            torch.save(state, file)
        os.replace(file.name, path)
    except OSError:
        return
