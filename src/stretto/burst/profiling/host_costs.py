"""Measure the cost of the executor's own calls on the ranks that will train.

Samples move around a ring, from each rank to the next, with the executor's own calls.
Ranks are idle between them, as most are in a step. The measured time is that of the
calling thread, without its waits; the processor time of the process's other threads,
which serve the connections, is counted separately.

Ranks on one host share its memory, and in an emulated cluster its processors, so they
slow each other when they compute at once. Steps of one rank alone and of several at
once alternate, so that a machine whose speed drifts is not mistaken for one whose ranks
slow each other.
"""

from __future__ import annotations

import time
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stretto.burst.activation_transfer import ActivationTransfer
from stretto.burst.forward_exchange import NUM_NUMBERS
from stretto.burst.rank_groups import RankGroups
from stretto.burst.timings import StepClock
from stretto.measure.clocks import clock_for
from stretto.runtime.agreement import Agreement, ranks_of
from stretto.schema.burst_host import HostCosts, Slowdown
from stretto.sim.sample_layout import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES_BYTES = (4 * 2**10, 256 * 2**10)
"""Message sizes; the cost of one more byte is the slope between them."""

_COPIED_BYTES = 8 * 2**20
_PAUSE_S = 2e-3


def measure_host(
    group: dist.ProcessGroup, device: torch.device, *, repetitions: int = 40
) -> HostCosts:
    """Return the ranks' costs of calling communication, the same on all. Collective.

    Raises:
        CommTimeout: a rank was lost.
    """
    ranks = ranks_of(group, timeout_s=None)
    rank_groups = RankGroups(
        ranks,
        serial=Agreement(ranks).serial,
        backend=group._get_backend(device).name(),  # noqa: SLF001
        device=device,
        lanes=1,
    )
    activations = ActivationTransfer(rank_groups, StepClock())

    def exchange() -> None:
        with rank_groups.guard("measuring the exchange of the ranks' shares"):
            rank_groups.exchange([0] * NUM_NUMBERS)

    def ready() -> None:
        exchange()
        time.sleep(_PAUSE_S)

    small, large = (
        _message_s(
            activations, ranks.rank, ranks.size, size, device, ready, repetitions
        )
        for size in SIZES_BYTES
    )
    asked = []
    for _ in range(repetitions if ranks.size > 1 else 0):
        ready()
        begin_s = perf_counter()
        exchange()
        asked.append(perf_counter() - begin_s)
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(
        every, (small, large, _copy_s(device, repetitions), asked), group=group
    )
    message_s, message_s_per_byte = _line(
        *(median(row[size][0] for row in every) for size in (0, 1))
    )
    connection_s, connection_s_per_byte = _line(
        *(median(row[size][1] for row in every) for size in (0, 1))
    )
    rounds = list(zip(*(row[3] for row in every), strict=True))
    return HostCosts(
        message_s=message_s,
        message_s_per_byte=message_s_per_byte,
        connection_s=connection_s,
        connection_s_per_byte=connection_s_per_byte,
        copy_s_per_byte=median(row[2] for row in every) / _COPIED_BYTES,
        # The last rank to arrive waits least.
        exchange_s=median(min(each) for each in rounds) if rounds else 0.0,
    )


def _line(small_s: float, large_s: float) -> tuple[float, float]:
    """Return seconds of no bytes, and of each byte, from those of both sizes."""
    per_byte = max(0.0, large_s - small_s) / (SIZES_BYTES[1] - SIZES_BYTES[0])
    return max(0.0, small_s - per_byte * SIZES_BYTES[0]), per_byte


def _message_s(
    activations: ActivationTransfer,
    rank: int,
    size: int,
    size_bytes: int,
    device: torch.device,
    ready: Callable[[], None],
    repetitions: int,
) -> tuple[float, float]:
    """Return seconds of one message: the calling thread's, and the other threads'.

    It is sent or received. The first is a median; the others' clock is coarser, so the
    second is a mean.
    """
    if size == 1:
        return 0.0, 0.0
    rows = torch.zeros((1, size_bytes), dtype=torch.uint8, device=device)
    whole = slice(0, 1)
    shift = Transfer(
        kept=(),
        sends=(((rank + 1) % size, whole),),
        receives=(((rank - 1) % size, whole),),
        num_before=1,
        num_after=1,
    )
    found, connection_s = [], 0.0
    for _ in range(repetitions):
        ready()
        connection_s -= time.process_time() - time.thread_time()
        begin_s = perf_counter()
        pending = activations.begin(rows, shift, activations.next_tags(2), "measured")
        found.append((perf_counter() - begin_s) / 2)
        activations.end(pending, "measured")
        activations.finish_sends()
        connection_s += time.process_time() - time.thread_time()
    return median(found), max(0.0, connection_s) / (2 * repetitions)


def _copy_s(device: torch.device, repetitions: int) -> float:
    """Return the median seconds to copy a gradient's bytes, including queued work."""
    source = torch.zeros(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    found = []
    for _ in range(repetitions):
        begin_s = perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(perf_counter() - begin_s)
    return median(found)


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
