"""Buckets that travel in a narrower type than their gradients'.

# Note [Halves on the wire, sums in full]
An all-reduce of halves rounds after every addition, that is once per rank, and a half
of float16 overflows where the sum does. Here every rank sends each other rank its piece
of the slice in the wire's type, adds what it receives in the gradients' own type,
divides, and sends the result to all: one rounding on each way, whatever the number of
ranks, and as many bytes as a ring sends. The Reducer has divided by the number of
ranks; that is undone before the first rounding and done again after the sum, so float16
overflows or loses small values only where the gradient or the mean itself does. All
ranks decode the same bytes, so gradients are the same on all of them, bit for bit.
Infinity and NaN stay what they are, as a GradScaler needs.

Both ways are Gloo all-to-alls. Measured on loopback, 4 Mi elements, float32 all-reduce
14 ms at 2 ranks, 41 ms at 4: Gloo's own all-reduce of float16 took 19 and 49 ms, of
bfloat16 11 and 34 ms; one all-to-all took 2 and 10 ms (an all-gather for the second way
7 and 13 ms), conversion and sum 2.5 ms and 5 ms.

# Note [A thread per lane]
The second way starts when the first has been summed, which needs Python between two
collectives. Callbacks of Gloo's threads would start second ways in an order that
differs between ranks. So a lane with narrow slices has one thread that runs its
collectives, wide ones too, one after another in the order of launch. The thread
belongs to the backend, not to a lane and resource: on Gloo all resources of a lane
share one backend, and whatever is started on it must start in one order on all ranks.

# Note [Error feedback]
With error feedback each rank adds to a gradient what rounding took from the last one,
and the rank that sums a piece does so with the mean. It is off unless asked for: the
residuals take as much memory as the gradients and a part more, and what float16 and
bfloat16 round off is what mixed precision training rounds off anyway. They belong to
the plan's buckets and begin at zero with a new plan. Where a value is not finite its
residual is zero, so that a skipped step leaves nothing behind.
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

from stretto.runtime.launch import Launched, value_or_raise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stretto.runtime.lanes import Need
    from stretto.runtime.routes import Part, Route


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
        # NCCL: on the current stream, so that it follows the conversion.
        self._opts.asyncOp = False

    @torch.no_grad()
    def __call__(self, values: torch.Tensor) -> None:
        """Puts the sum over ranks of ``values`` into it.

        ``values`` (1-d) were divided by the number of ranks; all ranks end with the
        same bits.

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
        """Rounds values, and gives what that took from them."""
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
        self._lane.alltoall_base(got, sent, [], [], self._opts).wait()


@final
class Scratch:
    """Two buffers per wire type, as large as the largest slice of a lane.

    Together as large as that slice, where the wire is half as wide.
    """

    def __init__(self) -> None:
        self._pairs: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def pair(
        self, elements: int, wire: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What to send from and to receive into."""
        kept = self._pairs.get(wire)
        if kept is None or kept[0].numel() < elements:
            both = torch.empty(2, elements, dtype=wire, device=device)
            kept = self._pairs[wire] = (both[0], both[1])
        return kept[0][:elements], kept[1][:elements]


@final
class Ticket:
    """What a lane's thread was given to do."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def get_future(self) -> Future[Any]:
        """Ends as the work does."""
        ended: Future[Any] = self._future.then(value_or_raise)
        return ended

    def wait(self) -> None:
        """Raises what the work raised."""
        self._future.wait()
        value_or_raise(self._future)


@final
class LaneThread:
    """Does what it is given, one thing after another, until its last user is gone."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(self._jobs,), name=name, daemon=True
        )
        weakref.finalize(self, self._jobs.put, None)
        thread.start()

    def start(self, job: Callable[..., None], *arguments: Any) -> Ticket:
        """Puts a piece of work behind those it was given before."""
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
            value = exc  # whoever waits raises it
        future.set_result(value)
        del item, job, arguments, future, value


@final
class NarrowLanes:
    """The lanes of a plan that carry narrow slices, and how those are reduced."""

    def __init__(
        self,
        routes: Sequence[Route],
        lanes: Mapping[Need, Any],
        *,
        error_feedback: bool,
        threads: bool,
    ) -> None:
        self._lanes = lanes
        self._error_feedback = error_feedback
        backends = {
            _key(lanes[part.lane, part.resource]): part.lane
            for route in routes
            if route.wire is not None and lanes
            for part in route.parts
        }
        self._scratches = {key: Scratch() for key in backends}
        self._threads = {
            key: LaneThread(f"stretto-lane-{lane}")
            for key, lane in backends.items()
            if threads
        }
        self._reduces: dict[tuple[int, int], NarrowReduce] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def reduce(self, route: Route, part: Part) -> Any:
        """A lane's ``allreduce`` for a slice, conversion included."""
        lane = self._lanes[part.lane, part.resource]
        thread = self._threads.get(_key(lane))
        if thread is None:
            return lane.allreduce
        if route.wire is None:
            return partial(_start_wide, thread, lane)
        return partial(_start_narrow, thread, self._narrow(route, part))

    def has_thread(self, part: Part) -> bool:
        """Whether what `reduce` gives is no collective of the lane itself."""
        return _key(self._lanes[part.lane, part.resource]) in self._threads

    def launcher_on_streams(self, route: Route, device: torch.device) -> Any:
        """Launches a narrow bucket on CUDA."""
        rows = []
        for part in route.parts:
            if part.lane not in self._streams:
                self._streams[part.lane] = torch.cuda.Stream(device)
            stream = self._streams[part.lane]
            rows.append((stream, self._narrow(route, part), part.start, part.end))
        return partial(_launch_on_streams, rows)

    def _narrow(self, route: Route, part: Part) -> NarrowReduce:
        # Kept, for residuals must outlive a change of observers.
        key = (route.index, part.start)
        if key not in self._reduces:
            assert route.wire is not None  # noqa: S101
            lane = self._lanes[part.lane, part.resource]
            self._reduces[key] = NarrowReduce(
                lane=lane,
                wire=getattr(torch, route.wire),
                scratch=self._scratches[_key(lane)],
                error_feedback=self._error_feedback,
            )
        return self._reduces[key]


def _key(lane: Any) -> int:
    """Identify a backend; `NarrowLanes` keeps it alive for as long as the key."""
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
    # Not yet run on a GPU. Each lane's stream waits for the computation that filled
    # the bucket and does conversion, collectives and sum in order; the first one then
    # waits for the others, and the future records it. Scratch belongs to one stream.
    computing = torch.cuda.current_stream(buffer.device)
    first = rows[0][0]
    for stream, reduce, start, end in rows:
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            reduce(buffer[start:end])
        # The caching allocator must not give the buffer away before the stream ends.
        buffer.record_stream(stream)
    future: Future[Any] = Future(devices=[buffer.device])
    with torch.cuda.stream(first):
        for stream, *_ in rows[1:]:
            first.wait_stream(stream)
        future.set_result(buffer)
    return Launched(future)
