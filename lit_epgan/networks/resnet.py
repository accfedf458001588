"""ResNet-18 for small images."""

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from lit_epgan.lib.errors import UserError
from lit_epgan.networks.sizes import check_positive

ResNetNorm = Literal["batch", "group", "none"]
GROUPS = 32  # Wu and He 2018, "Group normalization"


class BasicBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), 3 x 3 convolutions; x by a 1 x 1 convolution where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module], bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=bias)
        self.bn1 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=bias)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=bias), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, outputs, height / stride, width / stride) of (rows, inputs, height, width)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x)) + shortcut
        return self.relu(x)


class ResNet18(nn.Module):
    """Images (rows, channels, height, width) -> features (rows, 8 width); without a classifier.

    He, Zhang, Ren and Sun 2016, with the stem for 32 x 32: one 3 x 3 convolution of stride 1 and no pooling. Layers
    have torchvision's names and initial distributions, so that its weights load; 11,168,832 parameters.

    Args:
        channels: of the images.
        width: channels of the first stage, doubled by each of the other three.
        norm: ``batch``; ``group``: 32 groups, or the largest number that divides both 32 and the channels, which keeps
            no statistics of a client's data; ``none``: convolutions with biases.
    """

    def __init__(self, channels: int = 3, width: int = 64, norm: ResNetNorm = "batch") -> None:
        super().__init__()
        check_positive("ResNet-18", channels=channels, width=width)
        layer, bias = _norm(norm), norm == "none"
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=bias)
        self.bn1 = layer(width)
        self.relu = nn.ReLU(inplace=True)
        for stage in range(4):
            outputs = width * 2**stage
            inputs, stride = (width, 1) if stage == 0 else (outputs // 2, 2)
            blocks = [BasicBlock(inputs, outputs, stride, layer, bias), BasicBlock(outputs, outputs, 1, layer, bias)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.out_features = 8 * width
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(images)))
        for stage in range(4):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.avgpool(x).flatten(1)


def _norm(name: str) -> Callable[[int], nn.Module]:
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm2d,
        "group": lambda channels: nn.GroupNorm(math.gcd(GROUPS, channels), channels),
        "none": lambda channels: nn.Identity(),
    }
    if name not in kinds:
        raise UserError(f"norm {name!r} does not exist: choose batch, group or none.")
    return kinds[name]
