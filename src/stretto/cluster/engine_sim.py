"""A cluster in virtual time: the ledger and its policy, and jobs that only take time.

# Note [How fast jobs run]
A foreground's rate is its speed-up on its devices, by the method that the policy chose,
less the loss if a background is beside a rank that computes. A background has rate 1 on
a device without a foreground and on a rank that the plan never uses, else the measured
rate beside that rank, and 0 if nothing was measured. Work is in seconds of one device.
Stopping takes no time and loses nothing but ``start_s`` at the next start.
"""

from __future__ import annotations

import gc
import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from stretto.cluster import events as ev
from stretto.cluster.events import Event
from stretto.cluster.ledger import Ledger, Limits
from stretto.cluster.policies.offers import NEVER_USED
from stretto.cluster.state import by_host
from stretto.cluster.views import DATA_PARALLEL, JobView, Speeds
from stretto.schema.job import BACKGROUND, FOREGROUND, Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.cluster.devices import Device
    from stretto.cluster.policies.base import AbstractPolicy
    from stretto.cluster.views import Speed

_LIMITS = Limits(silent_s=float("inf"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A job to simulate."""

    spec: Job

    submit_s: float

    work_s: float
    """Time that it would take on one device with its own batch."""

    speeds: Speeds | None = None
    """``None``: it is as many times as fast as it has devices."""


@final
@dataclass(slots=True, eq=False)
class _Run:
    """One job's progress."""

    job: SimulatedJob
    view: JobView
    left_s: float
    rate: float = 0.0
    since_s: float = 0.0
    start_left_s: float = 0.0
    """Start-up that is left before progress begins."""
    version: int = 0
    """Increases with each change of rate, so that an older end is ignored."""
    alone: int = 0
    beside: float = 0.0
    first_s: float | None = None
    end_s: float | None = None
    preemptions: int = 0
    held_s: float = 0.0
    """Devices times time, of devices that it had for itself as its role."""
    beside_s: float = 0.0
    """Work done beside a foreground, in seconds that it takes one device alone."""
    loss_s: float = 0.0
    waited_s: float = 0.0
    wait_since_s: float = 0.0


@final
@dataclass(slots=True, kw_only=True)
class JobResult:
    """One job's times and work in a simulation."""

    id: str
    role: str
    submit_s: float
    first_s: float | None
    """When it first started; ``None``: never."""
    end_s: float | None
    """``None``: it did not end."""
    waited_s: float
    preemptions: int
    work_s: float
    left_s: float
    held_s: float
    beside_s: float
    loss_s: float


@final
@dataclass(slots=True, kw_only=True)
class SimulatedCluster:
    """Results of all jobs under one policy."""

    policy: str
    gpus: int
    end_s: float
    jobs: list[JobResult] = field(default_factory=list)


def simulate(
    jobs: Sequence[SimulatedJob],
    policy: AbstractPolicy,
    *,
    gpus: int,
    gpus_per_host: int = 8,
    start_s: float = 0.0,
) -> SimulatedCluster:
    """Run jobs, in the order of their submission, until all have ended or starve.

    Args:
        jobs: by ascending ``submit_s``.
        policy: decides as on a real cluster.
        gpus: devices of the cluster; the last host may have fewer than the others.
        gpus_per_host: devices of a host.
        start_s: time from a start until a job makes progress.
    """
    # fast: nothing here is in a circle, and collections visit every job again
    collects = gc.isenabled()
    gc.disable()
    try:
        return _Simulation(policy, gpus, gpus_per_host, start_s).run(jobs)
    finally:
        if collects:
            gc.enable()


@final
class _Simulation:
    def __init__(
        self, policy: AbstractPolicy, gpus: int, gpus_per_host: int, start_s: float
    ) -> None:
        self._ledger = Ledger(policy, _LIMITS)
        self._policy, self._gpus, self._start_s = policy, gpus, start_s
        self._now_s = 0.0
        self._runs: dict[str, _Run] = {}
        self._ends: list[tuple[float, int, int, _Run]] = []
        self._changed: dict[str, _Run] = {}
        for number, first in enumerate(range(0, gpus, gpus_per_host)):
            size = min(gpus_per_host, gpus - first)
            devices = [{"index": i, "memory_bytes": 0} for i in range(size)]
            data = {"life": 1, "devices": devices, "attempts": []}
            name = f"h{number}"
            self._ledger.offer(Event(ev.JOINED, 0.0, host=name, data=data))

    def run(self, jobs: Sequence[SimulatedJob]) -> SimulatedCluster:
        at = 0
        while True:
            next_s = self._next_s(jobs, at)
            if next_s is None:
                break
            self._now_s = next_s
            while self._ends and self._ends[0][0] <= next_s:
                _, _, version, run = heapq.heappop(self._ends)
                if version == run.version:
                    self._end(run, code=0)
            while at < len(jobs) and jobs[at].submit_s <= next_s:
                self._submit(jobs[at], at)
                at += 1
            self._decide()
        return SimulatedCluster(
            policy=self._policy.name,
            gpus=self._gpus,
            end_s=self._now_s,
            jobs=[self._result(run) for run in self._runs.values()],
        )

    def _next_s(self, jobs: Sequence[SimulatedJob], at: int) -> float | None:
        """Return the time of the next end, submission or decision."""
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heapq.heappop(ends)
        times = [jobs[at].submit_s] if at < len(jobs) else []
        if ends:
            times.append(ends[0][0])
        timer_s = self._ledger.next_s()
        if timer_s is not None and timer_s > self._now_s:
            times.append(timer_s)
        return min(times, default=None)

    def _submit(self, job: SimulatedJob, number: int) -> None:
        name = f"j{number}"
        data = {"spec": job.spec, "number": number + 1, "speeds": job.speeds}
        self._ledger.take(Event(ev.SUBMITTED, self._now_s, job=name, data=data))
        view = self._ledger.job(name)
        run = _Run(job, view, job.work_s)
        run.wait_since_s = self._now_s
        self._runs[name] = run

    def _decide(self) -> None:
        """Let the ledger decide, and do what it wants, until it wants nothing."""
        again = True
        while again:
            again = False
            for event in self._ledger.decide(self._now_s):
                if event.kind == ev.PLACED:
                    self._started(self._runs[event.job])
                elif event.kind == ev.STOPPING:
                    run, again = self._runs[event.job], True
                    run.preemptions += 1
                    self._end(run, code=143)
                elif event.kind == ev.ATTACHING:
                    self._mark(self._runs[event.job])
                elif event.kind == ev.DETACHING:
                    again = True
                    self._detached(event)
            self._refresh()

    def _started(self, run: _Run) -> None:
        if run.first_s is None:
            run.first_s = self._now_s
        run.waited_s += self._now_s - run.wait_since_s
        run.start_left_s = self._start_s
        run.since_s = self._now_s
        self._mark(run)

    def _end(self, run: _Run, *, code: int) -> None:
        """End a job's attempt on all its hosts, by itself or because it was stopped."""
        self._settle(run)
        self._mark_others(run)
        run.version += 1
        run.rate, run.alone, run.beside = 0.0, 0, 0.0
        self._changed.pop(run.view.id, None)
        if code == 0:
            run.left_s, run.end_s = 0.0, self._now_s
        run.wait_since_s = self._now_s
        data: dict[str, Any] = {"code": code, "signaled": code != 0}
        view = run.view
        for host in by_host(view.devices):
            self._ledger.offer(
                Event(ev.ENDED, self._now_s, view.id, view.attempt, host, data)
            )

    def _detached(self, event: Event) -> None:
        run = self._runs[event.job]
        view = run.view
        gone = by_host(event.data["devices"])
        left = by_host(view.devices) if view.devices else {}
        for device in event.data["devices"]:
            self._mark_beside(device)
        for host in gone:
            kind = ev.ENDED
            data: dict[str, Any] = {"code": 143, "signaled": True}
            if host in left:
                kind, data = ev.DETACHED, {"devices": list(left[host])}
            self._ledger.offer(
                Event(kind, self._now_s, event.job, event.attempt, host, data)
            )
        self._mark(run)

    # Rates.

    def _mark(self, run: _Run) -> None:
        """Record that the rates of a job, and of those on its devices, change."""
        self._changed[run.view.id] = run
        self._mark_others(run)

    def _mark_others(self, run: _Run) -> None:
        cluster = self._ledger.cluster
        others = cluster.background
        if run.view.role == BACKGROUND:
            others = cluster.foreground
        for device in run.view.devices:
            other = others.get(device)
            if other is not None:
                self._changed[other.id] = self._runs[other.id]

    def _mark_beside(self, device: Device) -> None:
        other = self._ledger.cluster.foreground.get(device)
        if other is not None:
            self._changed[other.id] = self._runs[other.id]

    def _refresh(self) -> None:
        """Recompute the rates of the jobs that were marked."""
        changed, self._changed = self._changed, {}
        for run in changed.values():
            if not run.view.devices:
                continue
            self._settle(run)
            if run.view.role == FOREGROUND:
                self._foreground_rate(run)
            else:
                self._background_rate(run)
            run.version += 1
            if run.rate > 0:
                end_s = self._now_s + run.start_left_s + run.left_s / run.rate
                heapq.heappush(self._ends, (end_s, run.view.number, run.version, run))

    def _foreground_rate(self, run: _Run) -> None:
        view, speed = run.view, run.view.speed
        run.alone = len(view.devices)
        run.rate = float(run.alone) if speed is None else speed.speedup
        run.beside = 0.0
        if speed is not None and speed.loss > 0 and view.beside:
            ranks = range(len(view.devices))
            if any(view.beside >> r & 1 and not is_unused(speed, r) for r in ranks):
                run.beside = speed.loss
                run.rate *= 1.0 - speed.loss

    def _background_rate(self, run: _Run) -> None:
        cluster = self._ledger.cluster
        run.alone, run.beside = 0, 0.0
        for device in run.view.devices:
            foreground = cluster.foreground.get(device)
            if foreground is None:
                run.alone += 1
            else:
                run.beside += beside_rate(foreground.speed, cluster.ranks[device])
        run.rate = run.alone + run.beside

    def _settle(self, run: _Run) -> None:
        """Add up what a job did since its rate last changed."""
        passed_s = self._now_s - run.since_s
        run.since_s = self._now_s
        if passed_s <= 0:
            return
        run.held_s += run.alone * passed_s
        start_s = min(run.start_left_s, passed_s)
        run.start_left_s -= start_s
        active_s = passed_s - start_s
        run.left_s = max(0.0, run.left_s - run.rate * active_s)
        if run.view.role == BACKGROUND:
            run.beside_s += run.beside * active_s
        else:
            run.loss_s += run.beside * active_s

    def _result(self, run: _Run) -> JobResult:
        self._settle(run)
        waits = run.end_s is None and not run.view.devices
        return JobResult(
            id=run.view.id,
            role=run.job.spec.role,
            submit_s=run.job.submit_s,
            first_s=run.first_s,
            end_s=run.end_s,
            waited_s=run.waited_s + (self._now_s - run.wait_since_s if waits else 0.0),
            preemptions=run.preemptions,
            work_s=run.job.work_s,
            left_s=run.left_s,
            held_s=run.held_s,
            beside_s=run.beside_s,
            loss_s=run.loss_s,
        )


def is_unused(speed: Speed, rank: int) -> bool:
    """Return whether a plan computes nothing on a rank."""
    return rank < len(speed.idle_ratios) and speed.idle_ratios[rank] >= NEVER_USED


def beside_rate(speed: Speed | None, rank: int) -> float:
    """Return a background's rate beside a rank; 0 if it is not known."""
    if speed is None:
        return 0.0
    if is_unused(speed, rank):
        return 1.0
    return speed.background[rank] if rank < len(speed.background) else 0.0


def work_of(duration_s: float, gpus: int, speeds: Speeds | None) -> float:
    """Return the work of a job that took some time, data parallel on some devices."""
    speed = None if speeds is None else speeds.at(DATA_PARALLEL, gpus)
    return duration_s * (gpus if speed is None else speed.speedup)


def total(jobs: Iterable[JobResult], role: str, name: str) -> float:
    """Return the sum of a figure over the jobs of a role."""
    return float(sum(getattr(job, name) for job in jobs if job.role == role))
