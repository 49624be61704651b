"""Send packed buckets on open lanes: the one sender of gradients.

Planned DDP, the negotiated engine and burst-parallel training send with it. What
differs stays with its owner: who packs a bucket, who decides the order, and what a
failure ends.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, final

from torch.futures import Future

from stretto.runtime.bucket_schedule import lane_of
from stretto.runtime.launch import Launched, then

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    import torch.distributed as dist

    from stretto.runtime.backends.base import AbstractStreamLaunch, Need
    from stretto.runtime.bucket_schedule import BucketSchedule, Slice
    from stretto.runtime.narrow_lanes import NarrowLanes
    from stretto.runtime.recording.step import AbstractStepObserver

    Reduce = Callable[[list[torch.Tensor], Any], Any]
    """Starts a slice's collective, as a lane's ``allreduce`` does; returns its work."""

    Start = Callable[[torch.Tensor, Any], list[Any]]
    """Starts a bucket's collectives and gives what to ``wait()`` for, one a slice.

    Each ``wait`` raises `RuntimeError` where its collective failed, and each has
    ``get_future()``.
    """

    GiveUp = Callable[[torch.Tensor, RuntimeError], Any]
    """Ends the launch of a buffer that failed: raises, or returns a work."""


class CollectiveWatch(Protocol):
    """Waits for collectives, and turns a failure into the owner's error.

    `FailureReporter` is one.
    """

    def report(self, place: str, cause: BaseException) -> Exception:
        """Return the error to raise after a failure at ``place``."""

    def wait(self, work: Any, place: str) -> None:
        """Wait for a collective; raise that error if it fails."""


@final
class PlainWatch:
    """A watch that only waits: the owner looks for lost ranks itself."""

    def __init__(self, report: Callable[[str, BaseException], Exception]) -> None:
        self._report = report

    def report(self, place: str, cause: BaseException) -> Exception:
        """Return the owner's error after a failure at ``place``."""
        return self._report(place, cause)

    def wait(self, work: Any, place: str) -> None:
        """Wait for a collective; raise the owner's error if it fails."""
        try:
            work.wait()
        except RuntimeError as exc:
            raise self.report(place, exc) from exc


@final
class BucketSender:
    """Sends packed buckets on one set of lanes.

    Every rank must launch the same buckets in the same order. Buckets with a `launcher`
    have different indices.
    """

    def __init__(
        self,
        lanes: Mapping[Need, Any],
        watch: CollectiveWatch,
        *,
        narrow: NarrowLanes | None = None,
        streams: AbstractStreamLaunch | None = None,
    ) -> None:
        """Prepare.

        Args:
            lanes: The open lanes that schedules name.
            watch: Waits for works and reports failures.
            narrow: The reductions of buckets with a type of their own on the wire.
            streams: What launches buckets whose end only the device's streams see.
        """
        self._lanes = lanes
        self._watch = watch
        self._narrow = narrow
        self._streams = streams
        self._buckets: dict[int, BucketSchedule] = {}
        self._places: dict[int, list[str]] = {}
        self._works: dict[int, Any] = {}
        """Works of launched buckets, by index in launch order: a list, or one work."""
        self._pending: dict[int, tuple[Future[Any], torch.Tensor]] = {}

    def reduce(self, schedule: BucketSchedule, part: Slice) -> Reduce:
        """Return what starts the collective of one slice."""
        reduce: Reduce = (
            lane_of(self._lanes, part).allreduce
            if self._narrow is None
            else self._narrow.reduce(schedule, part)
        )
        return reduce

    def starter(
        self, schedule: BucketSchedule, observer: AbstractStepObserver | None = None
    ) -> Start:
        """Return what starts a bucket's slices; the caller waits for the works.

        ``observer`` receives the launch and, through the works' futures, each end.
        """
        reduces = [self.reduce(schedule, part) for part in schedule.slices]
        if observer is not None:
            return partial(_start_observed, observer, schedule, reduces)
        if len(reduces) == 1:
            return partial(_start_whole, reduces[0])
        sizes = [part.end - part.start for part in schedule.slices]
        return partial(_start_slices, reduces, sizes)

    def launcher(
        self, schedule: BucketSchedule, observer: AbstractStepObserver | None = None
    ) -> Callable[[torch.Tensor, Any], object]:
        """Return what launches a bucket, which `wait` then waits for."""
        self._add(schedule)
        if observer is not None:
            start = self.starter(schedule, observer)
            return partial(self._launch_slices, start, schedule.index)
        if self._is_native(schedule):
            return self._whole_launcher(schedule, _raise)
        return partial(self._launch_slices, self.starter(schedule), schedule.index)

    def work_launcher(
        self, schedule: BucketSchedule, failed: GiveUp
    ) -> Callable[[torch.Tensor, Any], Any]:
        """Return what launches a bucket for `wait`, and gives one work.

        That work is the backend's own if the bucket has one slice. Otherwise its future
        ends in `wait`. If a lane is closed, ``failed`` gives the work.
        """
        if not self._is_native(schedule):
            launch = self.launcher(schedule)
            return partial(self._launch_pending, launch, schedule.index, failed)
        self._add(schedule)
        return self._whole_launcher(schedule, failed)

    def _add(self, schedule: BucketSchedule) -> None:
        self._buckets[schedule.index] = schedule
        places = [schedule.place_on(part) for part in schedule.slices]
        self._places[schedule.index] = places

    def _is_native(self, schedule: BucketSchedule) -> bool:
        """Return whether one work of the backend's own is the bucket's end."""
        part = schedule.slices[0]
        threaded = self._narrow is not None and self._narrow.has_thread(part)
        return len(schedule.slices) == 1 and not threaded

    def _whole_launcher(
        self, schedule: BucketSchedule, failed: GiveUp
    ) -> Callable[[torch.Tensor, Any], Any]:
        reduce = self.reduce(schedule, schedule.slices[0])
        return partial(self._launch_whole, reduce, schedule.index, failed)

    # A launch does no more than it must: lanes and places are looked up above.

    def _launch_whole(
        self,
        reduce: Reduce,
        index: int,
        failed: GiveUp,
        buffer: torch.Tensor,
        opts: Any,
    ) -> Any:
        try:
            work = reduce([buffer], opts)
        except RuntimeError as exc:
            return failed(buffer, exc)
        self._works[index] = work
        return work

    def _launch_slices(
        self, start: Start, index: int, buffer: torch.Tensor, opts: Any
    ) -> None:
        self._works[index] = start(buffer, opts)

    def _launch_pending(
        self,
        launch: Callable[[torch.Tensor, Any], object],
        index: int,
        failed: GiveUp,
        buffer: torch.Tensor,
        opts: Any,
    ) -> Any:
        try:
            launch(buffer, opts)
        except RuntimeError as exc:
            return failed(buffer, exc)
        pending: Future[Any] = Future()
        self._pending[index] = (pending, buffer)
        return Launched(pending)

    def launcher_on_streams(
        self, schedule: BucketSchedule, observer: AbstractStepObserver | None
    ) -> Callable[[torch.Tensor, Any], dist.Work]:
        """Return what launches a bucket and gives a work that orders streams."""
        if schedule.wire is not None:
            assert self._narrow is not None  # noqa: S101
            return self._narrow.launcher_on_streams(schedule)
        assert self._streams is not None  # noqa: S101
        reduces = [self.reduce(schedule, part) for part in schedule.slices]
        return self._streams.launcher(schedule, reduces, observer)

    # A bucket in two halves: two collectives a slice, one after the other.

    def lane(self, part: Slice) -> Any:
        """Return the open lane of a slice."""
        return lane_of(self._lanes, part)

    def start_first_half(
        self,
        schedule: BucketSchedule,
        starts: Sequence[Callable[[Any], Any]],
        observer: AbstractStepObserver | None,
    ) -> None:
        """Start a collective for each slice, given its lane; `wait` waits for them."""
        if observer is not None:
            observer.bucket_launched(schedule.index, perf_counter())
        self._works[schedule.index] = self._start(schedule, starts)

    def start_second_half(
        self,
        schedule: BucketSchedule,
        starts: Sequence[Callable[[Any], Any]],
        observer: AbstractStepObserver | None,
    ) -> None:
        """Start those that follow; their ends are the bucket's for an observer."""
        works = self._start(schedule, starts)
        if observer is not None:
            finished = partial(observer.slice_finished, schedule.index)
            works = [
                Launched(work.get_future().then(partial(_stamp, finished, part)))
                for part, work in zip(schedule.slices, works, strict=True)
            ]
        self._works[schedule.index] = works

    def _start(
        self, schedule: BucketSchedule, starts: Sequence[Callable[[Any], Any]]
    ) -> list[Any]:
        rows = zip(schedule.slices, starts, strict=True)
        return [start(self.lane(part)) for part, start in rows]

    def await_work(self, work: Any, place: str) -> None:
        """Wait for another collective; raise the watch's error if it fails."""
        self._watch.wait(work, place)

    def wait(
        self,
        schedule: BucketSchedule,
        ended: Callable[[Slice], None] | None = None,
    ) -> None:
        """Wait for a launched bucket; call ``ended`` with each slice, in order.

        Its works are kept until `forget`.

        Raises:
            Exception: the watch's, with the bucket and the lane that failed.
        """
        index, wait = schedule.index, self._watch.wait
        works, places = self._works[index], self._places[index]
        if not isinstance(works, list):
            wait(works, places[0])
            if ended is not None:
                ended(schedule.slices[0])
            return
        for part, work, place in zip(schedule.slices, works, places, strict=True):
            wait(work, place)
            if ended is not None:
                ended(part)
        if index in self._pending:
            pending, buffer = self._pending.pop(index)
            pending.set_result(buffer)

    def is_finished(self, schedule: BucketSchedule) -> bool:
        """Return whether a launched bucket's works have ended, well or not."""
        works = self._works[schedule.index]
        if not isinstance(works, list):
            return bool(works.is_completed())
        return all(work.is_completed() for work in works)

    def wait_all(self) -> bool:
        """Wait for all launched buckets, in order; return whether there were any."""
        for index in self._works:
            self.wait(self._buckets[index])
        return bool(self._works)

    def forget(self) -> None:
        """Drop the works of all launched buckets, as a step ends or starts.

        Not each after its wait: the lane's thread may still hold a work that has just
        ended, and memory that another thread frees makes the next launch slower.
        """
        self._works.clear()
        self._pending.clear()

    def report(self, schedule: BucketSchedule, cause: BaseException) -> Exception:
        """Return the watch's error after a failure of a bucket."""
        return self._watch.report(schedule.place, cause)


def _raise(_buffer: torch.Tensor, error: RuntimeError) -> Any:
    raise error


def _start_whole(reduce: Reduce, buffer: torch.Tensor, opts: Any) -> list[Any]:
    return [reduce([buffer], opts)]


def _start_slices(
    reduces: Sequence[Reduce], sizes: list[int], buffer: torch.Tensor, opts: Any
) -> list[Any]:
    return [
        reduce([piece], opts)
        for reduce, piece in zip(reduces, buffer.split(sizes), strict=True)
    ]


def _start_observed(
    observer: AbstractStepObserver,
    schedule: BucketSchedule,
    reduces: Sequence[Reduce],
    buffer: torch.Tensor,
    opts: Any,
) -> list[Any]:
    observer.bucket_launched(schedule.index, perf_counter())
    finished = partial(observer.slice_finished, schedule.index)
    whole = len(reduces) == 1
    return [
        Launched(
            then(
                reduce(
                    [buffer if whole else buffer[part.start : part.end]], opts
                ).get_future(),
                partial(_stamp, finished, part),
                on_host=buffer.device.type == "cpu",
            )
        )
        for reduce, part in zip(reduces, schedule.slices, strict=True)
    ]


def _stamp(finished: Any, part: Slice, future: Any) -> Any:
    """Return a slice's result and report its end to an observer."""
    now_s = perf_counter()
    value = future.value()
    finished(part.lane, part.end - part.start, now_s)
    return value
