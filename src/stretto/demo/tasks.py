"""The demo's tasks: two models, and data that needs no download.

The models are small enough for two cores, and have large gradients.
"""

from __future__ import annotations

import pydoc_data.topics

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


class DemoTransformer(nn.Module):
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


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits: images ``(1797, 1, 8, 8)`` and labels."""
    from sklearn.datasets import load_digits  # slow to import

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16.0
    return images, torch.tensor(bunch.target)


def text(context: int) -> tuple[Tensor, Tensor]:
    """Return byte windows of Python's language reference, and the bytes after them.

    Both have shape ``(windows, context)``, with about 700 kB of English in total. The
    reference comes with every CPython, so nothing is downloaded.
    """
    topics = pydoc_data.topics.topics
    raw = "\n".join(topics[key] for key in sorted(topics)).encode()
    stream = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    windows = (len(stream) - 1) // context
    inputs = stream[: windows * context].view(windows, context)
    targets = stream[1 : windows * context + 1].view(windows, context)
    return inputs, targets


class Batches:
    """Batches of one rank, the same for every method: drawn from ``(seed, step)``.

    Each step's global batch is one draw; rank ``r`` takes its ``r``-th part, so no
    sample occurs twice in one step.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_per_rank: int,
        rank: int,
        ranks: int,
        seed: int,
    ) -> None:
        self._inputs, self._targets = inputs, targets
        self._batch, self._ranks, self._rank = batch_per_rank, ranks, rank
        self._seed = seed

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this rank's part of a step's global batch."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        drawn = torch.randperm(len(self._inputs), generator=generator)
        mine = drawn[self._rank * self._batch :][: self._batch]
        return self._inputs[mine], self._targets[mine]
