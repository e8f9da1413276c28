"""Residual networks (He et al. 2015, Deep Residual Learning): ResNet-50 for photographs, a small one for tiny images.

Each is a Sequential of `stem`, `stage1`, `stage2`, ... and `head`, so that strategies can name its pieces:
    --recompute --recompute_configs checkpoints=stage1,stage2          these run again in the backward pass
    --pipeline --pipeline_configs stages=stage3                        the second stage of the pipeline begins there
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn


class Residual(nn.Module):
    """relu(layers(x) + shortcut(x))."""

    def __init__(self, layers: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.layers, self.shortcut = layers, shortcut

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(inputs) + self.shortcut(inputs))


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    """25.6 million parameters for 1000 classes; images of 224 × 224 pixels, or any size from 32 on."""
    stem = nn.Sequential(*_conv(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
    return _network(stem, 64, (3, 4, 6, 3), (64, 128, 256, 512), 4, num_classes)


def resnet_small(num_classes: int = 10, num_blocks: int = 3) -> nn.Sequential:
    """The paper's network for CIFAR-10: 6 · num_blocks + 2 layers, 20 of them by default, 0.27 million parameters."""
    stem = nn.Sequential(*_conv(3, 16, 3), nn.ReLU(inplace=True))
    return _network(stem, 16, (num_blocks,) * 3, (16, 32, 64), 1, num_classes)


def _network(
    stem: nn.Module, width: int, blocks: Sequence[int], widths: Sequence[int], expansion: int, num_classes: int
) -> nn.Sequential:
    pieces: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for number, (num, middle) in enumerate(zip(blocks, widths, strict=True)):
        made = []
        for block in range(num):
            stride = 2 if number and not block else 1
            made.append(
                _block(width, middle, stride) if expansion == 1 else _bottleneck(width, middle, stride, expansion)
            )
            width = middle * expansion
        pieces[f"stage{number + 1}"] = nn.Sequential(*made)
    pieces["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
    return nn.Sequential(pieces)


def _block(width: int, out: int, stride: int) -> Residual:
    """Two 3 × 3 convolutions."""
    layers = nn.Sequential(*_conv(width, out, 3, stride), nn.ReLU(inplace=True), *_conv(out, out, 3))
    return Residual(layers, _shortcut(width, out, stride))


def _bottleneck(width: int, middle: int, stride: int, expansion: int) -> Residual:
    """1 × 1 to fewer channels, 3 × 3, and 1 × 1 back to more; as in the paper, the first one has the stride."""
    out = middle * expansion
    layers = nn.Sequential(
        *_conv(width, middle, 1, stride), nn.ReLU(inplace=True), *_conv(middle, middle, 3), nn.ReLU(inplace=True),
        *_conv(middle, out, 1),
    )  # fmt: skip
    return Residual(layers, _shortcut(width, out, stride))


def _shortcut(width: int, out: int, stride: int) -> nn.Module:
    return nn.Identity() if width == out and stride == 1 else nn.Sequential(*_conv(width, out, 1, stride))


def _conv(width: int, out: int, size: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution, initialised as in He et al. 2015 (Delving Deep into Rectifiers), and its batch norm."""
    conv = nn.Conv2d(width, out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv, nn.BatchNorm2d(out)
