"""ResNet-18 and ResNet-50 for small images (He et al., arXiv 1512.03385), the stem of its section 4.2.

The stem is one 3x3 convolution of stride 1 without pooling, so 32 pixels a side reach the first stage whole.
Shapes: B batch, C channels, Y and X rows and columns of pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.models.configs import require, require_positive
from thinwire.models.draws import normal_

CLASSIFIER_STD = 0.01
STAGE_STRIDES = (1, 2, 2, 2)


@dataclass(frozen=True)
class ResNetConfig:
    """Shape of a ResNet. Raises ValueError for a depth we do not know or a size below one."""

    depth: int = 18
    """18 has blocks of two 3x3 convolutions, 50 bottlenecks."""
    num_classes: int = 10
    width: int = 64
    """Channels of the first stage, doubled by each of the next three; 16 suits a CPU."""

    def __post_init__(self) -> None:
        allowed = ", ".join(map(str, DEPTHS))
        require(self.depth in DEPTHS, f"model: depth={self.depth}", allowed, "choose one")
        require_positive(self, ("num_classes", "width"))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside the shortcut, (B, C, Y, X) -> (B, channels, Y / stride, X / stride)."""

    EXPANSION = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, channels, 3, stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.last_norm = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.last_norm(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside the shortcut; gives 4 * channels. The stride is the 3x3's."""

    EXPANSION = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = self.EXPANSION * channels
        self.conv1 = _conv(in_channels, channels, 1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, out_channels, 1)
        self.last_norm = nn.BatchNorm2d(out_channels)
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = F.relu(self.norm2(self.conv2(out)))
        out = self.last_norm(self.conv3(out))
        return F.relu(out + self.shortcut(x))


# depth -> the block, and how many of it each stage has
DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


class ResNet(nn.Module):
    """Images (B, 3, Y, X) to logits. Call `init_weights` before use (the constructor leaves torch's defaults)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        block, counts = DEPTHS[config.depth]
        self.config = config
        self.stem = _conv(3, config.width, 3)
        self.norm = nn.BatchNorm2d(config.width)
        self.stages = nn.Sequential()
        in_channels = config.width
        for index, (count, stride) in enumerate(zip(counts, STAGE_STRIDES, strict=True)):
            channels = config.width << index
            blocks = nn.Sequential()
            for position in range(count):
                blocks.append(block(in_channels, channels, 1 if position else stride))
                in_channels = block.EXPANSION * channels
            self.stages.append(blocks)
        self.classifier = nn.Linear(in_channels, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Floating-point images (B, 3, Y, X) -> logits (B, num_classes)."""
        given = f"model input of shape {tuple(images.shape)}, {images.dtype}"
        is_images = images.dim() == 4 and images.shape[1] == 3 and images.is_floating_point()
        require(is_images, given, "floating-point images (B, 3, Y, X)", "normalise them first")
        x = F.relu(self.norm(self.stem(images)))
        x = self.stages(x).mean(dim=(2, 3))
        return cast(Tensor, self.classifier(x))

    def init_weights(self, seed: int) -> None:
        """Draws every parameter anew, each from a generator of its own seeded by (seed, name).

        Convolutions have standard deviation sqrt(2 / (out_channels * kernel area)) (He et al., arXiv
        1502.01852); the classifier 0.01, with zero bias. Norms are one, but zero where a block joins its
        shortcut, so that every block begins as that alone (Goyal et al., arXiv 1706.02677, section 5.1).
        Running statistics start over.
        """
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 4:
                normal_(parameter, math.sqrt(2 / (parameter.shape[0] * parameter[0, 0].numel())), seed, name)
            elif name == "classifier.weight":
                normal_(parameter, CLASSIFIER_STD, seed, name)
            elif name == "classifier.bias" or name.endswith("last_norm.weight"):
                nn.init.zeros_(parameter)


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The identity where shapes allow, else a projection (option B of the paper)."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


def resnet18(**overrides: Any) -> ResNet:
    """A ResNet-18 (11.17 million parameters at full width); follow it by `init_weights(seed)`."""
    return ResNet(ResNetConfig(depth=18, **overrides))


def resnet50(**overrides: Any) -> ResNet:
    """A ResNet-50 (23.52 million parameters at full width); follow it by `init_weights(seed)`."""
    return ResNet(ResNetConfig(depth=50, **overrides))
