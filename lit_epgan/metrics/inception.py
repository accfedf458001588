"""The ``inception`` extractor: the network whose features define IS and FID."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from lit_epgan.errors import MissingFileError, UserError
from lit_epgan.metrics.features import FeatureExtractor, to_bytes

WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
SHA256_PREFIX = "6726825d"
SOURCE = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS}"


class Inception(FeatureExtractor):
    """torch-fidelity's Inception v3: 2,048 features, 1,008 logits without bias, of images as uint8 RGB.

    Args:
        weights: the weights file; by default ``WEIGHTS`` in torch hub's cache, where torch-fidelity looks.

    Raises:
        UserError: the file is missing, or another file is in its place.
    """

    name = "inception"
    splits = 10

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        path = Path(weights) if weights is not None else Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
        verify(path)
        self.network = FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(path)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, 2048) and unbiased logits (n, 1008) of ``images`` (n, 1 or 3, height, width) in [-1, 1]."""
        features, logits = self.network(to_bytes(images))
        return features, logits

    def metric(self, name: str) -> str:
        """``fid``, ``is`` and ``kid`` are Inception's own."""
        return name if name in ("fid", "is", "kid") else super().metric(name)


def verify(path: Path) -> None:
    """Check that ``path`` holds the published weights, before anything in it is unpickled.

    Raises:
        UserError: it does not; the message says which file to place where. MissingFileError if there is none at all.
    """
    if not path.is_file():
        raise MissingFileError(
            f"IS and FID need Inception's weights, which are not here: place the file {SOURCE} at {path}, "
            "or choose the extractor digits or lite0."
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if not found.startswith(SHA256_PREFIX):
        raise UserError(
            f"{path} is not Inception's weights file (its SHA-256 begins with {found[:8]}, not {SHA256_PREFIX}): "
            f"replace it by {SOURCE}."
        )
