"""Known models with their original structure, in any width and image size.

Written from the papers. ``width`` scales channels. ``activation`` may be smooth: with
ReLU, rounding differences in the last bit switch units on and off, and the losses of
equal methods drift apart over steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Activation = Callable[[], nn.Module]
    _Branches = tuple[list[nn.Module], tuple[int | None, ...]]

_VGG = {
    11: (1, 1, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
}
"""Convolutions between poolings (Simonyan and Zisserman, 2015, table 1: A, D)."""


class VGG(nn.Module):
    """VGG-11 or VGG-16: convolutions, then three dense layers with most parameters.

    At ``width=64, dense=4096, image=224, classes=1000`` it is the paper's, with 132.9
    or 138.4 million parameters. A pooling that would leave less than one pixel is
    omitted; the images' side must be a power of two times 7, or a power of two.
    """

    def __init__(
        self,
        depth: int = 16,
        *,
        width: int = 64,
        dense: int = 4096,
        image: int = 224,
        channels: int = 3,
        classes: int = 1000,
        dropout: float = 0.5,
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before, side = channels, image
        for stage, count in enumerate(_VGG[depth]):
            wide = width * min(2**stage, 8)
            for _ in range(count):
                layers += [nn.Conv2d(before, wide, 3, padding=1), activation()]
                before = wide
            if side > 1:
                layers.append(nn.MaxPool2d(2))
                side //= 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(before * side * side, dense),
            activation(),
            nn.Dropout(dropout),
            nn.Linear(dense, dense),
            activation(),
            nn.Dropout(dropout),
            nn.Linear(dense, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores ``(batch, classes)`` of square images."""
        out: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return out


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(
        self, before: int, inner: int, after: int, stride: int, activation: Activation
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.act = activation()
        self.shortcut: nn.Module | None = None
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(hidden)))
        out = self.act(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        beside = hidden if self.shortcut is None else self.shortcut(hidden)
        result: Tensor = self.act(out + beside)
        return result


class WideResNet(nn.Module):
    """Wide ResNet-101-2: bottlenecks of twice the inner width, with batch norm.

    At ``width=64, blocks=(3, 4, 23, 3)`` it is the paper's (Zagoruyko and Komodakis,
    2016) with 126.9 million parameters.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        blocks: Sequence[int] = (3, 4, 23, 3),
        channels: int = 3,
        classes: int = 1000,
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            activation(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        stages: list[nn.Module] = []
        before = width
        for stage, count in enumerate(blocks):
            inner, after = 2 * width * 2**stage, 4 * width * 2**stage
            for n in range(count):
                stride = 2 if n == 0 and stage > 0 else 1
                stages.append(_Bottleneck(before, inner, after, stride, activation))
                before = after
        self.blocks = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores ``(batch, classes)`` of square images."""
        hidden = self.pool(self.blocks(self.stem(images)))
        out: Tensor = self.head(torch.flatten(hidden, 1))
        return out


class _Mixed(nn.Module):
    """Branches side by side, joined over channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([branch(hidden) for branch in self.branches], 1)


class InceptionV3(nn.Module):
    """Inception-v3: eleven blocks of branches (Szegedy et al., 2016), no side output.

    At ``width=1, image=299`` it is the paper's, with 23.8 million parameters. Images
    need a side of at least 75. ``blocks`` omits blocks, by kind: A, B, C, D and E.
    """

    def __init__(
        self,
        *,
        width: float = 1.0,
        blocks: str = "AAABCCCCDEE",
        channels: int = 3,
        classes: int = 1000,
        dropout: float = 0.5,
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        make = _Inception(width, activation)
        sides = {"A": iter((32, 64, 64)), "C": iter((128, 160, 160, 192))}
        self.stem = nn.Sequential(
            make.conv(channels, 32, 3, stride=2),
            make.conv(make.of(32), 32, 3),
            make.conv(make.of(32), 64, 3, padding=1),
            nn.MaxPool2d(3, 2),
            make.conv(make.of(64), 80, 1),
            make.conv(make.of(80), 192, 3),
            nn.MaxPool2d(3, 2),
        )
        made: list[nn.Module] = []
        before = make.of(192)
        for kind in blocks:
            block, before = make.block(kind, before, next(sides.get(kind, iter((0,)))))
            made.append(block)
        self.blocks = nn.Sequential(*made)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores ``(batch, classes)`` of square images."""
        hidden = self.pool(self.blocks(self.stem(images)))
        out: Tensor = self.head(torch.flatten(self.dropout(hidden), 1))
        return out


@final
class _Inception:
    """Makes the parts of an Inception-v3 of a width."""

    def __init__(self, width: float, activation: Activation) -> None:
        self._width, self._activation = width, activation

    def of(self, channels: int) -> int:
        """Return the scaled number of channels."""
        return max(1, round(channels * self._width))

    def conv(
        self,
        before: int,
        after: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> nn.Module:
        """Return a convolution with batch norm; ``after`` is the paper's number."""
        return nn.Sequential(
            nn.Conv2d(before, self.of(after), kernel, stride, padding, bias=False),
            nn.BatchNorm2d(self.of(after), eps=1e-3),
            self._activation(),
        )

    def block(self, kind: str, before: int, side: int) -> tuple[nn.Module, int]:
        """Return a block of a kind, and its channels."""
        make = {"A": self._a, "B": self._b, "C": self._c, "D": self._d, "E": self._e}
        branches, counts = make[kind](before, side)
        after = sum(before if count is None else self.of(count) for count in counts)
        return _Mixed(*branches), after

    def _row(self, before: int, *steps: tuple[int, int | tuple[int, int], Any]) -> Any:
        """Return convolutions: channels, kernel, padding or ``"half"`` the size."""
        parts = []
        for after, kernel, padding in steps:
            stride, pad = (2, 0) if padding == "half" else (1, padding)
            parts.append(self.conv(before, after, kernel, stride=stride, padding=pad))
            before = self.of(after)
        return nn.Sequential(*parts)

    def _pooled(self, before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), self.conv(before, after, 1))

    def _a(self, before: int, side: int) -> _Branches:
        row = self._row
        return [
            row(before, (64, 1, 0)),
            row(before, (48, 1, 0), (64, 5, 2)),
            row(before, (64, 1, 0), (96, 3, 1), (96, 3, 1)),
            self._pooled(before, side),
        ], (64, 64, 96, side)

    def _b(self, before: int, _: int) -> _Branches:
        row = self._row
        return [
            row(before, (384, 3, "half")),
            row(before, (64, 1, 0), (96, 3, 1), (96, 3, "half")),
            nn.MaxPool2d(3, 2),
        ], (384, 96, None)

    def _c(self, before: int, side: int) -> _Branches:
        row, wide, high = self._row, ((1, 7), (0, 3)), ((7, 1), (3, 0))
        return [
            row(before, (192, 1, 0)),
            row(before, (side, 1, 0), (side, *wide), (192, *high)),
            row(
                before,
                (side, 1, 0),
                (side, *high),
                (side, *wide),
                (side, *high),
                (192, *wide),
            ),
            self._pooled(before, 192),
        ], (192, 192, 192, 192)

    def _d(self, before: int, _: int) -> _Branches:
        row = self._row
        last = (192, 3, "half")
        return [
            row(before, (192, 1, 0), (320, 3, "half")),
            row(
                before, (192, 1, 0), (192, (1, 7), (0, 3)), (192, (7, 1), (3, 0)), last
            ),
            nn.MaxPool2d(3, 2),
        ], (320, 192, None)

    def _e(self, before: int, _: int) -> _Branches:
        return [
            self._row(before, (320, 1, 0)),
            nn.Sequential(self._row(before, (384, 1, 0)), self._both(384)),
            nn.Sequential(self._row(before, (448, 1, 0), (384, 3, 1)), self._both(384)),
            self._pooled(before, 192),
        ], (320, 384, 384, 384, 384, 192)

    def _both(self, channels: int) -> nn.Module:
        """Return a 1x3 and a 3x1 convolution side by side."""
        before = self.of(channels)
        return _Mixed(
            self._row(before, (channels, (1, 3), (0, 1))),
            self._row(before, (channels, (3, 1), (1, 0))),
        )


class _Block(nn.Module):
    """Attention and two dense layers, each normalized first and added."""

    def __init__(
        self, width: int, heads: int, dropout: float, activation: Activation
    ) -> None:
        super().__init__()
        self._heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.act = activation()
        self.narrow = nn.Linear(4 * width, width)
        self.drop1 = nn.Dropout(dropout)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden))
        qkv = qkv.view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        hidden = hidden + self.drop1(self.out(mixed))
        dense = self.narrow(self.act(self.wide(self.norm2(hidden))))
        result: Tensor = hidden + self.drop2(dense)
        return result


class Transformer(nn.Module):
    """A causal transformer over bytes, normalized before each part."""

    def __init__(
        self,
        *,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        context: int = 16,
        dropout: float = 0.1,
        activation: Activation = nn.GELU,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(
            *(_Block(width, heads, dropout, activation) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-byte scores ``(batch, 256, context)`` of bytes."""
        hidden = self.token(tokens) + self.position[: tokens.shape[1]]
        hidden = self.norm(self.blocks(hidden))
        out: Tensor = self.head(hidden).transpose(1, 2)
        return out
