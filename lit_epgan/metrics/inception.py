"""The ``inception`` extractor: the network whose features define IS and FID."""

import io
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_epgan.errors import MissingFileError
from lit_epgan.metrics.features import FeatureExtractor, to_bytes
from lit_epgan.metrics.published_weights import published_weights

WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
SOURCE = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS}"


class Inception(FeatureExtractor):
    """torch-fidelity's Inception v3: 2,048 features, 1,008 logits without bias, of images as uint8 RGB.

    Args:
        weights: the weights file; by default ``WEIGHTS`` in torch hub's cache, where torch-fidelity looks.

    Raises:
        UserError: another file is in its place. MissingFileError if there is none.
    """

    name = "inception"
    splits = 10
    sha256: ClassVar[str] = SHA256

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        path = Path(weights) if weights is not None else Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
        if not path.is_file():
            raise MissingFileError(
                f"IS and FID need Inception's weights, which are not here: place the file {SOURCE} at {path}, "
                "or choose the extractor digits or lite0."
            )
        self.network = _network(published_weights(path, self.sha256, "Inception", SOURCE))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, 2048) and unbiased logits (n, 1008) of ``images`` (n, 1 or 3, height, width) in [-1, 1]."""
        features, logits = self.network(to_bytes(images))
        return features, logits

    def metric(self, name: str) -> str:
        """``fid``, ``is`` and ``kid`` are Inception's own."""
        return name if name in ("fid", "is", "kid") else super().metric(name)


def _network(state: dict[str, Tensor]) -> nn.Module:
    """torch-fidelity's network with these weights. Its own constructor unpickles a file, so it gets an empty one."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Network(FeatureExtractorInceptionV3):  # type: ignore[misc]  # it has no types
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict(state)

    empty = io.BytesIO()
    torch.save({}, empty)
    empty.seek(0)
    network: nn.Module = Network(
        "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=empty
    )
    return network
