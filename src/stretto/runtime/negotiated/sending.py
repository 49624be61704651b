"""Send ready requests on their lanes: pack, send, unpack."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.runtime.lanes import LanePool
from stretto.runtime.negotiated import collectives, reductions
from stretto.runtime.negotiated.carriers import GlooCarriers, NcclCarriers
from stretto.runtime.negotiated.control import is_direct
from stretto.runtime.negotiated.requests import DTYPES
from stretto.runtime.negotiated.units import LaneLoads, Row, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.errors import StrettoError
    from stretto.runtime.agreement import Ranks
    from stretto.runtime.negotiated.jobs import Job, Part
    from stretto.runtime.negotiated.options import EngineOptions
    from stretto.runtime.negotiated.requests import Request
    from stretto.runtime.negotiated.spans import AbstractEngineObserver
    from stretto.runtime.negotiated.units import Unit

_DEVICES = ("cpu", "cuda")


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
        self._carriers: dict[str, GlooCarriers | NcclCarriers] = {}
        self._loads = {device: LaneLoads(options.lanes) for device in _DEVICES}

    def reduce(self, parts: Sequence[Part]) -> None:
        """Reduce tensors that are ready everywhere, in this order."""
        for device in _DEVICES:
            self._reduce([p for p in parts if p.request.device == device], device)

    def send(self, job: Job, by_rank: Sequence[Request]) -> None:
        """Execute a request of any other kind."""
        request, rank = job.request, self._ranks.rank
        begin, finish = collectives.prepare(job, by_rank, rank)
        if begin is None:
            result, splits = finish()
            job.handle.succeed(result, splits=splits)
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
            result, splits = finish()
            if self._observer is not None:
                now_s = perf_counter()
                self._observer.span(request.name, request.kind, began_s, now_s)
                self._observer.span(f"lane{lane}", request.name, began_s, now_s)
            job.handle.succeed(result, splits=splits, events=events)

        self._on(request.device).send(lane, start, ended)

    def abort(self) -> None:
        """End every connection."""
        for pool in self._pools:
            pool.abort()

    def close(self) -> None:
        """End lanes and threads once sent requests have ended or were aborted."""
        for carriers in self._carriers.values():
            carriers.close()
        for pool in self._pools:
            pool.close()
        self._carriers.clear()

    def _on(self, device: str) -> GlooCarriers | NcclCarriers:
        """Return the lanes for a type of device; open them when first needed."""
        if device not in self._carriers:
            cuda = device == "cuda"
            where = (
                torch.device("cuda", torch.cuda.current_device())
                if cuda
                else torch.device("cpu")
            )
            pool = LanePool(
                self._ranks,
                serial=_DEVICES.index(device),
                backend="nccl" if cuda else "gloo",
                device=where,
            )
            self._pools.append(pool)
            lanes = self._options.lanes
            self._carriers[device] = (
                NcclCarriers(pool, lanes, where) if cuda else GlooCarriers(pool, lanes)
            )
        return self._carriers[device]

    def _reduce(self, parts: Sequence[Part], device: str) -> None:
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

    def _send_unit(self, unit: Unit, parts: Sequence[Part], device: str) -> None:
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
        parts: Sequence[Part],
        buffer: list[torch.Tensor],
        began_s: float,
        error: BaseException | None,
        events: tuple[Any, ...],
    ) -> None:
        told: StrettoError | None = None
        if error is not None:
            first = parts[unit.pieces[0].position].request
            more = len(unit.pieces) - 1
            also = f" and {more} more" if more else ""
            told = self._report(f"{first.place}{also} on lane {unit.lane}", error)
        else:
            first = parts[unit.pieces[0].position].request
            if len(buffer) > 1:
                buffer[0].copy_(reductions.combine(buffer[1], first.op))
            reductions.finish(buffer[0], first, self._ranks.size)
            _unpack(unit, parts, buffer[0])
            if self._observer is not None:
                self._note(unit, parts, "allreduce", began_s)
        for piece in unit.pieces:
            parts[piece.position].piece_ended(told, events)

    def _note(
        self, unit: Unit, parts: Sequence[Part], what: str, began_s: float
    ) -> None:
        observer, now_s = self._observer, perf_counter()
        if observer is None:
            return
        names = [parts[piece.position].request.name for piece in unit.pieces]
        for name in names:
            observer.span(name, what, began_s, now_s)
        if what != "pack":
            observer.span(f"lane{unit.lane}", ", ".join(names), began_s, now_s)


def _await_input(event: Any, tensor: torch.Tensor | None) -> None:
    if event is None or tensor is None:
        return
    # Not yet run on a GPU. The lane's stream reads what the caller's stream wrote, and
    # the allocator must not reuse the memory before the lane's stream has read it.
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    tensor.record_stream(stream)


def _pack(unit: Unit, parts: Sequence[Part]) -> torch.Tensor:
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


def _unpack(unit: Unit, parts: Sequence[Part], buffer: torch.Tensor) -> None:
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
