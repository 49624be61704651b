"""Reduce buckets in a narrower type than their gradients'.

# Note [Halves on the wire, sums in full]
An all-reduce of halves rounds after every addition, that is once per rank, and a
float16 overflows where the sum does. Here every rank sends each other rank its piece of
the slice in the wire's type, adds the received pieces in the gradients' own type,
divides, and sends the result to all ranks. That rounds once in each direction, for any
number of ranks, and sends as many bytes as a ring. The Reducer has already divided by
the number of ranks; that is undone before the first rounding and repeated after the
sum, so float16 overflows or loses small values only where the gradient or the mean
itself does. All ranks decode the same bytes, so gradients are the same on all of them,
bit for bit. Infinity and NaN are preserved, as a GradScaler requires.

Both directions are Gloo all-to-alls. Measured on loopback, 4 Mi elements, float32
all-reduce 14 ms at 2 ranks, 41 ms at 4: Gloo's own all-reduce of float16 took 19 and 49
ms, of bfloat16 11 and 34 ms; one all-to-all took 2 and 10 ms (an all-gather for the
second direction 7 and 13 ms), conversion and sum 2.5 ms and 5 ms.

# Note [A thread per lane]
The second direction starts after the sum, which needs Python between two collectives.
Callbacks on Gloo's threads would start second directions in an order that differs
between ranks. So a lane with narrow slices has one thread that runs its collectives,
wide ones included, one after another in launch order. The thread belongs to the
backend, not to a lane and resource: on Gloo all resources of a lane share one backend,
and collectives on it must start in the same order on all ranks.

# Note [Error feedback]
With error feedback each rank adds the last rounding error to a gradient, and the rank
that sums a piece does the same with the mean. It is off by default: the residuals take
as much memory as the gradients plus a share, and mixed precision training rounds off
what float16 and bfloat16 round off anyway. Residuals belong to the plan's buckets and
start at zero with a new plan. Where a value is not finite its residual is zero, so a
skipped step leaves no residual.
"""

from __future__ import annotations

import queue
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.futures import Future

from stretto.runtime.bucket_schedule import lane_of
from stretto.runtime.launch import Launched, Pending, then, value_or_raise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from stretto.runtime.backends.base import Need
    from stretto.runtime.bucket_schedule import BucketSchedule, Slice


@final
class NarrowReduce:
    """Average one slice over all ranks, in a narrower type on the wire."""

    def __init__(
        self, *, lane: Any, wire: torch.dtype, scratch: Scratch, error_feedback: bool
    ) -> None:
        self._lane = lane
        self._wire = wire
        self._ranks: int = lane.size()
        self._rank: int = lane.rank()
        self._scratch = scratch
        self._error_feedback = error_feedback
        self._sent_residual: torch.Tensor | None = None
        self._mean_residual: torch.Tensor | None = None
        self._opts = dist.AllToAllOptions()
        # NCCL: run on the current stream, after the conversion.
        self._opts.asyncOp = False

    @torch.no_grad()
    def __call__(self, values: torch.Tensor) -> None:
        """Replace ``values`` by their sum over ranks.

        ``values`` (1-d) were divided by the number of ranks; all ranks get the same
        bits.

        Raises:
            RuntimeError: the transport failed.
        """
        ranks, size = self._ranks, values.numel()
        if size == 0:
            return
        each = -(-size // ranks)
        sent, got = self._scratch.pair(each * ranks, self._wire, values.device)
        values.mul_(ranks)
        self._sent_residual = self._narrow(values, sent[:size], self._sent_residual)
        sent[size:].zero_()
        self._exchange(got, sent)
        start = min(size, self._rank * each)
        mine = values[start : start + each]
        pieces = got.view(ranks, each)[:, : mine.numel()]
        mine.copy_(pieces[0])
        for piece in pieces[1:]:
            mine.add_(piece)
        mine.div_(ranks)
        copies = sent.view(ranks, each)
        copies.zero_()
        narrowed = copies[0, : mine.numel()]
        self._mean_residual = self._narrow(mine, narrowed, self._mean_residual)
        copies[1:].copy_(copies[0])
        self._exchange(got, sent)
        values.copy_(got[:size])

    def _narrow(
        self, values: torch.Tensor, into: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Round values into ``into``; return the rounding error."""
        if not self._error_feedback:
            into.copy_(values)
            return None
        if residual is None:
            residual = torch.zeros_like(values)
        values.add_(residual)
        into.copy_(values)
        torch.sub(values, into, out=residual)
        return residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _exchange(self, got: torch.Tensor, sent: torch.Tensor) -> None:
        work = self._lane.alltoall_base(got, sent, [], [], self._opts)
        if work is not None:  # NCCL gives none where the stream's order is enough
            work.wait()


@final
class Scratch:
    """Two buffers per wire type, each as large as the largest slice of a lane.

    Together they are as large as that slice if the wire is half as wide.
    """

    def __init__(self) -> None:
        self._pairs: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def pair(
        self, elements: int, wire: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers to send from and to receive into."""
        kept = self._pairs.get(wire)
        if kept is None or kept[0].numel() < elements:
            both = torch.empty(2, elements, dtype=wire, device=device)
            kept = self._pairs[wire] = (both[0], both[1])
        return kept[0][:elements], kept[1][:elements]


@final
class Ticket:
    """A handle for work queued on a lane's thread."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def get_future(self) -> Future[Any]:
        """Return a future that ends with the work."""
        return then(self._future, value_or_raise)

    def is_completed(self) -> bool:
        """Return whether the work has ended."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the work, and raise its exception if it failed.

        Raises:
            RuntimeError: the work failed, or the time is over.
        """
        Pending(self._future).wait(timeout)
        value_or_raise(self._future)


@final
class LaneThread:
    """Runs queued work in order until its last user is gone."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(self._jobs,), name=name, daemon=True
        )
        weakref.finalize(self, self._jobs.put, None)
        thread.start()

    def start(self, job: Callable[..., None], *arguments: Any) -> Ticket:
        """Queue a piece of work."""
        future: Future[Any] = Future()
        self._jobs.put((job, arguments, future))
        return Ticket(future)


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (item := jobs.get()) is not None:
        job, arguments, future = item
        value: Exception | None = None
        try:
            job(*arguments)
        except Exception as exc:  # noqa: BLE001
            value = exc  # the waiting caller raises it
        future.set_result(value)
        del item, job, arguments, future, value


@final
class NarrowLanes:
    """The lanes of a plan that send narrow slices, and their reductions."""

    def __init__(
        self,
        schedules: Sequence[BucketSchedule],
        lanes: Mapping[Need, Any],
        *,
        device: torch.device,
        error_feedback: bool,
        threads: bool,
    ) -> None:
        self._lanes = lanes
        self._device = device
        self._error_feedback = error_feedback
        backends = {
            _key(lanes[part.lane, part.resource]): part.lane
            for schedule in schedules
            if schedule.wire is not None and lanes
            for part in schedule.slices
        }
        self._scratches = {key: Scratch() for key in backends}
        self._threads = {
            key: LaneThread(f"stretto-lane-{lane}")
            for key, lane in backends.items()
            if threads
        }
        self._reduces: dict[tuple[int, int], NarrowReduce] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def reduce(self, schedule: BucketSchedule, part: Slice) -> Any:
        """Return a lane's ``allreduce`` for a slice, including conversion."""
        thread = self._threads.get(_key(self._lanes[part.lane, part.resource]))
        lane = lane_of(self._lanes, part)
        if thread is None:
            return lane.allreduce
        if schedule.wire is None:
            return partial(_start_wide, thread, lane)
        return partial(_start_narrow, thread, self._narrow(schedule, part))

    def has_thread(self, part: Slice) -> bool:
        """Return whether `reduce` runs a slice on a thread instead of the lane."""
        return _key(self._lanes[part.lane, part.resource]) in self._threads

    def launcher_on_streams(
        self, schedule: BucketSchedule
    ) -> Callable[[torch.Tensor, Any], dist.Work]:
        """Return a launcher of a narrow bucket on CUDA."""
        rows = []
        for part in schedule.slices:
            if part.lane not in self._streams:
                self._streams[part.lane] = torch.cuda.Stream(self._device)
            stream = self._streams[part.lane]
            rows.append((stream, self._narrow(schedule, part), part.start, part.end))
        return partial(_launch_on_streams, rows)

    def _narrow(self, schedule: BucketSchedule, part: Slice) -> NarrowReduce:
        # Cached, because residuals must outlive a change of observers.
        key = (schedule.index, part.start)
        if key not in self._reduces:
            assert schedule.wire is not None  # noqa: S101
            own = _key(self._lanes[part.lane, part.resource])
            self._reduces[key] = NarrowReduce(
                lane=lane_of(self._lanes, part),
                wire=getattr(torch, schedule.wire),
                scratch=self._scratches[own],
                error_feedback=self._error_feedback,
            )
        return self._reduces[key]


def _key(lane: Any) -> int:
    """Identify a backend; `NarrowLanes` keeps it alive as long as the key."""
    return id(lane)


def _start_narrow(
    thread: LaneThread, reduce: NarrowReduce, tensors: list[torch.Tensor], _opts: Any
) -> Ticket:
    return thread.start(reduce, tensors[0])


def _start_wide(
    thread: LaneThread, lane: Any, tensors: list[torch.Tensor], opts: Any
) -> Ticket:
    return thread.start(_reduce_wide, lane, tensors, opts)


def _reduce_wide(lane: Any, tensors: list[torch.Tensor], opts: Any) -> None:
    lane.allreduce(tensors, opts).wait()


def _launch_on_streams(
    rows: Sequence[tuple[torch.cuda.Stream, NarrowReduce, int, int]],
    buffer: torch.Tensor,
    _opts: Any,
) -> dist.Work:
    # Not yet run on a GPU to its end. Each lane's stream waits for the computation that
    # filled the bucket and runs conversion, collectives and sum in order. The first
    # stream then waits for the others, and the future records it. Each stream has its
    # own scratch buffers.
    computing = torch.cuda.current_stream(buffer.device)
    first = rows[0][0]
    for stream, reduce, start, end in rows:
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            reduce(buffer[start:end])
        # The caching allocator must not reuse the buffer before the stream has ended.
        buffer.record_stream(stream)
    future: Future[Any] = Future(devices=[buffer.device])
    with torch.cuda.stream(first):
        for stream, *_ in rows[1:]:
            first.wait_stream(stream)
        future.set_result(buffer)
    return Launched(future)
