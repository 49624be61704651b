"""What happens to one bucket: its slices go to their lanes.

# Note [A process group instead of a communication hook]
DDP's Reducer hands a full bucket to its process group's ``allreduce`` unless a
communication hook is registered. The plan stands at that place: `PlannedGroup` is the
process group the Reducer is given. Against a communication hook this keeps all of DDP:
it divides by the number of ranks while it copies a gradient into its bucket (a hook has
to pass over every bucket once more), follows ``join``'s changing number of ranks, and
its one hook stays free for the user, mixed precision and optimizers in backward, which
reduce over the plan's lanes in turn where they ask the Reducer to reduce.
"""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.runtime.failure import FailureDesk
    from stretto.runtime.lanes import LanePool
    from stretto.runtime.recorder import AbstractStepObserver
    from stretto.runtime.routes import Part, Route

_log = logging.getLogger(__name__)

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
_graph_task_id = torch._C._current_graph_task_id  # noqa: SLF001


@final
class _Launched(dist.Work):
    """A launched bucket, as the Reducer asks for it: by its future."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def get_future(self) -> Future[Any]:
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True


@final
class PlannedGroup(dist.ProcessGroup):
    """The process group a planned Reducer is given.

    The Reducer reduces its buckets in index order on every rank, so the n-th
    all-reduce of a step is bucket n. Whatever else it asks for goes to the model's
    own process group.
    """

    def __init__(
        self,
        *,
        base: dist.ProcessGroup,
        device: torch.device,
        routes: Sequence[Route],
        pool: LanePool,
        desk: FailureDesk,
        deferred: bool,
        nccl: bool,
    ) -> None:
        # Only this form of the constructor lets C++ call the methods below.
        super().__init__(base.rank(), base.size())  # type: ignore[call-arg]
        # The base's backend serves everything that is not overridden here, and is
        # what DDP's log asks about.
        kind = (
            dist.ProcessGroup.BackendType.NCCL
            if nccl
            else dist.ProcessGroup.BackendType.GLOO
        )
        self._register_backend(device, kind, base._get_backend(device))  # noqa: SLF001
        self._set_default_backend(kind)
        self._base = base
        self._routes = tuple(routes)
        self._pool = pool
        self._desk = desk
        self._deferred = deferred
        self._nccl = nccl
        self._device = device
        self._elements = tuple(route.elements for route in routes)
        self._following = (*range(1, len(self._routes)), 0)
        self._next = 0
        self._raises_late = True
        self._in_backward = False
        self._held: list[tuple[Any, torch.Tensor, Any, Future[Any]]] = []
        self._rebuild_rows: list[list[int]] = []
        self.observe(None)

    # What the Reducer calls.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Launches the next bucket of the step."""
        buffer = tensors[0]
        if buffer.dtype is torch.int32:  # which parameters were used
            return self._base.allreduce(tensors, opts)
        index = self._next
        if buffer.numel() != self._elements[index]:
            raise StrettoError(
                f"bucket {index} has {buffer.numel()} elements where the plan has "
                f"{self._elements[index]}: the Reducer built other buckets. "
                "This is a bug of stretto; plan=None goes round it."
            )
        self._next = self._following[index]
        return self._launchers[index](buffer, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Answers with the plan's buckets.

        The Reducer broadcasts only when it rebuilds its buckets, once, from the order
        in which gradients came: first all parameter indices with the number of
        buckets, then each bucket's number of parameters. Every rank knows them from
        the plan, so they are filled in and nothing is sent.
        """
        rows = [route.parameters for route in self._routes]
        flat = [*(i for row in rows for i in row), len(rows)]
        sizes = [len(row) for row in rows]
        wanted = self._rebuild_rows.pop() if self._rebuild_rows else flat
        if wanted is flat:
            self._rebuild_rows.append(sizes)
        with torch.no_grad():
            tensors[0].copy_(torch.tensor(wanted, dtype=tensors[0].dtype))
        return _Launched(_done(tensors))

    # What the model calls.

    @property
    def routes(self) -> tuple[Route, ...]:
        """The way of each bucket, in launch order."""
        return self._routes

    def begin_step(self) -> None:
        """Starts a step: also after one that an exception cut short."""
        self._next = 0
        self._held.clear()
        if self._desk.error is not None:
            raise self._desk.error

    def hand_over(self) -> None:
        """Lets a failure reach the user's own hook, which now waits for buckets."""
        self._raises_late = False

    def observe(self, observer: AbstractStepObserver | None) -> None:
        """Sets the launchers up, reporting to ``observer`` where there is one."""
        launchers = [self._launcher(route, observer) for route in self._routes]
        if self._deferred:
            held = [partial(self._hold, launch) for launch in launchers[:-1]]
            launchers = [*held, partial(self._launch_held, launchers[-1])]
        launchers[0] = partial(self._open_step, launchers[0])
        launchers[-1] = partial(self._close_step, launchers[-1])
        self._launchers: tuple[Any, ...] = tuple(launchers)

    # Setting up.

    def _launcher(self, route: Route, observer: AbstractStepObserver | None) -> Any:
        if self.size() == 1:
            return _launch_nothing
        lanes = [self._pool.lane(p.lane, p.resource) for p in route.parts]
        settle = partial(self._settle, route)
        if observer is not None:
            rows = [
                (lane.allreduce, part, partial(observer.slice_finished, route.index))
                for lane, part in zip(lanes, route.parts, strict=True)
            ]
            launched = partial(observer.bucket_launched, route.index)
            return partial(self._launch_observed, launched, rows, settle)
        reduces = [lane.allreduce for lane in lanes]
        if self._nccl:
            if len(reduces) == 1:
                return partial(_launch_native, reduces[0])
            cuts = [(p.start, p.end) for p in route.parts]
            stream = torch.cuda.Stream(self._device)
            return partial(
                _launch_on_stream, stream, list(zip(reduces, cuts, strict=True))
            )
        if len(reduces) == 1:
            return partial(self._launch_whole, reduces[0], settle, route)
        sizes = [p.end - p.start for p in route.parts]
        return partial(self._launch_slices, reduces, sizes, settle, route)

    # Launching. Everything was decided above.

    def _launch_whole(
        self, reduce: Any, settle: Any, route: Route, buffer: torch.Tensor, opts: Any
    ) -> dist.Work:
        try:
            future = reduce([buffer], opts).get_future()
        except RuntimeError as exc:
            return self._give_up(route, buffer, exc)
        return _Launched(future.then(partial(settle, buffer)))

    def _launch_slices(
        self,
        reduces: Sequence[Any],
        sizes: list[int],
        settle: Any,
        route: Route,
        buffer: torch.Tensor,
        opts: Any,
    ) -> dist.Work:
        try:
            futures = [
                reduce([piece], opts).get_future()
                for reduce, piece in zip(reduces, buffer.split(sizes), strict=True)
            ]
        except RuntimeError as exc:
            return self._give_up(route, buffer, exc)
        return _Launched(collect_all(futures).then(partial(settle, buffer)))

    def _launch_observed(
        self,
        launched: Callable[[float], None],
        rows: Sequence[tuple[Any, Part, Any]],
        settle: Any,
        buffer: torch.Tensor,
        opts: Any,
    ) -> dist.Work:
        launched(perf_counter())
        whole = len(rows) == 1
        futures = [
            reduce([buffer if whole else buffer[part.start : part.end]], opts)
            .get_future()
            .then(partial(_stamp, finished, part))
            for reduce, part, finished in rows
        ]
        return _Launched(collect_all(futures).then(partial(settle, buffer)))

    def _open_step(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        self._in_backward = _graph_task_id() != -1
        launched: dist.Work = launch(buffer, opts)
        return launched

    def _close_step(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        launched: dist.Work = launch(buffer, opts)
        if self._in_backward:
            # Runs before the Reducer's own callback, which it queues after this.
            _queue_callback(self._before_finalize)
        return launched

    def _hold(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        pending: Future[Any] = Future()
        self._held.append((launch, buffer, opts, pending))
        return _Launched(pending.then(_value_or_raise))

    def _launch_held(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        held, self._held = self._held, []
        for earlier, its_buffer, its_opts, pending in held:
            work = earlier(its_buffer, its_opts)
            work.get_future().add_done_callback(partial(_pass_on, pending))
        launched: dist.Work = launch(buffer, opts)
        return launched

    # Ending. Worker threads of the lanes come here.

    def _settle(self, route: Route, buffer: torch.Tensor, done: Any) -> torch.Tensor:
        try:
            done.value()
        except RuntimeError as exc:
            self._fail(route, exc)
        return buffer

    def _fail(self, route: Route, cause: RuntimeError) -> None:
        error = self._desk.report(route.place, cause)
        # Buckets still to come would wait on lanes that are closed.
        self._launchers = tuple(
            partial(self._close_step, _launch_nothing)
            if i == len(self._routes) - 1
            else _launch_nothing
            for i in range(len(self._routes))
        )
        if not (self._raises_late and self._in_backward):
            raise error

    def _give_up(
        self, route: Route, buffer: torch.Tensor, cause: RuntimeError
    ) -> dist.Work:
        self._fail(route, cause)
        return _Launched(_done(buffer))

    # Note [Failures are raised after the Reducer has finished]
    # An error in a future reaches the user as a bare RuntimeError, for a future keeps
    # no Python type. So a failed bucket ends as if it had succeeded, the Reducer
    # finishes its step, and the error is raised from a callback queued behind the
    # Reducer's: backward() raises it before any optimizer can see the gradients.

    def _before_finalize(self) -> None:
        _queue_callback(self._after_finalize)

    def _after_finalize(self) -> None:
        if self._desk.error is not None:
            raise self._desk.error


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _launch_nothing(buffer: torch.Tensor, _opts: Any) -> dist.Work:
    return _Launched(_done(buffer))


def _launch_native(reduce: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
    work: dist.Work = reduce([buffer], opts)
    return work


def _launch_on_stream(
    stream: torch.cuda.Stream,
    rows: Sequence[tuple[Any, tuple[int, int]]],
    buffer: torch.Tensor,
    opts: Any,
) -> dist.Work:
    # Not yet run on a GPU. A future made of several has no device of its own, so
    # waiting for it would not order streams. A stream of ours waits for the slices
    # and the future records that stream; the computation's stream goes on meanwhile.
    works = [reduce([buffer[start:end]], opts) for reduce, (start, end) in rows]
    future: Future[Any] = Future(devices=[buffer.device])
    with torch.cuda.stream(stream):
        for work in works:
            work.wait()
        # The caching allocator must not give the buffer away before the stream ends.
        buffer.record_stream(stream)
        future.set_result(buffer)
    return _Launched(future)


def _stamp(finished: Any, part: Part, future: Any) -> Any:
    now_s = perf_counter()
    value = future.value()
    finished(part.lane, part.end - part.start, now_s)
    return value


def _pass_on(pending: Future[Any], done: Any) -> None:
    try:
        value = done.value()
    except RuntimeError as exc:
        value = exc
    pending.set_result(value)


def _value_or_raise(future: Any) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value
