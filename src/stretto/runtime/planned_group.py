"""The process group of a planned Reducer: its buckets, in order, to the sender.

# Note [A process group instead of a communication hook]
DDP's Reducer passes a full bucket to its process group's ``allreduce`` unless a
communication hook is registered. The plan takes that place: `PlannedGroup` is the
process group of the Reducer. Compared with a communication hook this keeps all of DDP:
it divides by the number of ranks while it copies a gradient into its bucket (a hook has
to pass over every bucket again), follows ``join``'s changing number of ranks, and
leaves its one hook free for the user, mixed precision and optimizers in backward. These
reduce over the plan's lanes when they ask the Reducer to reduce.

# Note [Two ways to launch]
In most steps, nothing has to be done for a bucket when its communication ends: the
Reducer waits for all buckets once, after backward. So the Reducer gets Gloo's own work.
For a bucket with several works it gets a future that is set just before it waits: a
callback of ours, queued before the Reducer's, waits for the works of the step in launch
order and names the one that failed. No thread of Gloo's enters Python then. (A Python
callback per bucket costs 50 to 100 us on those threads, during which they hold the
interpreter, or wait for it while backward holds it.)

If other code waits for a bucket's future, each future is completed by a callback of its
own: outside backward (``join``), under a user's hook, when a step is observed, and in a
group's first step, in which a static graph launches and finishes its buckets within one
callback.
"""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from stretto.autograd_engine import graph_task_id, queue_callback
from stretto.errors import StrettoError
from stretto.logs import get_logger
from stretto.runtime.forward.order import LaunchOrder
from stretto.runtime.launch import (
    Launched,
    Pending,
    done,
    launch_nothing,
    pass_on,
    then,
    value_or_raise,
    when_done,
)
from stretto.runtime.narrow_lanes import NarrowLanes
from stretto.runtime.sender import BucketSender
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.foreground_marks import StepMarker
    from stretto.runtime.backends.base import AbstractBackend
    from stretto.runtime.bucket_schedule import BucketSchedule
    from stretto.runtime.failure import FailureReporter
    from stretto.runtime.forward.halves import Halves
    from stretto.runtime.forward.overlap import ForwardOverlap
    from stretto.runtime.lanes import LanePool
    from stretto.runtime.nan_check import NanCheck
    from stretto.runtime.recording.step import AbstractStepObserver
    from stretto.runtime.sender import Start

_log = get_logger(__name__)

_USED = "the all-reduce of which parameters were used"


# Note [Callbacks hold no group]
# Gloo's worker threads run a future's callbacks and then release them. A callback that
# held the group could hold its last reference; then the group's backend would be
# destroyed by its own thread, which can't join itself: the process aborts with
# "Resource deadlock avoided".


def _complete(
    weak: weakref.ref[PlannedGroup],
    schedule: BucketSchedule,
    buffer: torch.Tensor,
    ended: Any,
) -> torch.Tensor:
    """Return a reduced bucket, or report the failure of its collective."""
    try:
        ended.value()
    except RuntimeError as exc:
        group = weak()
        if group is None:
            raise
        group.fail(schedule, exc)
    return buffer


def _launch_for(
    pending: Future[Any], launch: Any, buffer: torch.Tensor, opts: Any
) -> None:
    """Launch a bucket whose future was promised before its turn."""
    work = launch(buffer, opts)
    on_host = buffer.device.type == "cpu"
    when_done(work.get_future(), partial(pass_on, pending), on_host=on_host)


@final
class PlannedGroup(dist.ProcessGroup):
    """The process group of a planned Reducer.

    The Reducer reduces its buckets in index order on every rank, so the n-th all-reduce
    of a step is bucket n. Everything else goes to the model's own process group.
    """

    def __init__(
        self,
        *,
        base: dist.ProcessGroup,
        device: torch.device,
        schedules: Sequence[BucketSchedule],
        pool: LanePool,
        failures: FailureReporter,
        marker: StepMarker,
        deferred: bool,
        backend: AbstractBackend,
        kind: Any,
        error_feedback: bool = False,
        numerics: NanCheck | None = None,
        reduced: Callable[[], Callable[[], None] | None] | None = None,
        overlaps: bool = False,
        launch: Sequence[int] = (),
        halves: bool = False,
    ) -> None:
        # Only this form of the constructor lets C++ call the methods below.
        super().__init__(base.rank(), base.size())  # type: ignore[call-arg]
        # The base's backend handles everything that is not overridden here, and DDP's
        # log reports it.
        own = base._get_backend(device)  # noqa: SLF001
        self._register_backend(device, kind, own)
        self._set_default_backend(kind)
        self._base = base
        self._schedules = tuple(schedules)
        self._pool = pool
        self._failures = failures
        self._marker = marker
        self._numerics = numerics
        # Weak, because the Reducer holds this group and the model holds the Reducer.
        self._reduced = reduced
        self._looked_at: list[dist.Work] = []
        self._deferred = deferred
        self._order = LaunchOrder(launch) if launch else None
        self._overlap: ForwardOverlap | None = None
        self._overlaps_now = False
        self._may_halve = halves
        """Whether ranks must still agree on exchanging buckets in halves."""

        self._halves: Halves | None = None
        self.joins = False
        """Whether ranks that have no more batches take part in this step."""

        self.may_overlap = overlaps
        """Whether to decide in the next forward if communication overlaps with it."""

        self._streams = backend.stream_launch(device) if base.size() > 1 else None
        self._elements = tuple(schedule.elements for schedule in schedules)
        self._following = (*range(1, len(self._schedules)), 0)
        self._next = 0
        self._raises_late = True
        self._native = False
        self._in_backward = False
        self._warm = False
        self._aside: list[Any] = []
        self._pending: list[tuple[Future[Any], torch.Tensor]] = []
        self._awaited_futures: list[Future[Any]] = []
        self._held: list[tuple[Any, torch.Tensor, Any, Future[Any]]] = []
        self._rebuild_rows: list[list[int]] = []
        self._forwards: tuple[Any, ...] = ()
        self._nothing = self._closing([launch_nothing] * len(self._schedules))
        needs = {
            (p.lane, p.resource): None
            for schedule in schedules
            for p in schedule.slices
        }
        self.needs = tuple(needs)
        """The lanes in use, including those of communication hooks."""
        algorithms = {p.algorithm for schedule in schedules for p in schedule.slices}
        self._lanes = pool.open(needs, algorithms - {""}) if self.size() > 1 else {}
        narrow = NarrowLanes(
            schedules,
            self._lanes,
            device=device,
            error_feedback=error_feedback,
            threads=backend.completes_on_host,
        )
        self._sender = BucketSender(
            self._lanes, failures, narrow=narrow, streams=self._streams
        )
        self.observe(None)

    # Called by the Reducer.

    @without_dynamo
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Launch the next bucket of the step."""
        buffer = tensors[0]
        if buffer.dtype is torch.int32 or self._native:
            return self._allreduce_aside(tensors, opts)
        index = self._next
        if buffer.numel() != self._elements[index]:
            raise StrettoError(
                f"bucket {index} has {buffer.numel()} elements where the plan has "
                f"{self._elements[index]}: the Reducer built other buckets. "
                "This is a bug in stretto; pass plan=None to work around it."
            )
        self._next = self._following[index]
        if index == 0:
            self._open_step()
        return self._launchers[index](buffer, opts)

    def _allreduce_aside(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Reduce data that is not a bucket: the used parameters, or for a C++ hook."""
        if self._native or self._streams is not None:
            return self._base.allreduce(tensors, opts)
        try:
            work = self._base.allreduce(tensors, opts)
        except RuntimeError as exc:
            raise self._failures.report(_USED, exc) from exc
        self._aside.append(work)
        return work

    @without_dynamo
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Return the plan's buckets.

        The Reducer broadcasts only when it rebuilds its buckets, once, from the order
        in which gradients became ready: first all parameter indices with the number of
        buckets, then each bucket's number of parameters. Every rank knows them from the
        plan, so they are filled in and nothing is sent.
        """
        rows = [schedule.parameters for schedule in self._schedules]
        flat = [*(i for row in rows for i in row), len(rows)]
        sizes = [len(row) for row in rows]
        wanted = self._rebuild_rows.pop() if self._rebuild_rows else flat
        if wanted is flat:
            self._rebuild_rows.append(sizes)
        with torch.no_grad():
            # Set the device explicitly: the script may have set another default.
            tensors[0].copy_(torch.tensor(wanted, dtype=torch.int64, device="cpu"))
        return Launched(done(tensors))

    # Called by the model.

    @property
    def schedules(self) -> tuple[BucketSchedule, ...]:
        """The schedule of each bucket, in launch order."""
        return self._schedules

    def bucket_groups(self) -> tuple[Any, ...]:
        """Return one group per bucket for hooks that replace the plan; collective."""
        if self.size() == 1:
            return (self._base,)
        parts = [schedule.slices for schedule in self._schedules]
        if self._streams is not None:
            return tuple(self._lanes[row[0].lane, row[0].resource] for row in parts)
        # Note [A communicator per bucket on Gloo] in `stretto.runtime.torch_compat`.
        free = 1 + max(part.lane for row in parts for part in row)
        needs = [(free + index, None) for index in range(len(parts))]
        opened = self._pool.open(needs)
        self.needs = tuple(dict.fromkeys((*self.needs, *needs)))
        return tuple(opened[need] for need in needs)

    def begin_forward(self, *, reduces: bool) -> None:
        """Raise the error that ended the last step, if any.

        With ``reduces`` a step starts here, even after one that an exception cut short.
        """
        if self._failures.error is not None:
            raise self._failures.error
        if not reduces:
            return
        self._next = 0
        self._held.clear()
        if self._order is not None:
            self._order.reset()
        if self._numerics is not None:
            self._numerics.begin_step()

    def release(self) -> None:
        """Drop the references back to this group, which then launches nothing.

        Without it, lanes and their threads live until garbage collection.
        """
        if self._overlap is not None:
            self._overlap.release()
            self._overlap = self._halves = None
        self._tables = ((), ())
        self._launchers = self._nothing = self._forwards = ()

    def hand_over(self) -> None:
        """Let a failure reach the user's own hook, which now waits for buckets.

        A hook may wait for a bucket before it passes the next one, so buckets are
        launched as they come, on every rank.
        """
        self._raises_late = False
        if self._order is not None:
            self._order = None
            self.observe(self._observer)

    def pass_through(self) -> None:
        """Return the works of the model's own group, as DDP's C++ hooks need them."""
        self._native = True

    def observe(self, observer: AbstractStepObserver | None) -> None:
        """Set up the launchers, reporting to ``observer`` if there is one."""
        self._observer = observer
        completing = [
            self._completing(schedule, observer) for schedule in self._schedules
        ]
        quick = completing
        if observer is None and self._streams is None and self.size() > 1:
            quick = [self._quick(schedule) for schedule in self._schedules]
        if self._deferred:
            plain = quick is completing
            completing = self._deferring(completing, self._hold, self._launch_held)
            quick = (
                completing
                if plain
                else self._deferring(quick, self._hold_quick, self._launch_held_quick)
            )
        if self._order is not None:
            completing, quick = self._ordering(completing, quick)
        if self._numerics is not None:
            completing = [partial(self._look_at, launch) for launch in completing]
            quick = [partial(self._look_at, launch) for launch in quick]
        if self._overlap is not None:
            launcher_of = (self._halves or self._sender).launcher
            forwards = [
                self._forward(schedule, launcher_of(schedule, observer))
                for schedule in self._schedules
            ]
            self._forwards = self._closing(forwards)
        self._tables = (self._closing(completing), self._closing(quick))
        self._launchers = self._tables[0]

    def overlap_with_forward(self, overlap: ForwardOverlap) -> None:
        """Let backward return before its buckets are reduced, where that is possible.

        Overlapping ends with this group. See `stretto.runtime.forward`.
        """
        self._overlap = overlap
        self.observe(self._observer)

    @property
    def sender(self) -> BucketSender:
        """The sender of the buckets."""
        return self._sender

    @property
    def overlap(self) -> ForwardOverlap | None:
        """The overlap with the next forward; None without it."""
        return self._overlap

    # Setup.

    def _forward(self, schedule: BucketSchedule, launch: Any) -> Any:
        """Return a launcher of a bucket that nothing in this backward waits for."""
        launch = partial(self._launch_under_forward, launch, schedule)
        return partial(self._in_order_under_forward, launch, schedule.index)

    def _ordering(
        self, completing: Sequence[Any], quick: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return launchers that follow the plan's launch order."""
        ordered = [partial(self._in_order, run, i) for i, run in enumerate(completing)]
        if quick is completing:
            return ordered, ordered
        quicks = [partial(self._in_order_quick, run, i) for i, run in enumerate(quick)]
        return ordered, quicks

    def _completing(
        self, schedule: BucketSchedule, observer: AbstractStepObserver | None
    ) -> Any:
        """Return a launcher of a bucket whose future other code waits for."""
        if self.size() == 1:
            return launch_nothing
        if self._streams is not None:
            launch = self._sender.launcher_on_streams(schedule, observer)
            return partial(self._launch_guarded, launch, schedule)
        complete = partial(_complete, weakref.ref(self), schedule)
        start = self._sender.starter(schedule, observer)
        return partial(self._launch_completing, start, complete, schedule)

    def _quick(self, schedule: BucketSchedule) -> Any:
        """Return a launcher of a bucket that is waited for at the end of backward."""
        return self._sender.work_launcher(schedule, partial(self._give_up, schedule))

    def _deferring(self, launchers: Sequence[Any], hold: Any, last: Any) -> list[Any]:
        held = [partial(hold, launch) for launch in launchers[:-1]]
        return [*held, partial(last, launchers[-1])]

    def _closing(self, launchers: Sequence[Any]) -> tuple[Any, ...]:
        return (*launchers[:-1], partial(self._close_step, launchers[-1]))

    # Launch. Everything was decided above.

    def _launch_completing(
        self,
        start: Start,
        complete: Any,
        schedule: BucketSchedule,
        buffer: torch.Tensor,
        opts: Any,
    ) -> dist.Work:
        try:
            futures = [work.get_future() for work in start(buffer, opts)]
        except RuntimeError as exc:
            return self._give_up(schedule, buffer, exc)
        future = futures[0] if len(futures) == 1 else collect_all(futures)
        return self._awaited(then(future, partial(complete, buffer)))

    def _launch_guarded(
        self, launch: Any, schedule: BucketSchedule, buffer: torch.Tensor, opts: Any
    ) -> dist.Work:
        try:
            work: dist.Work = launch(buffer, opts)
        except RuntimeError as exc:  # an aborted communicator
            return self._give_up(schedule, buffer, exc)
        return work

    def _awaited(self, future: Future[Any]) -> dist.Work:
        if self._in_backward and self._streams is None:
            self._awaited_futures.append(future)
        return Launched(future)

    def _hold(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        pending: Future[Any] = (
            Future() if self._streams is None else self._streams.future()
        )
        self._held.append((launch, buffer, opts, pending))
        return self._awaited(pending.then(value_or_raise))

    def _launch_held(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        held, self._held = self._held, []
        for earlier, its_buffer, its_opts, pending in held:
            work = earlier(its_buffer, its_opts)
            on_host = self._streams is None
            when_done(work.get_future(), partial(pass_on, pending), on_host=on_host)
        launched: dist.Work = launch(buffer, opts)
        return launched

    def _hold_quick(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        pending: Future[Any] = Future()
        self._held.append((launch, buffer, opts, pending))
        self._pending.append((pending, buffer))
        return Launched(pending)

    def _launch_held_quick(
        self, launch: Any, buffer: torch.Tensor, opts: Any
    ) -> dist.Work:
        held, self._held = self._held, []
        for earlier, its_buffer, its_opts, _ in held:
            earlier(its_buffer, its_opts)
        launched: dist.Work = launch(buffer, opts)
        return launched

    def _in_order(
        self, launch: Any, index: int, buffer: torch.Tensor, opts: Any
    ) -> dist.Work:
        pending: Future[Any] = (
            Future() if self._streams is None else self._streams.future()
        )
        assert self._order is not None  # noqa: S101
        self._order.note(index, partial(_launch_for, pending, launch, buffer, opts))
        return self._awaited(pending.then(value_or_raise))

    def _in_order_quick(
        self, launch: Any, index: int, buffer: torch.Tensor, opts: Any
    ) -> dist.Work:
        pending: Future[Any] = Future()
        self._pending.append((pending, buffer))
        assert self._order is not None  # noqa: S101
        self._order.note(index, partial(launch, buffer, opts))
        return Launched(pending)

    def _in_order_under_forward(
        self, launch: Any, index: int, buffer: torch.Tensor, opts: Any
    ) -> dist.Work:
        if self._order is None:
            launch(buffer, opts)
        else:
            self._order.note(index, partial(launch, buffer, opts))
        return Launched(done(buffer))

    def _launch_under_forward(
        self, launch: Any, schedule: BucketSchedule, buffer: torch.Tensor, opts: Any
    ) -> None:
        if self._failures.error is not None or self._overlap is None:
            return
        sent = self._overlap.take(schedule.index, buffer)
        try:
            launch(sent, opts)
        except RuntimeError as exc:
            self.fail(schedule, exc)

    def _look_at(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        assert self._numerics is not None  # noqa: S101
        self._numerics.launching(buffer)
        work: dist.Work = launch(buffer, opts)
        self._looked_at.append(work)
        return work

    # Begin and end of a step. With completing launches, lanes' threads call these too.

    def _open_step(self) -> None:
        self._in_backward = graph_task_id() != -1
        quick = self._in_backward and self._raises_late and self._warm
        overlap = self._overlap
        # Halves must not depend on what this rank alone does: it may only wait.
        halved = self._halves is not None and quick and not self.joins
        late = overlap is not None and self._may_be_late(overlap)
        if overlap is not None:
            overlap.begin_backward(waits=halved and not late)
        self._sender.forget()
        self._aside.clear()
        self._pending.clear()
        self._awaited_futures.clear()
        self._looked_at.clear()
        if self._order is not None:
            self._order.reset()
        self._launchers = self._tables[quick]
        self._overlaps_now = halved or (quick and late)
        if self._overlaps_now:
            self._launchers = self._forwards
        if self._failures.error is not None:
            self._launchers = self._nothing

    def _may_be_late(self, overlap: ForwardOverlap) -> bool:
        """Return whether this rank lets a backward end before its communication."""
        return (
            (self._observer is None or self._observer.takes_late_ends)
            and self._numerics is None
            and overlap.may_be_late()
        )

    def _agree_on_halves(self) -> None:
        """Exchange buckets in halves from the next step on if all ranks can.

        Called at the end of the first backward in which all ranks take part.
        """
        self._may_halve = False
        overlap = self._overlap
        why = None if overlap is None else overlap.why_whole()
        vote = torch.tensor([float(overlap is not None and why is None)], device="cpu")
        opts: Any = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.MIN
        work = self._lanes[self.needs[0]].allreduce([vote], opts)
        self._failures.wait(work, "the agreement on an exchange in halves")
        if overlap is None:
            return
        if not vote.item():
            overlap.warn_of_whole(why or "another rank does not overlap with forward")
            return
        self._halves = overlap.exchange_in_halves(rank=self.rank(), ranks=self.size())
        self.observe(self._observer)

    def _close_step(self, launch: Any, buffer: torch.Tensor, opts: Any) -> dist.Work:
        launched: dist.Work = launch(buffer, opts)
        if self._in_backward:
            self._warm = True
            # Runs before the Reducer's own callback, which it queues after this.
            queue_callback(self._before_finalize)
        return launched

    def fail(self, schedule: BucketSchedule, cause: RuntimeError) -> None:
        """Report a failed collective; raise the error if a caller waits for it."""
        error = self._sender.report(schedule, cause)
        # Later buckets would wait on lanes that are closed.
        self._launchers = self._nothing
        if not (self._raises_late and self._in_backward):
            raise error

    def _give_up(
        self, schedule: BucketSchedule, buffer: torch.Tensor, cause: RuntimeError
    ) -> dist.Work:
        self.fail(schedule, cause)
        return Launched(done(buffer))

    # Note [Failures are raised around the Reducer's end]
    # An error in a future reaches the user as a bare RuntimeError, because a future
    # keeps no Python type. So such a bucket ends as if it had succeeded, the Reducer
    # finishes its step, and a callback queued after the Reducer's raises the error. In
    # a quick step the callback before the Reducer's finds the error and raises it. The
    # Reducer then does not finish, and the next forward would report that if it did not
    # raise the same error first. Either way backward() raises before any optimizer can
    # see the gradients.

    # Note [Python waits before the Reducer does]
    # While the Reducer waits for a future in C++, an interrupt (Ctrl-C) is left to the
    # first Python code after the wait. That is torch's own `_extract_tensors`, called
    # from C++, which turns it into a bare RuntimeError. So all waiting is done here,
    # where the interrupt stays a KeyboardInterrupt. The Reducer raises the errors.

    @without_dynamo
    def _before_finalize(self) -> None:
        if self._overlaps_now and self._overlap is not None:
            if self._failures.error is not None:
                raise self._failures.error
            self._overlap.before_reducer()
            self._marker.end_step()
            queue_callback(self._after_finalize)
            return
        if self._streams is None:  # on NCCL streams wait, not this thread
            self._marker.wait("all-reduce", self._await_works)
        else:
            self._await_works()
        self._marker.end_step()
        if self._may_halve and not self.joins and self._failures.error is None:
            self._agree_on_halves()
        for pending, buffer in self._pending:
            pending.set_result(buffer)
        self._sender.forget()
        self._pending.clear()
        queue_callback(self._after_finalize)
        if self._numerics is not None and self._raises_late:
            if self._streams is None:
                for look in self._looked_at:
                    look.wait()
            self._looked_at.clear()
            if self._failures.error is None:
                self._numerics.reduced()

    def _await_works(self) -> None:
        for future in self._awaited_futures:
            with contextlib.suppress(RuntimeError):
                self._failures.wait(Pending(future), "an all-reduce of a plan")
        self._awaited_futures.clear()
        waited = self._sender.wait_all()
        if self._failures.error is not None and waited:
            raise self._failures.error
        for work in self._aside:
            self._failures.wait(work, _USED)
        self._aside.clear()

    @without_dynamo
    def _after_finalize(self) -> None:
        if self._failures.error is not None:
            raise self._failures.error
        if self._overlaps_now and self._overlap is not None:
            self._overlap.after_reducer()
        call = None if self._reduced is None else self._reduced()
        if call is not None:
            call()
