"""Real data that needs no download."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor


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
