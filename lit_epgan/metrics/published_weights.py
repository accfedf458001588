"""Weights that others have published: read once, known by their whole digest, and loaded as data."""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from lit_epgan.errors import UserError


def published_weights(path: Path, sha256: str, whose: str, source: str) -> dict[str, Any]:
    """The state dict in a file of known content; what is checked and what is loaded are the same bytes.

    Args:
        path: the file.
        sha256: digest of the published file, 64 hexadecimal digits.
        whose: name of the network.
        source: where the file can be had.

    Raises:
        UserError: another file is in its place.
    """
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise UserError(
            f"{path} is not {whose}'s weights file (its SHA-256 is {found}, not {sha256}): replace it by {source}."
        )
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state
