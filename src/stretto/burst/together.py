"""Measure how much ranks slow each other when they compute at once.

Ranks on one host share its memory, and in an emulated cluster its processors. Steps of
one rank alone and of several at once alternate, so that a machine whose speed drifts is
not mistaken for one whose ranks slow each other.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stretto.measure.clocks import clock_for
from stretto.schema.burst_host import Slowdown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


def slowdowns(
    group: dist.ProcessGroup,
    device: torch.device,
    step: Callable[[int], None],
    widths: Sequence[int],
    *,
    repetitions: int = 10,
) -> tuple[Slowdown, ...]:
    """Return the slowest rank's time with several ranks at once, relative to one alone.

    Collective. ``step`` computes as one rank of a width does; ``widths`` are the
    numbers of ranks, of which those above 1 are measured.
    """
    clock = clock_for(device)
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def timed(width: int, ranks: int) -> float:
        dist.barrier(group)
        if rank >= ranks:
            return 0.0
        begin = clock.mark()
        step(width)
        return clock.seconds(begin, clock.mark())

    found = []
    for width in sorted(w for w in set(widths) if 1 < w <= size):
        mine = [(timed(width, 1), timed(width, width)) for _ in range(repetitions + 2)]
        every: list[Any] = [None] * size
        dist.all_gather_object(every, mine[2:], group=group)
        ratios = [
            max(both for _, both in moment) / moment[0][0]
            for moment in zip(*every, strict=True)
        ]
        found.append(Slowdown(ranks=width, ratio=median(ratios)))
    return tuple(found)
