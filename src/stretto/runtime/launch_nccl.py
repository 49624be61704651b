"""Launch buckets on NCCL lanes. Not yet run on a GPU.

Nothing here waits for the device: streams wait for works, and the Reducer's future has
the device, so that its own wait orders streams too. (A future that `collect_all`
combines from several has no device; waiting for it would order nothing.)
See Note [Streams and buffers] in `stretto.runtime.lanes_nccl`.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
from torch.futures import Future

from stretto.runtime.launch import Launched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from stretto.runtime.recorder import AbstractStepObserver
    from stretto.runtime.routes import Part, Route

    Reduce = Callable[[list[torch.Tensor], Any], Any]
    """A lane's ``allreduce``."""


@final
class NcclLaunch:
    """Launches a plan's buckets; other streams than the computation's wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream waits for the slices of every bucket: the Reducer waits for buckets
        # in launch order, so an earlier bucket does not delay a later one.
        self._gather = torch.cuda.Stream(device)
        self._seen: dict[int, torch.cuda.Stream] = {}

    def future(self) -> Future[Any]:
        """Return a future whose value is used on this device's streams."""
        return Future(devices=[self._device])

    def launcher(
        self,
        route: Route,
        reduces: Sequence[Reduce],
        observer: AbstractStepObserver | None,
    ) -> Callable[[torch.Tensor, Any], dist.Work]:
        """Return a function that starts a bucket's collectives."""
        rows = list(zip(reduces, route.parts, strict=True))
        if observer is not None:
            return partial(self._observed, observer, route.index, rows)
        if len(rows) == 1:
            return partial(_native, rows[0][0])
        return partial(self._slices, rows)

    def _slices(
        self,
        rows: Sequence[tuple[Reduce, Part]],
        buffer: torch.Tensor,
        opts: Any,
    ) -> dist.Work:
        works = [reduce([buffer[p.start : p.end]], opts) for reduce, p in rows]
        return self._gathered(works, buffer)

    def _observed(
        self,
        observer: AbstractStepObserver,
        index: int,
        rows: Sequence[tuple[Reduce, Part]],
        buffer: torch.Tensor,
        opts: Any,
    ) -> dist.Work:
        """Report each slice to an observer, on the stream on which the slice ends.

        An event that the observer records there completes when the slice has ended; the
        host's time is that of the launch.
        """
        observer.bucket_launched(index, perf_counter())
        works = []
        for reduce, part in rows:
            work = reduce([buffer[part.start : part.end]], opts)
            with torch.cuda.stream(self._stream_of(part.lane)):
                work.wait()
                elements = part.end - part.start
                observer.slice_finished(index, part.lane, elements, perf_counter())
            works.append(work)
        return self._gathered(works, buffer)

    def _gathered(self, works: Sequence[Any], buffer: torch.Tensor) -> dist.Work:
        future = self.future()
        with torch.cuda.stream(self._gather):
            for work in works:
                work.wait()
            # Record the buffer only now: this stream has waited for every lane that
            # reads it, so the allocator can track this stream alone.
            buffer.record_stream(self._gather)
            future.set_result(buffer)
        return Launched(future)

    def _stream_of(self, lane: int) -> torch.cuda.Stream:
        if lane not in self._seen:
            self._seen[lane] = torch.cuda.Stream(self._device)
        return self._seen[lane]


def _native(reduce: Reduce, buffer: torch.Tensor, opts: Any) -> dist.Work:
    """Return NCCL's own work: its future already has the device."""
    work: dist.Work = reduce([buffer], opts)
    return work
