"""Send ready requests on their lanes: pack, send, unpack."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
import torch.distributed as dist

from stretto.errors import SpecError
from stretto.logs import get_logger
from stretto.runtime import backends
from stretto.runtime.lanes import LanePool
from stretto.runtime.negotiated import collectives, reductions
from stretto.runtime.negotiated.buckets import LaneLoads, form_buckets, row_of
from stretto.runtime.negotiated.completion import CompletionStreams, CompletionThreads
from stretto.runtime.negotiated.pending import Undelivered
from stretto.runtime.negotiated.requests import DEVICES
from stretto.runtime.negotiated.rounds import is_direct
from stretto.runtime.sender import BucketSender, PlainWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stretto.errors import StrettoError
    from stretto.runtime.bucket_schedule import BucketSchedule, Slice
    from stretto.runtime.negotiated.api import AbstractEngineObserver, EngineOptions
    from stretto.runtime.negotiated.completion import Mark
    from stretto.runtime.negotiated.pending import PendingRequest, ReducedTensor
    from stretto.runtime.negotiated.requests import Request
    from stretto.runtime.ranks import Ranks

_log = get_logger(__name__)


class _DeviceLanes(NamedTuple):
    """The lanes for one type of device."""

    sender: BucketSender

    completion: CompletionThreads | CompletionStreams


@final
class RequestSender:
    """Sends ready requests, in the given order, over the engine's lanes.

    Call it from one thread, with the same requests in the same order on every rank. A
    lane's thread handles the end of each collective.
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
        self._cuda: torch.device | None = None

    def reduce(self, tensors: Sequence[ReducedTensor]) -> None:
        """Reduce tensors that are ready everywhere, in this order."""
        for device in DEVICES:
            self._reduce([t for t in tensors if t.request.device == device], device)

    def send(self, job: PendingRequest, by_rank: Sequence[Request]) -> None:
        """Execute a request of any other kind."""
        request, rank = job.request, self._ranks.rank
        begin: Callable[[Any], Any] | None = None
        finish: Callable[[], collectives.Finished]
        if request.device == "cpu":
            begin, finish = collectives.prepare(job, by_rank, rank)
            if begin is None:
                finished = _finished(job, finish)
                if finished is not None:
                    job.handle.succeed(finished[0], splits=finished[1])
                return
        lane = self._loads[request.device].take(request.bytes or 1)
        began_s = perf_counter()

        def start(backend: Any) -> Any:
            nonlocal begin, finish
            if request.device != "cpu":
                _await_input(job.event, job.tensor)
                begin, finish = collectives.prepare(job, by_rank, rank)
            return None if begin is None else begin(backend)

        def ended(error: BaseException | None, mark: Mark) -> None:
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
            job.handle.succeed(result, splits=splits, events=mark())

        self._on(request.device).completion.send(lane, start, ended)

    def use_device(self, place: str, device: torch.device) -> None:
        """Require that a GPU is the one that this rank uses, the first that it used.

        Raises:
            SpecError: it is another one.
        """
        if self._cuda is None:
            self._cuda = device
        elif device != self._cuda:
            raise SpecError(
                f"{place} is on {device}, but this rank's lanes are on {self._cuda}, "
                "and a rank uses one GPU. Move the tensor there, or start a rank for "
                "each GPU."
            )

    def note_current_device(self) -> None:
        """Use the caller's current GPU if this rank has used none so far.

        A rank that has joined sends zeros there. (A new thread's own is always 0.)
        """
        if self._cuda is None and torch.cuda.is_initialized():
            self._cuda = torch.device("cuda", torch.cuda.current_device())

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
        where = torch.device("cpu")
        if device == "cuda":
            where = self._cuda or torch.device("cuda", torch.cuda.current_device())
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
            CompletionThreads(lanes, self._ranks.is_over)
            if kind.completes_on_host
            else CompletionStreams(lanes, where),
        )

    def _reduce(self, tensors: Sequence[ReducedTensor], device: str) -> None:
        rows = []
        for i, tensor in enumerate(tensors):
            request = tensor.request
            if request.elements == 0:
                tensor.slice_ended(None)
                continue
            rows.append(row_of(i, request))
        buckets = form_buckets(rows, self._options.unit_bytes, self._loads[device])
        for bucket in buckets:
            for position in bucket.parameters:
                tensors[position].left += len(bucket.slices)
                # Set here, because several lanes' threads may use one tensor at once.
                tensors[position].target()
        for bucket in buckets:
            members = [tensors[position] for position in bucket.parameters]
            for part in bucket.slices:
                self._send_slice(bucket, part, members, self._on(device))

    def _send_slice(
        self,
        bucket: BucketSchedule,
        part: Slice,
        members: Sequence[ReducedTensor],
        lanes: _DeviceLanes,
    ) -> None:
        request = members[0].request
        buffer: list[torch.Tensor] = []
        began_s = perf_counter()
        elements, size = part.end - part.start, self._ranks.size
        wire = reductions.wire_dtype(reductions.dtype_of(request))
        small = is_direct(elements * wire.itemsize, size)
        direct = request.device == "cpu" and small

        def begin(lane: Any) -> Any:
            buffer.append(_pack(part, members))
            if self._observer is not None:
                self._note(part, members, "pack", began_s)
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
            reduce = lanes.sender.reduce(bucket, part)
            return reduce(buffer[:1], reductions.options(request))

        def ended(error: BaseException | None, mark: Mark) -> None:
            reported: StrettoError | None
            if error is not None:
                reported = self._report(bucket.place_on(part), error)
            else:
                reported = self._deliver(bucket, part, members, buffer, began_s)
            events = mark()
            for member in members:
                member.slice_ended(reported, events)

        lanes.completion.send(part.lane, begin, ended)

    def _deliver(
        self,
        bucket: BucketSchedule,
        part: Slice,
        members: Sequence[ReducedTensor],
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
            _unpack(part, members, buffer[0])
        except Exception as exc:  # noqa: BLE001
            error = Undelivered(bucket.name, exc)
        if self._observer is not None:
            self._note(part, members, "allreduce", began_s)
        return error

    def _note(
        self, part: Slice, members: Sequence[ReducedTensor], what: str, began_s: float
    ) -> None:
        observer, now_s = self._observer, perf_counter()
        if observer is None:
            return
        names = [member.request.name for member in members]
        for name in names:
            observer.span(name, what, began_s, now_s)
        if what != "pack":
            observer.span(f"lane{part.lane}", ", ".join(names), began_s, now_s)


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
    # The lane's stream reads what the caller's stream wrote, and the allocator must not
    # reuse the memory before the lane's stream has read it.
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    tensor.record_stream(stream)


def _extents(
    part: Slice, members: Sequence[ReducedTensor]
) -> Iterator[tuple[ReducedTensor, int, int]]:
    """Return the elements of each member that a slice holds, in its order.

    A bucket of several members has one slice, with all of each.
    """
    if len(members) == 1:
        yield members[0], part.start, part.end
        return
    for member in members:
        yield member, 0, member.request.elements


def _pack(part: Slice, members: Sequence[ReducedTensor]) -> torch.Tensor:
    """Return a slice's values in one row, prescaled.

    A slice of one member uses its output directly if that has the wire's dtype.
    """
    first = members[0]
    request = first.request
    for member in members:
        _await_input(member.event, member.tensor)
        member.await_memory()
    dtype = reductions.dtype_of(request)
    wire = reductions.wire_dtype(dtype)
    target = first.target() if len(members) == 1 and wire is dtype else None
    if target is not None:
        buffer = target[part.start : part.end]
    else:
        elements, device = part.end - part.start, request.device
        buffer = torch.empty(elements, dtype=wire, device=device)
    at = 0
    for member, start, end in _extents(part, members):
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
    part: Slice, members: Sequence[ReducedTensor], buffer: torch.Tensor
) -> None:
    at = 0
    for member, start, end in _extents(part, members):
        segment = buffer[at : at + end - start]
        at += end - start
        target = member.target()
        if target is None:
            continue
        target = target[start:end]
        if target.is_cuda:
            # A separate row must live until it is copied.
            target.record_stream(torch.cuda.current_stream())
        if target.data_ptr() != segment.data_ptr():
            target.copy_(segment)
