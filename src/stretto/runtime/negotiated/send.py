"""Send ready requests on their lanes: decide units, pack, send, unpack."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
import torch.distributed as dist

from stretto.logs import get_logger
from stretto.runtime import backends
from stretto.runtime.lanes import LanePool
from stretto.runtime.negotiated import collectives, reductions
from stretto.runtime.negotiated.pending import Undelivered
from stretto.runtime.negotiated.requests import DEVICES, DTYPES
from stretto.runtime.negotiated.rounds import is_direct

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from stretto.errors import StrettoError
    from stretto.runtime.agreement import Ranks
    from stretto.runtime.negotiated.api import AbstractEngineObserver, EngineOptions
    from stretto.runtime.negotiated.pending import PendingRequest, RequestSlice
    from stretto.runtime.negotiated.requests import Request

_log = get_logger(__name__)


class Row(NamedTuple):
    """A tensor to reduce."""

    position: int
    """The caller's index of the tensor."""

    like: Hashable
    """Only tensors with an equal key share a unit."""

    elements: int

    element_bytes: int


class SlicePlan(NamedTuple):
    """Elements ``start`` to ``end`` of a tensor."""

    position: int

    start: int

    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The content of one all-reduce."""

    lane: int

    pieces: tuple[SlicePlan, ...]

    elements: int


@final
class LaneLoads:
    """Bytes assigned to each lane: the next unit goes to the lane with the fewest.

    The choice can't depend on which lane is free first, because that may differ between
    ranks: on one lane all ranks must send the same units in the same order.
    """

    def __init__(self, lanes: int) -> None:
        self._loads_bytes = [0] * lanes

    def take(self, size_bytes: int) -> int:
        """Return the lane for the next unit."""
        lane = self._loads_bytes.index(min(self._loads_bytes))
        self._loads_bytes[lane] += size_bytes
        return lane


def cut(rows: Sequence[Row], unit_bytes: int, loads: LaneLoads) -> list[Unit]:
    """Return units for tensors in this order, in the order in which they are complete.

    Tensors of one kind are joined while they fit into ``unit_bytes``; a larger one is
    cut into parts that differ by at most one element. Every element is in exactly one
    piece. Equal arguments give equal units, and every rank calls it with the same
    arguments.
    """
    units: list[Unit] = []
    open_pieces: dict[Hashable, list[SlicePlan]] = {}
    open_elements: dict[Hashable, int] = {}

    def close(like: Hashable, element_bytes: int) -> None:
        pieces = open_pieces.pop(like, None)
        if pieces:
            elements = open_elements.pop(like)
            lane = loads.take(elements * element_bytes)
            units.append(Unit(lane=lane, pieces=tuple(pieces), elements=elements))

    bytes_of = {}
    for row in rows:
        bytes_of[row.like] = row.element_bytes
        size_bytes = row.elements * row.element_bytes
        if size_bytes > unit_bytes:
            for piece in _parts(row, unit_bytes):
                elements = piece.end - piece.start
                lane = loads.take(elements * row.element_bytes)
                units.append(Unit(lane=lane, pieces=(piece,), elements=elements))
            continue
        already = open_elements.get(row.like, 0)
        if already and (already + row.elements) * row.element_bytes > unit_bytes:
            close(row.like, row.element_bytes)
            already = 0
        open_pieces.setdefault(row.like, []).append(
            SlicePlan(row.position, 0, row.elements)
        )
        open_elements[row.like] = already + row.elements
    for like in list(open_pieces):
        close(like, bytes_of[like])
    return units


def _parts(row: Row, unit_bytes: int) -> list[SlicePlan]:
    most = max(1, unit_bytes // row.element_bytes)
    number = -(-row.elements // most)
    share, more = divmod(row.elements, number)
    bounds = [i * share + min(i, more) for i in range(number + 1)]
    return [
        SlicePlan(row.position, start, end) for start, end in itertools.pairwise(bounds)
    ]


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
class GlooCompletionThreads:
    """Gloo lanes, each with its own thread."""

    def __init__(self, pool: LanePool, lanes: int) -> None:
        opened = pool.open([(i, None) for i in range(lanes)])
        self._lanes = [opened[i, None] for i in range(lanes)]
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._threads = []
        for number in range(lanes):
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
class NcclCompletion:
    """NCCL lanes, each with a stream for packing and unpacking.

    Not yet run on a GPU. The engine's one thread starts collectives in the agreed
    order, and nothing waits on the host: a stream waits for the communicator's stream,
    and an event on it shows when results are in place. A failed communicator is
    reported by its own watchdog.
    """

    def __init__(self, pool: LanePool, lanes: int, device: torch.device) -> None:
        opened = pool.open([(i, None) for i in range(lanes)])
        self._lanes = [opened[i, None] for i in range(lanes)]
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(lanes)]

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


@final
class Sender:
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
        self._completions: dict[str, GlooCompletionThreads | NcclCompletion] = {}
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

        self._on(request.device).send(lane, start, ended)

    def abort(self) -> None:
        """End every connection."""
        for pool in self._pools:
            pool.abort()

    def close(self) -> None:
        """End lanes and threads once sent requests have ended or were aborted."""
        for completions in self._completions.values():
            completions.close()
        for pool in self._pools:
            pool.close()
        self._completions.clear()

    def _on(self, device: str) -> GlooCompletionThreads | NcclCompletion:
        """Return the lanes for a type of device; open them when first needed."""
        if device not in self._completions:
            cuda = device == "cuda"
            where = (
                torch.device("cuda", torch.cuda.current_device())
                if cuda
                else torch.device("cpu")
            )
            pool = LanePool(
                self._ranks,
                serial=DEVICES.index(device),
                backend=backends.for_device(device).name,
                device=where,
            )
            self._pools.append(pool)
            lanes = self._options.lanes
            self._completions[device] = (
                NcclCompletion(pool, lanes, where)
                if cuda
                else GlooCompletionThreads(pool, lanes)
            )
        return self._completions[device]

    def _reduce(self, parts: Sequence[RequestSlice], device: str) -> None:
        rows = []
        for i, part in enumerate(parts):
            request = part.request
            if request.elements == 0:
                part.piece_ended(None)
                continue
            like = (request.dtype, request.op, request.prescale, request.postscale)
            rows.append(Row(i, like, request.elements, DTYPES[request.dtype]))
        units = cut(rows, self._options.unit_bytes, self._loads[device])
        for unit in units:
            for piece in unit.pieces:
                parts[piece.position].left += 1
                # Set here, because several lanes' threads may use one part at the same
                # time.
                parts[piece.position].target()
        for unit in units:
            self._send_unit(unit, parts, device)

    def _send_unit(
        self, unit: Unit, parts: Sequence[RequestSlice], device: str
    ) -> None:
        request = parts[unit.pieces[0].position].request
        buffer: list[torch.Tensor] = []
        began_s = perf_counter()
        size = self._ranks.size
        wire = reductions.wire_dtype(reductions.dtype_of(request))
        direct = device == "cpu" and is_direct(unit.elements * wire.itemsize, size)

        def begin(lane: Any) -> Any:
            buffer.append(_pack(unit, parts))
            if self._observer is not None:
                self._note(unit, parts, "pack", began_s)
            if direct:
                # buffer[0] is what every rank sends; the rows replace it. See Note
                # [Small collectives go directly].
                rows = buffer[0].new_empty(size, unit.elements)
                buffer.append(rows)
                return lane.alltoall_base(
                    rows.view(-1).view(torch.uint8),
                    buffer[0].repeat(size).view(torch.uint8),
                    [],
                    [],
                    dist.AllToAllOptions(),
                )
            options: Any = dist.AllreduceOptions()
            options.reduceOp = reductions.REDUCE_OPS[request.op]
            return lane.allreduce(buffer[:1], options)

        ended = partial(self._unit_ended, unit, parts, buffer, began_s)
        self._on(device).send(unit.lane, begin, ended)

    def _unit_ended(
        self,
        unit: Unit,
        parts: Sequence[RequestSlice],
        buffer: list[torch.Tensor],
        began_s: float,
        error: BaseException | None,
        events: tuple[Any, ...],
    ) -> None:
        told: StrettoError | None = None
        first = parts[unit.pieces[0].position].request
        more = len(unit.pieces) - 1
        place = f"{first.place} and {more} more" if more else first.place
        if error is not None:
            told = self._report(f"{place} on lane {unit.lane}", error)
        else:
            try:
                if len(buffer) > 1:
                    buffer[0].copy_(reductions.combine(buffer[1], first.op))
                reductions.finish(buffer[0], first, self._ranks.size)
                _unpack(unit, parts, buffer[0])
            except Exception as exc:  # noqa: BLE001
                told = Undelivered(place, exc)
            if self._observer is not None:
                self._note(unit, parts, "allreduce", began_s)
        for piece in unit.pieces:
            parts[piece.position].piece_ended(told, events)

    def _note(
        self, unit: Unit, parts: Sequence[RequestSlice], what: str, began_s: float
    ) -> None:
        observer, now_s = self._observer, perf_counter()
        if observer is None:
            return
        names = [parts[piece.position].request.name for piece in unit.pieces]
        for name in names:
            observer.span(name, what, began_s, now_s)
        if what != "pack":
            observer.span(f"lane{unit.lane}", ", ".join(names), began_s, now_s)


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


def _pack(unit: Unit, parts: Sequence[RequestSlice]) -> torch.Tensor:
    """Return the unit's values in one row, prescaled.

    A unit of one piece uses its output directly if that has the wire's dtype.
    """
    first = parts[unit.pieces[0].position]
    request = first.request
    for piece in unit.pieces:
        _await_input(parts[piece.position].event, parts[piece.position].tensor)
    dtype = reductions.dtype_of(request)
    wire = reductions.wire_dtype(dtype)
    target = first.target() if len(unit.pieces) == 1 and wire is dtype else None
    if target is not None:
        buffer = target[unit.pieces[0].start : unit.pieces[0].end]
    else:
        device = request.device
        buffer = torch.empty(unit.elements, dtype=wire, device=device)
    at = 0
    for piece in unit.pieces:
        part = parts[piece.position]
        segment = buffer[at : at + piece.end - piece.start]
        at += piece.end - piece.start
        source = part.source(piece.start, piece.end)
        if source is None:
            segment.zero_()
        elif source.data_ptr() != segment.data_ptr():
            segment.copy_(source)
    reductions.scale(buffer, request.prescale)
    return buffer


def _unpack(unit: Unit, parts: Sequence[RequestSlice], buffer: torch.Tensor) -> None:
    at = 0
    for piece in unit.pieces:
        segment = buffer[at : at + piece.end - piece.start]
        at += piece.end - piece.start
        target = parts[piece.position].target()
        if target is None:
            continue
        target = target[piece.start : piece.end]
        if target.is_cuda:
            # Not yet run on a GPU. A separate row must live until it is copied.
            target.record_stream(torch.cuda.current_stream())
        if target.data_ptr() != segment.data_ptr():
            target.copy_(segment)
