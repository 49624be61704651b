"""Send ready requests on their lanes: form buckets, pack, send, unpack."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
import torch.distributed as dist

from stretto.logs import get_logger
from stretto.runtime import backends
from stretto.runtime.bucket_schedule import BucketSchedule, Slice
from stretto.runtime.lanes import LanePool
from stretto.runtime.negotiated import collectives, reductions
from stretto.runtime.negotiated.pending import Undelivered
from stretto.runtime.negotiated.requests import DEVICES, DTYPES, Kind
from stretto.runtime.negotiated.rounds import is_direct
from stretto.runtime.sender import BucketSender, PlainWatch
from stretto.schema import slice_bounds

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from stretto.errors import StrettoError
    from stretto.runtime.negotiated.api import AbstractEngineObserver, EngineOptions
    from stretto.runtime.negotiated.pending import PendingRequest, RequestSlice
    from stretto.runtime.negotiated.requests import Request
    from stretto.runtime.ranks import Ranks

_log = get_logger(__name__)


class Row(NamedTuple):
    """A tensor to reduce."""

    position: int
    """The caller's index of the tensor."""

    name: str

    like: Hashable
    """Only tensors with an equal key share a bucket."""

    elements: int

    element_bytes: int


@final
class LaneLoads:
    """Bytes assigned to each lane: the next slice goes to the lane with the fewest.

    The choice can't depend on which lane is free first, because that may differ between
    ranks: on one lane all ranks must send the same slices in the same order.
    """

    def __init__(self, lanes: int) -> None:
        self._loads_bytes = [0] * lanes

    def take(self, size_bytes: int) -> int:
        """Return the lane for the next slice."""
        lane = self._loads_bytes.index(min(self._loads_bytes))
        self._loads_bytes[lane] += size_bytes
        return lane


def cut(rows: Sequence[Row], unit_bytes: int, loads: LaneLoads) -> list[BucketSchedule]:
    """Return buckets of tensors in this order, in the order in which they are complete.

    Tensors of one kind are joined while they fit into ``unit_bytes``, and sent as one
    slice; a larger one is a bucket of its own, in slices that differ by at most one
    element. Every element is in exactly one slice. Equal arguments give equal buckets,
    and every rank calls it with the same arguments.
    """
    found: list[BucketSchedule] = []
    waiting: dict[Hashable, list[Row]] = {}
    elements: dict[Hashable, int] = {}

    def add(members: Sequence[Row], bounds: Sequence[tuple[int, int]]) -> None:
        found.append(_bucket(len(found), members, bounds, loads))

    def close(like: Hashable) -> None:
        members = waiting.pop(like, None)
        if members:
            add(members, [(0, elements.pop(like))])

    for row in rows:
        if row.elements * row.element_bytes > unit_bytes:
            most = max(1, unit_bytes // row.element_bytes)
            add([row], slice_bounds(row.elements, -(-row.elements // most)))
            continue
        already = elements.get(row.like, 0)
        if already and (already + row.elements) * row.element_bytes > unit_bytes:
            close(row.like)
            already = 0
        waiting.setdefault(row.like, []).append(row)
        elements[row.like] = already + row.elements
    for like in list(waiting):
        close(like)
    return found


def row_of(position: int, request: Request) -> Row:
    """Return the row of an all-reduce; ``position`` is the caller's index."""
    like = (request.dtype, request.op, request.prescale, request.postscale)
    element_bytes = DTYPES[request.dtype]
    return Row(position, request.name, like, request.elements, element_bytes)


def _bucket(
    index: int,
    rows: Sequence[Row],
    bounds: Sequence[tuple[int, int]],
    loads: LaneLoads,
) -> BucketSchedule:
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return BucketSchedule(
        index=index,
        tensors=tuple(row.name for row in rows),
        parameters=tuple(row.position for row in rows),
        elements=bounds[-1][1],
        slices=tuple(
            Slice(
                lane=loads.take((end - start) * rows[0].element_bytes),
                resource=None,
                start=start,
                end=end,
            )
            for start, end in bounds
        ),
        label=f"{Kind.ALLREDUCE} {rows[0].name!r}{more}",
    )


Begin = Callable[[Any], Any]
"""Starts a collective on a lane and returns its work."""

Finish = Callable[[BaseException | None, tuple[Any, ...]], None]
"""Called when a collective has ended, with its error and, on a GPU, with the events
that show when results are in place."""


# Note [Who waits for a lane]
# Each Gloo lane has a thread of ours that sleeps while it waits for the lane's
# collectives, and copies results out. Callbacks on Gloo's own worker threads would need
# no extra thread, but a backend joins its workers when it is released. If one thread
# holds Python's lock and the other needs it, both deadlock.


@final
class CompletionThreads:
    """Lanes whose works block the host, each with its own thread."""

    def __init__(self, lanes: Sequence[Any]) -> None:
        self._lanes = list(lanes)
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._threads = []
        for number in range(len(lanes)):
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_wait_in_turn,
                args=(jobs,),
                name=f"stretto-lane{number}",
                daemon=True,
            )
            thread.start()
            self._queues.append(jobs)
            self._threads.append(thread)

    def send(self, lane: int, begin: Begin, finish: Finish) -> None:
        """Start a collective now; ``finish`` is called when it has ended."""
        try:
            work = begin(self._lanes[lane])
        except Exception as exc:  # noqa: BLE001
            finish(exc, ())
            return
        self._queues[lane].put((work, finish))

    def close(self) -> None:
        """End the threads once their collectives have ended or were aborted."""
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._lanes.clear()


def _wait_in_turn(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        work, finish = job
        error: BaseException | None = None
        try:
            work.wait()
        except Exception as exc:  # noqa: BLE001
            error = exc
        try:
            finish(error, ())
        except Exception as exc:  # noqa: BLE001
            # Without this thread later requests would never end. `finish` handles what
            # a user can cause, and has not failed its handles if it raises.
            _log.exception("a collective ended, but its result was not delivered")
            with contextlib.suppress(Exception):
                finish(exc, ())
        del job, work, finish  # do not hold a tensor while sleeping


@final
class CompletionStreams:
    """Lanes whose works order streams, each with a stream to pack and unpack.

    Not yet run on a GPU. The engine's one thread starts collectives in the agreed
    order, and nothing waits on the host: a stream waits for the communicator's stream,
    and an event on it shows when results are in place. A failed communicator is
    reported by its own watchdog.
    """

    def __init__(self, lanes: Sequence[Any], device: torch.device) -> None:
        self._lanes = list(lanes)
        self._streams = [torch.cuda.Stream(device) for _ in lanes]

    def send(self, lane: int, begin: Begin, finish: Finish) -> None:
        """Start a collective now; ``finish`` queues the work that follows it."""
        with torch.cuda.stream(self._streams[lane]):
            event = torch.cuda.Event()
            try:
                begin(self._lanes[lane]).wait()
            except RuntimeError as exc:
                finish(exc, ())
                return
            finish(None, (event,))
            # Record after the work queued by finish: handles ask for the event only
            # later.
            event.record()

    def close(self) -> None:
        """Wait for the sent collectives and release the lanes."""
        for stream in self._streams:
            stream.synchronize()
        self._lanes.clear()


class _DeviceLanes(NamedTuple):
    """The lanes for one type of device."""

    sender: BucketSender

    completion: CompletionThreads | CompletionStreams


@final
class RequestSender:
    """Sends ready requests, in the given order, over the engine's lanes.

    Call it from one thread, with the same requests in the same order on every rank. A
    lane's thread ends each part or job.
    """

    def __init__(
        self,
        ranks: Ranks,
        options: EngineOptions,
        report: Callable[[str, BaseException], StrettoError],
        observer: AbstractEngineObserver | None,
    ) -> None:
        self._ranks = ranks
        self._options = options
        self._report = report
        self._observer = observer
        self._pools: list[LanePool] = []
        self._lanes: dict[str, _DeviceLanes] = {}
        self._loads = {device: LaneLoads(options.lanes) for device in DEVICES}

    def reduce(self, parts: Sequence[RequestSlice]) -> None:
        """Reduce tensors that are ready everywhere, in this order."""
        for device in DEVICES:
            self._reduce([p for p in parts if p.request.device == device], device)

    def send(self, job: PendingRequest, by_rank: Sequence[Request]) -> None:
        """Execute a request of any other kind."""
        request, rank = job.request, self._ranks.rank
        begin, finish = collectives.prepare(job, by_rank, rank)
        if begin is None:
            finished = _finished(job, finish)
            if finished is not None:
                job.handle.succeed(finished[0], splits=finished[1])
            return
        lane = self._loads[request.device].take(request.bytes or 1)
        began_s = perf_counter()

        def start(backend: Any) -> Any:
            _await_input(job.event, job.tensor)
            return begin(backend)

        def ended(error: BaseException | None, events: tuple[Any, ...]) -> None:
            if error is not None:
                job.handle.fail(self._report(f"{request.place} on lane {lane}", error))
                return
            finished = _finished(job, finish)
            if finished is None:
                return
            if self._observer is not None:
                now_s = perf_counter()
                self._observer.span(request.name, request.kind, began_s, now_s)
                self._observer.span(f"lane{lane}", request.name, began_s, now_s)
            result, splits = finished
            job.handle.succeed(result, splits=splits, events=events)

        self._on(request.device).completion.send(lane, start, ended)

    def abort(self) -> None:
        """End every connection."""
        for pool in self._pools:
            pool.abort()

    def close(self) -> None:
        """End lanes and threads once sent requests have ended or were aborted."""
        for lanes in self._lanes.values():
            lanes.completion.close()
        self._lanes.clear()
        for pool in self._pools:
            pool.close()

    def _on(self, device: str) -> _DeviceLanes:
        """Return the lanes for a type of device; open them when first needed."""
        if device not in self._lanes:
            self._lanes[device] = self._open(device)
        return self._lanes[device]

    def _open(self, device: str) -> _DeviceLanes:
        kind = backends.for_device(device)
        where = (
            torch.device("cuda", torch.cuda.current_device())
            if device == "cuda"
            else torch.device("cpu")
        )
        pool = LanePool(
            self._ranks,
            serial=DEVICES.index(device),
            backend=kind.name,
            device=where,
        )
        self._pools.append(pool)
        opened = pool.open([(i, None) for i in range(self._options.lanes)])
        lanes = list(opened.values())
        return _DeviceLanes(
            BucketSender(opened, PlainWatch(self._report)),
            CompletionThreads(lanes)
            if kind.completes_on_host
            else CompletionStreams(lanes, where),
        )

    def _reduce(self, parts: Sequence[RequestSlice], device: str) -> None:
        rows = []
        for i, part in enumerate(parts):
            request = part.request
            if request.elements == 0:
                part.piece_ended(None)
                continue
            rows.append(row_of(i, request))
        buckets = cut(rows, self._options.unit_bytes, self._loads[device])
        for bucket in buckets:
            for position in bucket.parameters:
                parts[position].left += len(bucket.slices)
                # Set here, because several lanes' threads may use one part at the same
                # time.
                parts[position].target()
        for bucket in buckets:
            members = [parts[position] for position in bucket.parameters]
            for piece in bucket.slices:
                self._send_slice(bucket, piece, members, self._on(device))

    def _send_slice(
        self,
        bucket: BucketSchedule,
        piece: Slice,
        members: Sequence[RequestSlice],
        lanes: _DeviceLanes,
    ) -> None:
        request = members[0].request
        buffer: list[torch.Tensor] = []
        began_s = perf_counter()
        elements, size = piece.end - piece.start, self._ranks.size
        wire = reductions.wire_dtype(reductions.dtype_of(request))
        small = is_direct(elements * wire.itemsize, size)
        direct = request.device == "cpu" and small

        def begin(lane: Any) -> Any:
            buffer.append(_pack(piece, members))
            if self._observer is not None:
                self._note(piece, members, "pack", began_s)
            if direct:
                # buffer[0] is what every rank sends; the rows replace it. See Note
                # [Small collectives go directly].
                rows = buffer[0].new_empty(size, elements)
                buffer.append(rows)
                return lane.alltoall_base(
                    rows.view(-1).view(torch.uint8),
                    buffer[0].repeat(size).view(torch.uint8),
                    [],
                    [],
                    dist.AllToAllOptions(),
                )
            reduce = lanes.sender.reduce(bucket, piece)
            return reduce(buffer[:1], reductions.options(request))

        def ended(error: BaseException | None, events: tuple[Any, ...]) -> None:
            told: StrettoError | None
            if error is not None:
                told = self._report(bucket.place_on(piece), error)
            else:
                told = self._deliver(bucket, piece, members, buffer, began_s)
            for member in members:
                member.piece_ended(told, events)

        lanes.completion.send(piece.lane, begin, ended)

    def _deliver(
        self,
        bucket: BucketSchedule,
        piece: Slice,
        members: Sequence[RequestSlice],
        buffer: list[torch.Tensor],
        began_s: float,
    ) -> Undelivered | None:
        """Put a slice's result into the members' outputs; return why it failed."""
        request = members[0].request
        error = None
        try:
            if len(buffer) > 1:
                buffer[0].copy_(reductions.combine(buffer[1], request.op))
            reductions.finish(buffer[0], request, self._ranks.size)
            _unpack(piece, members, buffer[0])
        except Exception as exc:  # noqa: BLE001
            error = Undelivered(bucket.name, exc)
        if self._observer is not None:
            self._note(piece, members, "allreduce", began_s)
        return error

    def _note(
        self, piece: Slice, members: Sequence[RequestSlice], what: str, began_s: float
    ) -> None:
        observer, now_s = self._observer, perf_counter()
        if observer is None:
            return
        names = [member.request.name for member in members]
        for name in names:
            observer.span(name, what, began_s, now_s)
        if what != "pack":
            observer.span(f"lane{piece.lane}", ", ".join(names), began_s, now_s)


def _finished(
    job: PendingRequest, finish: Callable[[], collectives.Finished]
) -> collectives.Finished | None:
    """Return the result of a job whose data has arrived, or fail its handle."""
    try:
        return finish()
    except Exception as exc:  # noqa: BLE001
        job.handle.fail(Undelivered(job.request.place, exc))
        return None


def _await_input(event: Any, tensor: torch.Tensor | None) -> None:
    if event is None or tensor is None:
        return
    # Not yet run on a GPU. The lane's stream reads what the caller's stream wrote, and
    # the allocator must not reuse the memory before the lane's stream has read it.
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    tensor.record_stream(stream)


def _extents(
    piece: Slice, members: Sequence[RequestSlice]
) -> Iterator[tuple[RequestSlice, int, int]]:
    """Return the elements of each member that a slice holds, in its order.

    A bucket of several members has one slice, with all of each.
    """
    if len(members) == 1:
        yield members[0], piece.start, piece.end
        return
    for member in members:
        yield member, 0, member.request.elements


def _pack(piece: Slice, members: Sequence[RequestSlice]) -> torch.Tensor:
    """Return a slice's values in one row, prescaled.

    A slice of one member uses its output directly if that has the wire's dtype.
    """
    first = members[0]
    request = first.request
    for member in members:
        _await_input(member.event, member.tensor)
    dtype = reductions.dtype_of(request)
    wire = reductions.wire_dtype(dtype)
    target = first.target() if len(members) == 1 and wire is dtype else None
    if target is not None:
        buffer = target[piece.start : piece.end]
    else:
        elements, device = piece.end - piece.start, request.device
        buffer = torch.empty(elements, dtype=wire, device=device)
    at = 0
    for member, start, end in _extents(piece, members):
        segment = buffer[at : at + end - start]
        at += end - start
        source = member.source(start, end)
        if source is None:
            segment.zero_()
        elif source.data_ptr() != segment.data_ptr():
            segment.copy_(source)
    reductions.scale(buffer, request.prescale)
    return buffer


def _unpack(
    piece: Slice, members: Sequence[RequestSlice], buffer: torch.Tensor
) -> None:
    at = 0
    for member, start, end in _extents(piece, members):
        segment = buffer[at : at + end - start]
        at += end - start
        target = member.target()
        if target is None:
            continue
        target = target[start:end]
        if target.is_cuda:
            # Not yet run on a GPU. A separate row must live until it is copied.
            target.record_stream(torch.cuda.current_stream())
        if target.data_ptr() != segment.data_ptr():
            target.copy_(segment)
