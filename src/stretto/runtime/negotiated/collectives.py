"""Execute all collectives except all-reduce on a lane.

They transfer bytes, so every element type works on every backend. Sizes that differ
between ranks are known from the negotiation and are not exchanged again here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stretto.runtime.negotiated import reductions
from stretto.runtime.negotiated.pending import (
    as_row,
    new_output,
    output_shape,
    write,
)
from stretto.runtime.negotiated.requests import DTYPES, CollectiveKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.runtime.negotiated.pending import PendingRequest
    from stretto.runtime.negotiated.requests import Request

Finished = tuple[torch.Tensor, tuple[int, ...]]
"""The result, and for all-gather and all-to-all the rows received from each rank."""

Prepared = tuple[Callable[[Any], Any] | None, Callable[[], Finished]]


def prepare(job: PendingRequest, by_rank: Sequence[Request], rank: int) -> Prepared:
    """Return how to start a job on a lane, and what to do when it has ended.

    The first is ``None`` if nothing has to be sent. On a GPU, call this, and both, on
    the lane's stream once the job's values are ready there: they copy and allocate.
    """
    prepared: Prepared = _PREPARE[job.request.kind](job, by_rank, rank)
    return prepared


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return as_row(tensor).view(torch.uint8)


def _input(job: PendingRequest) -> torch.Tensor:
    if job.tensor is None:
        raise AssertionError(f"{job.request.place} has no tensor")
    return job.tensor.contiguous().resolve_neg()


def _broadcast(job: PendingRequest, by_rank: Sequence[Request], rank: int) -> Any:
    request, size = job.request, len(by_rank)
    mine = _input(job)
    result = new_output(mine.shape, mine)
    options = dist.BroadcastOptions()
    options.rootRank = request.root
    options.rootTensor = 0

    def begin(lane: Any) -> Any:
        if rank == request.root:
            result.copy_(mine)
        return lane.broadcast([_bytes(result)], options)

    def finish() -> Finished:
        return _deliver(job, result), ()

    if size == 1 or result.numel() == 0:
        result.copy_(mine)
        return None, finish
    return begin, finish


def _allgather(job: PendingRequest, by_rank: Sequence[Request], _rank: int) -> Any:
    mine = _input(job)
    rows = [request.rows for request in by_rank]
    row_bytes = math.prod(job.request.shape) * DTYPES[job.request.dtype]
    size, longest = len(rows), max(rows)
    result = new_output((sum(rows), *job.request.shape), mine)
    even = min(rows) == longest
    # If first dimensions differ, every rank sends as many rows as the largest has.
    room = _bytes(result) if even else mine.new_empty(0, dtype=torch.uint8)
    if not even:
        room = room.new_empty(size * longest * row_bytes)

    def begin(lane: Any) -> Any:
        sent = _bytes(mine)
        if rows[_rank] != longest:
            padded = room.new_zeros(longest * row_bytes)
            padded[: sent.numel()] = sent
            sent = padded
        return lane._allgather_base(room, sent)  # noqa: SLF001

    def finish() -> Finished:
        if not even:
            found = room.view(size, longest * row_bytes)
            flat, at = _bytes(result), 0
            for theirs, count in zip(found, rows, strict=True):
                flat[at : at + count * row_bytes] = theirs[: count * row_bytes]
                at += count * row_bytes
        return result, tuple(rows)

    if size == 1:
        result.copy_(mine)
        return None, finish
    return (begin if result.numel() else None), finish


def _alltoall(job: PendingRequest, by_rank: Sequence[Request], rank: int) -> Any:
    mine = _input(job)
    received = tuple(request.splits[rank] for request in by_rank)
    row_bytes = math.prod(job.request.shape) * DTYPES[job.request.dtype]
    result = new_output((sum(received), *job.request.shape), mine)

    def begin(lane: Any) -> Any:
        return lane.alltoall_base(
            _bytes(result),
            _bytes(mine),
            [n * row_bytes for n in received],
            [n * row_bytes for n in job.request.splits],
            dist.AllToAllOptions(),
        )

    anything = row_bytes and any(sum(request.splits) for request in by_rank)
    return (begin if anything else None), lambda: (result, received)


def _reducescatter(job: PendingRequest, by_rank: Sequence[Request], rank: int) -> Any:
    # Every rank sends each rank its rows and adds up the received rows in rank order:
    # as many bytes as a ring's reduce-scatter, for shares of any size and type.
    request, size = job.request, len(by_rank)
    mine = _input(job)
    bounds = reductions.row_bounds(request.shape[0], size)
    row_bytes = math.prod(request.shape[1:]) * DTYPES[request.dtype]
    share = bounds[rank + 1] - bounds[rank]
    shape = output_shape(request, rank=rank, size=size)
    if shape is None:
        raise AssertionError("a reduce-scatter's output has a shape")
    received = new_output((size, *shape), mine)

    def begin(lane: Any) -> Any:
        sent = mine
        if request.prescale != 1.0:
            sent = mine.clone()
            reductions.scale(sent, request.prescale)
        return lane.alltoall_base(
            _bytes(received),
            _bytes(sent),
            [share * row_bytes] * size,
            [(b - a) * row_bytes for a, b in itertools.pairwise(bounds)],
            dist.AllToAllOptions(),
        )

    def finish() -> Finished:
        result = new_output(shape, mine)
        if result.numel():
            result.copy_(reductions.combine(received, request.op))
            reductions.finish(result, request, size)
        return _deliver(job, result), ()

    return (begin if request.elements else None), finish


def _barrier(_job: PendingRequest, _by_rank: Sequence[Request], _rank: int) -> Any:
    # Nothing to send: a barrier ends when all ranks have submitted it.
    return None, lambda: (None, ())


def _deliver(job: PendingRequest, result: torch.Tensor) -> torch.Tensor:
    if job.output is None:
        return result
    return write(job.output, result)


_PREPARE: dict[CollectiveKind, Callable[[Any, Sequence[Any], int], Any]] = {
    CollectiveKind.BROADCAST: _broadcast,
    CollectiveKind.ALLGATHER: _allgather,
    CollectiveKind.ALLTOALL: _alltoall,
    CollectiveKind.REDUCESCATTER: _reducescatter,
    CollectiveKind.BARRIER: _barrier,
}
