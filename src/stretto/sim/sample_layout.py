"""Place the samples of the global batch on ranks, and plan the moves between layers.

Samples are numbered over the global batch in the order of the ranks' shares: rank 0's
first. A layout gives for each rank the numbers of its samples, in the order of its
rows.

# Note [Samples stay where they are]
A narrower layer's ranks keep the samples that they have, and the other ranks' samples
are distributed to them. So only the difference moves between widths, which is the cost
that plans assume. The layout of a set of ranks depends only on the shares, so that all
paths to a layer bring the same samples to the same ranks: the layout of ranks f to
f+g-1 is made from that of one rank more, starting from all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Numbers = NDArray[np.int64]

Rows = slice | tuple[int, ...]
"""Rows of a rank's tensor: a slice if they are contiguous, else a list."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One rank's part when samples move from one layout to another.

    A peer's rows are in ascending order of the samples' numbers on both sides.
    """

    kept: tuple[tuple[Rows, Rows], ...]
    """Rows before and after of the samples that stay."""

    sends: tuple[tuple[int, Rows], ...]
    """Peer and rows before the move."""

    receives: tuple[tuple[int, Rows], ...]
    """Peer and rows after the move."""

    num_before: int

    num_after: int

    back: Transfer | None = None
    """The gradients' move back; ``None`` in a move back itself."""

    @property
    def is_idle(self) -> bool:
        """Whether the rank has no samples before and after."""
        return not self.num_before and not self.num_after


@final
class Layouts:
    """The layouts of one global batch.

    ``shares`` are the numbers of samples that each rank passed.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        ends = np.cumsum(self.shares, dtype=np.int64)
        self._found: dict[tuple[int, int] | None, tuple[Numbers, ...]] = {
            None: tuple(
                np.arange(end - share, end, dtype=np.int64)
                for share, end in zip(self.shares, ends, strict=True)
            )
        }
        self._transfers: dict[tuple[object, object, int], Transfer | None] = {}

    @cached_property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return sum(self.shares)

    def samples(self, ranks: tuple[int, int] | None) -> tuple[Numbers, ...]:
        """Return each rank's samples if a layer runs on ``ranks``: the first, how many.

        ``None`` is the layout in which the ranks passed them. Numbers of samples of a
        layer's ranks differ by at most one; the first ranks have more.
        """
        if ranks not in self._found:
            self._found[ranks] = self._distributed(ranks)
        return self._found[ranks]

    def _distributed(self, ranks: tuple[int, int] | None) -> tuple[Numbers, ...]:
        assert ranks is not None  # noqa: S101
        first, width = ranks
        world = len(self.shares)
        if width == world:
            before = self.samples(None)
        elif first + width < world:
            before = self.samples((first, width + 1))
        else:
            before = self.samples((0, world))
        quotas = [0] * world
        for i in range(width):
            quotas[first + i] = -(-(self.num_samples - i) // width)
        loose = [numbers[q:] for numbers, q in zip(before, quotas, strict=True)]
        rest = np.concatenate(loose)
        found, at = [], 0
        for numbers, quota in zip(before, quotas, strict=True):
            kept = numbers[:quota]
            lacking = quota - len(kept)
            found.append(np.concatenate((kept, rest[at : at + lacking])))
            at += lacking
        return tuple(found)

    def transfer(
        self,
        source: tuple[int, int] | None,
        target: tuple[int, int] | None,
        rank: int,
    ) -> Transfer | None:
        """Return a rank's part between two layouts; ``None`` if nothing moves."""
        key = (source, target, rank)
        if key not in self._transfers:
            self._transfers[key] = _transfer(
                self.samples(source), self.samples(target), rank
            )
        return self._transfers[key]


def _transfer(
    before: Sequence[Numbers], after: Sequence[Numbers], rank: int
) -> Transfer | None:
    if all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
        return None
    there = _one_way(before, after, rank)
    back = _one_way(after, before, rank)
    return Transfer(
        kept=there.kept,
        sends=there.sends,
        receives=there.receives,
        num_before=there.num_before,
        num_after=there.num_after,
        back=back,
    )


def _one_way(
    before: Sequence[Numbers], after: Sequence[Numbers], rank: int
) -> Transfer:
    mine, wanted = before[rank], after[rank]
    sends, receives, kept = [], [], []
    for peer in range(len(before)):
        if peer == rank:
            both = np.intersect1d(mine, wanted)
            if len(both):
                kept.append((_rows(mine, both), _rows(wanted, both)))
            continue
        out = np.intersect1d(mine, after[peer])
        if len(out):
            sends.append((peer, _rows(mine, out)))
        found = np.intersect1d(before[peer], wanted)
        if len(found):
            receives.append((peer, _rows(wanted, found)))
    return Transfer(
        kept=tuple(kept),
        sends=tuple(sends),
        receives=tuple(receives),
        num_before=len(mine),
        num_after=len(wanted),
    )


def _rows(numbers: Numbers, some: Numbers) -> Rows:
    """Return the positions of some samples among a rank's samples."""
    order = np.argsort(numbers, kind="stable")
    at = order[np.searchsorted(numbers, some, sorter=order)]
    if len(at) and np.array_equal(at, np.arange(at[0], at[0] + len(at))):
        return slice(int(at[0]), int(at[-1]) + 1)
    return tuple(int(i) for i in at)
