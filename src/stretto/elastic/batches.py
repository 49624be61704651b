"""Which samples a rank computes in a step, with one cursor for all ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, final

import torch

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

_EPOCH_SEEDS = 1_000_003
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How many samples a step has."""

    samples: int

    per_rank: bool

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the size that ``"global:512"`` or ``"rank:32"`` names.

        Raises:
            SpecError: it is neither.
        """
        kind, _, number = str(text).partition(":")
        if kind not in ("global", "rank") or not number.isdecimal() or int(number) < 1:
            raise SpecError(
                f"batch must be 'global:SAMPLES' or 'rank:SAMPLES', got {text!r}"
            )
        return cls(int(number), kind == "rank")

    def __str__(self) -> str:
        """Return what `of` reads."""
        return f"{'rank' if self.per_rank else 'global'}:{self.samples}"

    def of_step(self, ranks: int) -> int:
        """Return the samples of a step of this many ranks."""
        return self.samples * ranks if self.per_rank else self.samples


def share(samples: int, ranks: int, rank: int) -> range:
    """Return a rank's positions among a step's samples; the first ranks have one more.

    The ranks' shares are disjoint and cover all samples.
    """
    each, more = divmod(samples, ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def order_of(samples: int, *, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """Return the order of an epoch's samples, equal on all ranks."""
    if not shuffle:
        return list(range(samples))
    generator = torch.Generator()
    generator.manual_seed(seed * _EPOCH_SEEDS + epoch)
    return [int(i) for i in torch.randperm(samples, generator=generator)]


def step_seed(seed: int, *, step: int, rank: int) -> int:
    """Return the seed of torch's generator for a rank in a step."""
    return ((seed * _SEED_STEP + step) * _SEED_STEP + rank) % (1 << 63)


@dataclass(frozen=True, slots=True)
class Stamp:
    """A batch's place: the division and step that it is a part of."""

    division: int
    """Counts changes of ranks: a batch of an earlier division is dropped."""

    samples: int
    """Samples of the step, on all ranks."""

    weight: float
    """The weight of this rank's mean loss, relative to an equal share."""


@final
class ShareSampler:
    """Yields a rank's indices of each step, as a ``batch_sampler`` of a DataLoader.

    A loader fetches ahead, so a batch comes with a stamp, by which the reader knows
    those that were divided among other ranks. Workers continue when the ranks change.
    """

    def __init__(self, order: list[int], size: BatchSize) -> None:
        self._order, self._size = order, size
        self._next = self._rank = 0
        self._ranks = 1
        self._division = -1
        self.stamps: deque[Stamp] = deque()
        """Stamps of all batches that were fetched and not read, in order."""

    def divide(self, done: int, *, rank: int, ranks: int, division: int) -> None:
        """Yield what follows the first ``done`` samples, divided among these ranks."""
        self._next, self._rank, self._ranks = done, rank, ranks
        self._division = division

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rest of the epoch."""
        while self._next < len(self._order):
            first = self._next
            samples = min(self._size.of_step(self._ranks), len(self._order) - first)
            self._next += samples
            mine = share(samples, self._ranks, self._rank)
            weight = len(mine) * self._ranks / samples
            self.stamps.append(Stamp(self._division, samples, weight))
            # A rank without samples computes one with weight 0, to take part.
            yield [self._order[first + i] for i in mine or (0,)]
