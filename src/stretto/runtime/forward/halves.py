"""Exchange buckets in two halves, so that norms of gradients are known in between.

# Note [Clipping by parts]
Clipping by the global norm needs all sums before any optimizer's step, so whole
all-reduces leave nothing for the next forward. In halves, a bucket is first summed:
each rank gets the pieces of one share of it in an all-to-all during backward, and adds
them in rank order. As backward ends, ranks exchange the sums of squares of each
gradient in one small all-gather and launch the all-gathers of the shares, those of the
buckets that became ready last first. All of this is launched before backward returns,
so what a program does between backward and the next forward needs no other rank.

`lazy.py` then answers a gradient's norm from the exchanged sums and keeps a factor
until the gradient has arrived, so that clipping waits for neither. All ranks use the
same sums: the same coefficient, bit for bit. It is not the one of exact clipping, whose
norm is summed in another order. (PyTorch's own norm of float32 on a CPU deviates from
the exact one by 1e-4 for a gradient of 5 million elements; sums here are of rows of
1,024 elements, added in float64, which deviates by less than 1e-7.)

A bucket whose slices have fewer elements than there are ranks is reduced whole. What
remains of a slice that is divided equally, less than an element per rank, travels with
the sums of squares.

Gloo's own reduce-scatter is an all-reduce inside: 8 MiB on 4 hosts at 1 Gbit/s took
130 ms, as long as the all-reduce, and the all-to-all 69 ms.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stretto.runtime.bucket_schedule import BucketSchedule, Slice
    from stretto.runtime.forward.member import BucketMember
    from stretto.runtime.recording.step import AbstractStepObserver
    from stretto.runtime.sender import BucketSender

_ROW = 1024
"""Elements whose squares are added in their own type."""

_EXCHANGE = "the exchange of gradients' norms"

Span = tuple[int, int, int]
"""A gradient's place in its bucket, and where its elements begin and end in a part."""


def why_whole(
    schedules: Sequence[BucketSchedule], members: Iterable[Sequence[BucketMember]]
) -> str | None:
    """Return why a plan's buckets can't be exchanged in halves, or ``None``."""
    if any(schedule.wire is not None for schedule in schedules):
        return "gradients travel in another type than their own"
    if any(member.parameter.is_complex() for row in members for member in row):
        return "a parameter is complex"
    return None


def _spans(members: Sequence[BucketMember], start: int, end: int) -> list[Span]:
    """Return where gradients lie in a bucket's elements ``start`` to ``end``."""
    found = []
    for member in members:
        low = max(start, member.offset)
        high = min(end, member.offset + member.parameter.numel())
        if low < high:
            found.append((member.place, low - start, high - start))
    return found


def sum_of_squares(values: torch.Tensor) -> float:
    """Return it with an error of float64, whatever the type of the values (1-d)."""
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    whole = values.numel() // _ROW * _ROW
    found = 0.0
    if whole:
        rows = torch.linalg.vector_norm(values[:whole].view(-1, _ROW), 2, dim=1)
        found += float(rows.double().square_().sum())
    if whole < values.numel():
        found += float(torch.linalg.vector_norm(values[whole:], 2).double().square_())
    return found


@final
class _Part:
    """One slice of a bucket: this rank's share of it, and what divides by no rank."""

    def __init__(
        self, part: Slice, members: Sequence[BucketMember], rank: int, ranks: int
    ) -> None:
        self.each = each = (part.end - part.start) // ranks
        self.start = part.start
        self.end = part.start + each * ranks
        mine = part.start + rank * each
        self.spans = _spans(members, mine, mine + each)
        self.rest = (self.end, part.end)
        self.rest_spans = _spans(members, *self.rest)
        self.received: torch.Tensor | None = None
        self.share: torch.Tensor | None = None

    def start_sum(self, lane: Any, bucket: torch.Tensor) -> Any:
        """Start the all-to-all that brings all ranks' pieces of the share."""
        if self.received is None or self.received.dtype != bucket.dtype:
            size = self.end - self.start
            self.received = torch.empty(size, dtype=bucket.dtype, device="cpu")
            self.share = torch.empty(self.each, dtype=bucket.dtype, device="cpu")
        piece = bucket[self.start : self.end]
        return lane.alltoall_base(self.received, piece, [], [])

    def add_up(self) -> torch.Tensor:
        """Return the share's sum, added in rank order."""
        assert self.received is not None  # noqa: S101
        assert self.share is not None  # noqa: S101
        first, second, *others = self.received.view(-1, self.each)
        torch.add(first, second, out=self.share)
        for other in others:
            self.share.add_(other)
        return self.share

    def start_gather(self, lane: Any, bucket: torch.Tensor) -> Any:
        """Start the all-gather of all shares."""
        return lane._allgather_base(bucket[self.start : self.end], self.share)  # noqa: SLF001


@final
class Halves:
    """The buckets of one model, exchanged in halves. See Note [Clipping by parts]."""

    def __init__(
        self,
        schedules: Sequence[BucketSchedule],
        members: Sequence[Sequence[BucketMember]],
        sender: BucketSender,
        *,
        rank: int,
        ranks: int,
    ) -> None:
        self._schedules = tuple(schedules)
        self._sender = sender
        self._ranks = ranks
        self._first: list[int] = []
        """The number of each bucket's first gradient."""

        self._parts: list[list[_Part]] = []
        """The parts of each bucket; none if it is reduced whole."""

        self._own_spans: list[tuple[int, int, list[Span]]] = []
        """The elements that this rank squares of buckets that are reduced whole."""

        count = self._rest = 0
        for schedule, row in zip(schedules, members, strict=True):
            self._first.append(count)
            count += len(row)
            parts = [_Part(part, row, rank, ranks) for part in schedule.slices]
            if not all(part.each for part in parts):
                parts = []
            self._parts.append(parts)
            self._rest += sum(part.rest[1] - part.rest[0] for part in parts)
            low = schedule.elements * rank // ranks
            high = schedule.elements * (rank + 1) // ranks
            self._own_spans.append((low, high, _spans(row, low, high)))
        self._count = count
        self._sent: dict[int, torch.Tensor] = {}
        self._observer: AbstractStepObserver | None = None
        self._exchange: Any = None
        self._gathered = torch.empty(0)
        self._norms: list[float] | None = None
        self._rests: dict[int, list[torch.Tensor]] = {}

    def launcher(
        self, schedule: BucketSchedule, observer: AbstractStepObserver | None
    ) -> Callable[[torch.Tensor, Any], object]:
        """Return what launches the first half of a bucket."""
        self._observer = observer
        parts = self._parts[schedule.index]
        launch = self._sender.launcher(schedule, observer)
        if parts:
            launch = partial(self._launch_sum, schedule, parts)
        return partial(self._launch, launch, schedule.index)

    def _launch(self, launch: Any, index: int, bucket: torch.Tensor, opts: Any) -> None:
        launch(bucket, opts)
        self._sent[index] = bucket

    def _launch_sum(
        self,
        schedule: BucketSchedule,
        parts: Sequence[_Part],
        bucket: torch.Tensor,
        _opts: Any,
    ) -> None:
        starts = [partial(part.start_sum, bucket=bucket) for part in parts]
        self._sender.start_first_half(schedule, starts, self._observer)

    def begin(self) -> None:
        """Start a step; drop what the last one, cut short, has launched."""
        self._sent.clear()
        self._rests.clear()
        self._exchange = self._norms = None

    def sum_up(self) -> list[int]:
        """Wait for all sums, and launch the exchange of norms and the second halves.

        Returns: The buckets in the order of their second halves.

        Raises:
            Exception: the watch's, with the bucket and the lane that failed.
        """
        squares = [0.0] * self._count
        rests: list[torch.Tensor] = []
        for index, bucket in self._sent.items():
            self._sender.wait(self._schedules[index])
            self._square(index, bucket, squares)
        for index in sorted(self._sent):
            bucket = self._sent[index]
            rests += [bucket[slice(*part.rest)] for part in self._parts[index]]
        row = torch.tensor(squares, dtype=torch.float64, device="cpu")
        row = torch.cat([row, *(rest.double() for rest in rests)])
        self._gathered = row.new_empty(self._ranks * row.numel())
        order = sorted(self._sent, reverse=True)
        place = self._schedules[order[0]]
        try:
            lane = self._sender.lane(place.slices[0])
            self._exchange = lane._allgather_base(self._gathered, row)  # noqa: SLF001
            for index in order:
                place = self._schedules[index]
                parts = self._parts[index]
                if parts:
                    bucket = self._sent[index]
                    starts = [partial(p.start_gather, bucket=bucket) for p in parts]
                    self._sender.start_second_half(place, starts, self._observer)
        except RuntimeError as exc:  # a closed lane
            raise self._sender.report(place, exc) from exc
        return order

    def _square(self, index: int, bucket: torch.Tensor, squares: list[float]) -> None:
        first = self._first[index]
        if not self._parts[index]:
            low, high, spans = self._own_spans[index]
            mine = bucket[low:high]
            for place, start, end in spans:
                squares[first + place] += sum_of_squares(mine[start:end])
        for part in self._parts[index]:
            share = part.add_up()
            for place, start, end in part.spans:
                squares[first + place] += sum_of_squares(share[start:end])

    def finish(self) -> None:
        """Wait for the exchange of norms."""
        if self._norms is not None or self._exchange is None:
            return
        self._sender.await_work(self._exchange, _EXCHANGE)
        self._exchange = None
        rows = self._gathered.view(self._ranks, -1)
        squares = rows[:, : self._count].sum(0)
        rest = rows[:, self._count :]
        added = rest[0].clone()
        for other in rest[1:]:
            added += other
        at = 0
        for index in sorted(self._sent):
            self._rests[index] = []
            for part in self._parts[index]:
                size = part.rest[1] - part.rest[0]
                values = added[at : at + size].to(self._sent[index].dtype)
                at += size
                self._rests[index].append(values)
                for place, start, end in part.rest_spans:
                    gradient = self._first[index] + place
                    squares[gradient] += sum_of_squares(values[start:end])
        self._norms = squares.sqrt_().tolist()

    def complete(self, index: int, bucket: torch.Tensor) -> None:
        """Fill in what no second half brings of a bucket, which is waited for."""
        self.finish()
        for part, values in zip(self._parts[index], self._rests[index], strict=True):
            if values.numel():
                bucket[slice(*part.rest)].copy_(values)

    def norm(self, member: BucketMember) -> float:
        """Return the 2-norm of a member's summed gradient; wait for the exchange."""
        self.finish()
        assert self._norms is not None  # noqa: S101
        return self._norms[self._first[member.bucket] + member.place]

    def wait_at_exit(self) -> None:
        """Wait for the exchange that other ranks need, too."""
        if self._exchange is not None:
            self._exchange.wait()
