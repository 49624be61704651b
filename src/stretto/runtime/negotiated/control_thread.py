"""The engine's control thread, and the entry points that other threads call.

`stretto.runtime.negotiated.ledger` holds the state and decides. This module's thread
executes the rounds and launches the decisions in their order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.distributed_c10d import PrefixStore

from stretto._version import __version__
from stretto.errors import CommTimeout, RankDisagreement, SpecError, StrettoError
from stretto.logs import get_logger
from stretto.runtime import backends
from stretto.runtime.agreement import Agreement
from stretto.runtime.failure import FailureReporter
from stretto.runtime.lanes import LanePool
from stretto.runtime.negotiated.api import Handle
from stretto.runtime.negotiated.ledger import (
    Conflict,
    EndJoin,
    EndStep,
    Launch,
    LaunchMembers,
    RefuseRequest,
    RequestLedger,
)
from stretto.runtime.negotiated.pending import (
    PendingRequest,
    ReducedTensor,
    check_tensors,
    new_shared,
    writable,
)
from stretto.runtime.negotiated.progress import AbortReason, Pace, StallDetector
from stretto.runtime.negotiated.requests import CollectiveKind, Request
from stretto.runtime.negotiated.rounds import Control, PiggybackSlot
from stretto.runtime.negotiated.send import RequestSender
from stretto.runtime.negotiated.tensor_set import AbstractControlLoop, SetSteps
from stretto.runtime.store import store_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.runtime.negotiated.api import AbstractEngineObserver, EngineOptions
    from stretto.runtime.negotiated.ledger import Decision
    from stretto.runtime.ranks import Ranks

_log = get_logger(__name__)

_TICK_S = 1.0
_CLOSE_S = 10.0
_PRUNE_AT = 1000
_PLACE_BYTES = 32
_MAX_TRIED = 4
"""A round may include the first of this many ready requests that fits."""


@final
class ControlLoop(AbstractControlLoop):
    """The part of an engine that its threads refer to."""

    def __init__(
        self,
        ranks: Ranks,
        options: EngineOptions,
        observer: AbstractEngineObserver | None,
        on_loss: Callable[[], None] | None = None,
    ) -> None:
        try:
            serial = ranks.store.add(f"negotiated/serial/{ranks.rank}", 1)
        except RuntimeError as exc:
            raise store_lost(ranks, "open an engine", exc) from exc
        store = PrefixStore(f"negotiated/{serial}", ranks.store)
        self.ranks = dataclasses.replace(ranks, store=store)
        self.options = options
        self.observer = observer
        self._on_loss = on_loss
        self.failures = FailureReporter(self.ranks, self._abort, hand_over=on_loss)
        self.sender = RequestSender(self.ranks, options, self.report, observer)
        self.sets: dict[int, SetSteps] = {}
        self._registered: dict[str, SetSteps] = {}
        self.error: StrettoError | None = None
        self._ledger = RequestLedger(
            rank=ranks.rank,
            size=ranks.size,
            names=ranks.names,
            known_requests=options.known_requests,
        )
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._jobs: dict[str, PendingRequest] = {}
        self._launching: dict[str, PendingRequest] = {}
        """Requests that the control thread took from the pending ones in this round."""
        self._outstanding: set[Handle] = set()
        self._prune_at = _PRUNE_AT
        self._join: Handle | None = None
        self._last_joined = -1
        self._news = False
        self._closing = False
        self._piggyback = PiggybackSlot()
        self._pace = Pace(options.cycle_s)
        self._stalls = StallDetector(self.ranks)
        self._notes = AbortReason(self.ranks)
        self._tick_s = min(_TICK_S, options.stall_s / 4, ranks.timeout_s / 4)
        self._ticked_s = perf_counter()
        self._pool: LanePool | None = None
        lane = self._control_lane() if ranks.size > 1 else None
        self.control = Control(
            lane, size=ranks.size, tick_s=self._tick_s, tick=self._tick
        )
        self._thread = threading.Thread(
            target=self._run, name="stretto-control", daemon=True
        )
        self._thread.start()

    def _control_lane(self) -> Any:
        """Open the lane of rounds, after all ranks have equal settings.

        Raises:
            StrettoError: settings differ, or a rank is lost or late.
        """
        Agreement(self.ranks).require_same(
            "open an engine",
            {
                "stretto": __version__,
                "torch": torch.__version__,
                "settings": f"{self.options}, timeout_s={self.ranks.timeout_s:g}",
            },
        )
        self._pool = LanePool(
            dataclasses.replace(
                self.ranks, store=PrefixStore("control", self.ranks.store)
            ),
            serial=0,
            backend=backends.ON_HOST,
            device=torch.device("cpu"),
        )
        try:
            return self._pool.lane(0)
        except RuntimeError as exc:
            raise self.failures.report("the opening of an engine", exc) from exc

    # Called by users' threads.

    def submit(
        self,
        rows: Sequence[tuple[Request, torch.Tensor | None, torch.Tensor | None]],
    ) -> list[Handle]:
        """Accept requests, all or none."""
        rank, size = self.ranks.rank, self.ranks.size
        jobs = []
        for request, tensor, output in rows:
            check_tensors(request, tensor, output, rank=rank, size=size)
            taken = None if tensor is None else writable(tensor)
            out = None if output is None else writable(output)
            event = None
            if taken is not None and taken.is_cuda:
                for each in (taken, taken if out is None else out):
                    self.use_device(request.place, each.device)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(taken.device))
            jobs.append(
                PendingRequest(request, taken, out, Handle(request.place), event)
            )
        names = [job.request.name for job in jobs]
        with self._wake:
            self.require_open()
            if self._ledger.joined:
                raise SpecError(
                    f"{jobs[0].request.place} was submitted after join(): a rank that "
                    "has joined takes no part until all ranks have joined."
                )
            for name in names:
                if self._ledger.is_pending(name) or names.count(name) > 1:
                    raise SpecError(
                        f"{name!r} was submitted on {self.ranks.name(rank)} while a "
                        "request of that name is pending. Wait for the first, or give "
                        "each its own name."
                    )
            for job in jobs:
                self._ledger.submit(job.request)
                self._jobs[job.request.name] = job
                self._outstanding.add(job.handle)
            if len(self._outstanding) > self._prune_at:
                self._outstanding = {h for h in self._outstanding if not h.poll()}
                self._prune_at = 2 * len(self._outstanding) + _PRUNE_AT
            self._news = True
            self._wake.notify()
        return [job.handle for job in jobs]

    def register(
        self, name: str, requests: Sequence[Request], sequence: str
    ) -> SetSteps:
        """Declare a tensor set on all ranks."""
        names = [request.name for request in requests]
        others = [r.place for r in requests if r.kind is not CollectiveKind.ALLREDUCE]
        if others or not names or len(set(names)) < len(names):
            found = others[0] if others else f"{len(names)} requests, {names[:8]}"
            raise SpecError(
                f"tensor set {name!r} must hold all-reduces, at least one and each "
                f"name once, got {found}"
            )
        members = tuple(sorted(requests, key=lambda request: request.name))
        request = Request(
            name=f"tensor set {name}",
            kind=CollectiveKind.REGISTER,
            members=members,
            sequence=sequence,
        )
        self.submit([(request, None, None)])[0].wait()
        return self._registered.pop(request.name)

    def require_open(self) -> None:
        """Raise the error that ended the engine, if any."""
        if self.error is not None:
            raise self.error
        if self._closing:
            raise StrettoError("the engine was closed: open a new one")

    def submit_member(self, set_id: int, index: int) -> None:
        """Record that a tensor set's member is ready here."""
        with self._wake:
            self._ledger.submit_member(set_id, index)
            self._news = True
            self._wake.notify()

    def vote(self, set_id: int, *, in_order: bool, whole: bool, unused: int) -> None:
        """Record that all of a tensor set's members are submitted here."""
        with self._wake:
            self._ledger.vote(set_id, in_order=in_order, whole=whole, unused=unused)
            self._news = True
            self._wake.notify()

    def join(self, timeout_s: float | None) -> int:
        """Contribute zeros until all ranks have joined."""
        for tensor_set in tuple(self.sets.values()):
            tensor_set.require_between_steps("join()")
        self.sender.note_current_device()
        for handle in tuple(self._outstanding):
            with contextlib.suppress(RankDisagreement):  # raised to the handle's owner
                handle.wait(timeout_s)
        with self._wake:
            self.require_open()
            if self._join is None:
                self._join = Handle("join")
                self._ledger.join()
            joining = self._join
            self._news = True
            self._wake.notify()
        joining.wait(timeout_s)
        return self._last_joined

    def close(self) -> None:
        """End threads and connections."""
        with self._wake:
            first, self._closing = not self._closing, True
            quiet = self._quiet() and self.error is None
            self._wake.notify()
        if not first:
            return
        mine = threading.current_thread()
        if mine is self._thread or mine.name.startswith("stretto-lane"):
            # The garbage collector may close an engine on any thread, including its
            # own.
            threading.Thread(
                target=self._end,
                args=(quiet,),
                name="stretto-control-end",
                daemon=True,
            ).start()
        else:
            self._end(quiet)

    # Shutdown.

    def use_device(self, place: str, device: torch.device) -> None:
        """Require that a request's device is the one that this rank uses."""
        if self._on_loss is not None:
            raise SpecError(
                f"{place} is on {device}, but this job continues when ranks are lost, "
                "for which tensors must be on the CPU. Start the job with torchrun "
                "instead of `stretto run --elastic`."
            )
        self.sender.use_device(place, device)

    def abort(self, error: StrettoError) -> None:
        """Make everything fail that is under way or comes later; from any thread."""
        with self._wake:  # before threads see their connections end
            self.error = self.error or error
        self._abort()
        self._fail(error)

    def report(self, place: str, cause: BaseException) -> StrettoError:
        """Return the engine's one error, after a failure of its communication."""
        if self._on_loss is not None and self.error is not None:
            # It has ended already, and its store may have been lost.
            self._fail(self.error)
            return self.error
        if not isinstance(cause, StrettoError | RuntimeError):  # not communication
            cause = StrettoError(
                f"{self.ranks.name(self.ranks.rank)}: {place} failed: {cause!r}"
            )
        if self._closing:
            error = StrettoError(f"{place} was not finished: the engine was closed")
        elif isinstance(cause, StrettoError):
            # The first rank to give up reports why, in the same words on all ranks.
            first = self._notes.leave(str(cause))
            error = cause if first == str(cause) else CommTimeout(first)
            with self._wake:  # before threads see their connections end
                self.error = self.error or error
            self._abort()
        else:
            published = None if self._on_loss is not None else self._notes.found()
            if published is None:
                error = self.failures.report(place, cause)
            else:
                self._abort()
                error = CommTimeout(published)
                error.__cause__ = cause
        self._fail(error)
        return self.error or error

    def _fail(self, error: StrettoError) -> None:
        with self._wake:
            if self.error is None:
                self.error = error
            handles = [job.handle for job in self._jobs.values()]
            if self._join is not None:
                handles.append(self._join)
            sets = tuple(self.sets.values())
            self._jobs.clear()
            self._wake.notify()
        for handle in handles:
            handle.fail(self.error)
        for tensor_set in sets:
            tensor_set.fail(self.error)

    def _quiet(self) -> bool:
        """Return whether nothing is under way."""
        self._outstanding = {h for h in self._outstanding if not h.poll()}
        return not self._outstanding and not self._ledger.wants_round()

    def _end(self, quiet: bool) -> None:  # noqa: FBT001
        if self.error is None:
            self._notes.leave(f"{self.ranks.name(self.ranks.rank)} closed its engine")
        if not quiet:
            self._abort()
        self._thread.join(_CLOSE_S)
        closed = StrettoError("the engine was closed before this ended")
        self._fail(closed)
        self.sender.close()
        for tensor_set in tuple(self.sets.values()):
            tensor_set.release()
        self.sets.clear()
        self.control.close()
        if self._pool is not None:
            self._pool.close()

    def _abort(self) -> None:
        if self._pool is not None:
            self._pool.abort()
        self.sender.abort()
        for tensor_set in tuple(self.sets.values()):
            tensor_set.abort()

    # The control thread.

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._round():
                    pass
        except Exception as exc:  # noqa: BLE001
            error = self.report(self._round_place(), exc)
            for job in self._launching.values():
                job.handle.fail(error)

    def _round(self) -> bool:
        if not self._sleep():
            return False
        began_s = perf_counter()
        with self._lock:
            self._pace.begin(began_s)
            self._news = False
            vector = self._ledger.begin()
            added = self._piggyback.load(
                self._ledger.first_ready(_MAX_TRIED), self._jobs
            )
        agreed, rows = self.control.agree(vector, added)
        if rows is not None:
            self._piggyback.unload(rows)
        room = self._ledger.announces(agreed)
        announced = None
        if room:
            announced = self.control.exchange(self._ledger.announcement(), room)
        with self._lock:
            if self._closing or self.error is not None:
                return False
            decisions = self._ledger.finish(agreed, announced)
            jobs = self._launching = self._take(decisions)
            self._pace.end(perf_counter(), launched=bool(decisions))
        if self.observer is not None:
            self.observer.span("rounds", "negotiate", began_s, perf_counter())
        rest, piggybacked = self._piggyback.execute(decisions, jobs, self.ranks.size)
        if piggybacked is not None and self.observer is not None:
            self._note_queued(piggybacked)
            name, kind = piggybacked.request.name, piggybacked.request.kind
            self.observer.span(name, kind, began_s, perf_counter())
        self._execute(rest, jobs)
        self._launching = {}
        if self._stalls.published:
            self._publish()
        return True

    def _sleep(self) -> bool:
        """Sleep until a round is due; return False when the engine ends."""
        while True:
            with self._wake:
                if self._closing or self.error is not None:
                    return False
                if self._ledger.wants_round():
                    due_s = self._pace.due_s(news=self._news)
                    pause_s = due_s - perf_counter()
                    if pause_s <= 0:
                        break
                    self._wake.wait(pause_s)
                else:
                    self._wake.wait(self._tick_s if self._may_publish() else None)
            if perf_counter() > self._ticked_s + self._tick_s:
                self._tick()
        if perf_counter() > self._ticked_s + self._tick_s:
            self._tick()
        return True

    def _take(self, decisions: Sequence[Decision]) -> dict[str, PendingRequest]:
        jobs = {}
        for decision in decisions:
            if not isinstance(decision, Launch | RefuseRequest):
                continue
            name = decision.name
            if name in self._jobs and not self._ledger.is_pending(name):
                jobs[name] = self._jobs.pop(name)
        return jobs

    def _execute(
        self, decisions: Sequence[Decision], jobs: dict[str, PendingRequest]
    ) -> None:
        tensors: list[ReducedTensor] = []
        rest: list[Decision] = []
        for decision in decisions:
            if isinstance(decision, LaunchMembers):
                tensors += self.sets[decision.set_id].ready_tensors(decision.members)
            elif (
                isinstance(decision, Launch)
                and decision.by_rank[0].kind is CollectiveKind.ALLREDUCE
            ):
                tensors.append(self._reduced(decision, jobs.get(decision.name)))
            else:
                rest.append(decision)
        self.sender.reduce(tensors)
        for decision in rest:
            if isinstance(decision, Launch):
                self._launch(decision, jobs.get(decision.name))
            elif isinstance(decision, RefuseRequest):
                if decision.name in jobs:
                    handle = jobs[decision.name].handle
                    handle.fail(RankDisagreement(decision.reason))
            elif isinstance(decision, EndStep):
                self.sets[decision.set_id].end_step(decision, self.control)
            elif isinstance(decision, EndJoin):
                self._end_join(decision)
            elif isinstance(decision, Conflict):
                mine = self._ledger.place(decision.sequence)
                places = self.control.exchange(mine, _PLACE_BYTES)
                raise RankDisagreement(self._ledger.conflict(places))

    def _reduced(self, launch: Launch, job: PendingRequest | None) -> ReducedTensor:
        if job is None:  # this rank has joined
            active = next(r for r in range(self.ranks.size) if r not in launch.joined)
            return ReducedTensor(launch.by_rank[active], None, None, _ignore)
        self._note_queued(job)
        output = job.output
        made: list[Any] = []
        if output is None and job.tensor is not None:
            output = new_shared(job.tensor.shape, job.tensor, made)
        ended = partial(_end_job, job.handle, output)
        return ReducedTensor(job.request, job.tensor, output, ended, job.event, made)

    def _launch(self, launch: Launch, job: PendingRequest | None) -> None:
        request = launch.by_rank[0]
        if job is None:
            return
        if request.kind is CollectiveKind.REGISTER:
            steps = SetSteps(self, launch.set_id, request)
            self.sets[launch.set_id] = self._registered[request.name] = steps
            job.handle.succeed(None)
        elif request.kind is CollectiveKind.UNREGISTER:
            tensor_set = self.sets.pop(request.shape[0])
            tensor_set.release()
            job.handle.succeed(None)
        else:
            self._note_queued(job)
            self.sender.send(job, launch.by_rank)

    def _end_join(self, decision: EndJoin) -> None:
        with self._lock:
            joining, self._join = self._join, None
            self._last_joined = decision.last
        if joining is not None:
            joining.succeed(None)

    def _note_queued(self, job: PendingRequest) -> None:
        if self.observer is not None:
            now_s = perf_counter()
            self.observer.span(job.request.name, "queued", job.submitted_s, now_s)

    # Stalls.

    def _round_place(self) -> str:
        with self._lock:
            waiting = self._waiting()
        if not waiting:
            return "the negotiation"
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        missing = self._stalls.last_missing(waiting[0])
        others = self.ranks.name_all(missing) if missing else "other ranks"
        return f"the wait for {others} to submit {waiting[0]}{more}"

    def _waiting(self) -> list[str]:
        steps = [s.place for s in self.sets.values() if s.waits]
        return [*self._ledger.pending, *steps]

    def _launched(self) -> list[str]:
        """Return what all ranks have submitted, and what has not ended here."""
        places = [s.place for s in self.sets.values() if s.is_launched]
        pending = {job.handle for job in self._jobs.values()}
        handles = self._outstanding - pending
        return sorted(places + [h.place for h in handles if not h.poll()])

    def _may_publish(self) -> bool:
        """Return whether an idle engine has to publish something, or to clear it."""
        if perf_counter() > self._ticked_s + self._tick_s:
            self._outstanding = {h for h in self._outstanding if not h.poll()}
        launched = any(s.is_launched for s in self.sets.values())
        return bool(self._outstanding) or launched or self._stalls.published

    def _publish(self) -> None:
        with self._lock:
            waiting, launched = self._waiting(), self._launched()
        self._stalls.publish(waiting, launched)

    def _tick(self) -> None:
        """Check for stalls about every ``tick_s`` while this rank waits for others."""
        now_s = self._ticked_s = perf_counter()
        self._publish()
        with self._lock:
            jobs = list(self._jobs.values())
            sets = [s for s in self.sets.values() if s.waits]
        since: list[tuple[str, float, PendingRequest | SetSteps]] = [
            (job.request.place, job.submitted_s, job) for job in jobs
        ]
        since += [(s.place, s.waits_since_s, s) for s in sets]
        late: list[tuple[str, float]] = []
        for place, submitted_s, owner in since:
            waited_s = now_s - submitted_s
            if waited_s > self.ranks.timeout_s:
                late.append((place, waited_s))
            if waited_s > self.options.stall_s * (owner.stall_warnings + 1):
                owner.stall_warnings += 1
                self._warn(place, waited_s)
        if late:
            place, waited_s = late[0]
            missing = self._stalls.missing(place)
            who = self.ranks.name_all(missing) if missing else "no rank"
            raise CommTimeout(
                f"{self.ranks.name(self.ranks.rank)}: {place} waited {waited_s:.0f} s, "
                f"longer than timeout_s = {self.ranks.timeout_s:g}: {who} did not "
                f"submit it{self._stalls.instead(missing)}. Make every rank submit the "
                "same collectives, or increase the timeout."
            )

    def _warn(self, place: str, waited_s: float) -> None:
        missing = self._stalls.missing(place)
        if missing:
            _log.warning(
                "%s: %s has waited %.0f s for %s, which did not submit it%s",
                self.ranks.name(self.ranks.rank),
                place,
                waited_s,
                self.ranks.name_all(missing),
                self._stalls.instead(missing),
            )


def _ignore(error: StrettoError | None, events: tuple[Any, ...]) -> None:
    """Ignore the end of a joined rank's zeros: there is no handle for them."""


def _end_job(
    handle: Handle,
    output: torch.Tensor | None,
    error: StrettoError | None,
    events: tuple[Any, ...],
) -> None:
    if error is not None:
        handle.fail(error)
    else:
        handle.succeed(output, events=events)
