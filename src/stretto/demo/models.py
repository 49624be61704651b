"""The two models of the demo, small enough for two cores, with large gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.demo.settings import HEADS


class ConvNet(nn.Module):
    """Eight 3x3 convolutions with batch norm for 8x8 gray images, 10 classes.

    About ``1287 * width**2`` parameters; 5.3 million at width 64. Its late layers see
    one or four pixels each, so that gradients are large and computing them is cheap, as
    on a fast device behind a slow network.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = (1, 1, 1, 2, 2, 4, 4, 4, 8, 8)
        strides = (1, 1, 2, 1, 2, 1, 1, 2, 1)
        layers: list[nn.Module] = []
        for i, stride in enumerate(strides):
            narrow = 1 if i == 0 else widths[i] * width
            wide = widths[i + 1] * width
            layers += [
                nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(wide),
                # Smooth: with ReLU, rounding differences in the last bit switch units
                # on or off, and losses of equal methods drift apart.
                nn.SiLU(inplace=True),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores ``(batch, 10)`` of images ``(batch, 1, 8, 8)``."""
        out: Tensor = self.head(self.features(images).flatten(1))
        return out


class Transformer(nn.Module):
    """A causal transformer over bytes, with about 5 million parameters by default."""

    def __init__(
        self, width: int = 320, layers: int = 4, heads: int = HEADS, context: int = 32
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-byte scores ``(batch, 256, context)`` of bytes."""
        hidden = self.token(tokens) + self.position[: tokens.shape[1]]
        hidden = self.blocks(hidden, mask=self.mask, is_causal=True)
        out: Tensor = self.head(hidden).transpose(1, 2)
        return out
