"""The state of a cluster: a pure fold of its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from stretto.cluster import events as ev
from stretto.cluster.commands import PROFILE, RUN
from stretto.cluster.devices import Device
from stretto.cluster.records import (
    DONE,
    PAUSED,
    PROFILING,
    RUNNING,
    STARTING,
    STOPPING,
    WAITING,
    Attempt,
    JobRecord,
    Part,
)
from stretto.cluster.views import ClusterView, HostView, JobsView, JobView
from stretto.schema.job import BACKGROUND, FOREGROUND, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stretto.cluster.events import Event


@final
class State:
    """Jobs, attempts, hosts and devices."""

    def __init__(self) -> None:
        self.records: dict[str, JobRecord] = {}
        self.cluster = ClusterView()
        self.jobs = JobsView()
        self.agents: dict[str, int] = {}
        """The last number taken in, by life of an agent."""
        self.agent_of: dict[str, str] = {}
        """The current life of each host's agent."""
        self.lives: dict[str, int] = {}
        """The numbers of these lives."""
        self.fences: dict[str, float] = {}
        """Lost hosts: when their attempts have certainly ended."""
        self.strays: dict[str, dict[tuple[str, int], tuple[int, ...]]] = {}
        """By host: attempts that should not live there, and their devices."""
        self.on_host: dict[str, dict[tuple[str, int], Attempt]] = {}
        """By host: attempts with a part there that has not ended."""
        self.touched: dict[str, None] = {}
        """Jobs to which something happened; the ledger empties it."""
        self.changed = True
        """Something happened that a policy may react to; the ledger resets it."""
        self.dirty: dict[tuple[str, int], Attempt | None] = {}
        """Jobs and attempts that changed since the store's last write, and ``None``
        where a job has no attempt."""
        self.dependents: dict[str, list[str]] = {}
        self.requests: dict[str, str] = {}
        """Jobs by the request that has submitted them."""
        self.last_s = 0.0
        self._handlers: dict[str, Callable[[Event], None]] = {
            ev.SUBMITTED: self._submitted,
            ev.STOP_REQUESTED: self._stop_requested,
            ev.DRAINED: self._drained,
            ev.OPENED: self._drained,
            ev.JOINED: self._joined,
            ev.STARTED: self._started,
            ev.ENDED: self._ended,
            ev.ATTACHED: self._uses,
            ev.DETACHED: self._uses,
            ev.PAUSED: self._paused,
            ev.RESUMED: self._paused,
            ev.STEP: self.show_progress,
            ev.SLOWED: self.show_progress,
            ev.REPLANNED: self.show_progress,
            ev.CHECKPOINTED: self.show_progress,
            ev.PROFILED: self._profiled,
            ev.PLANNED: self._planned,
            ev.PLACED: self._placed,
            ev.ATTACHING: self._attaching,
            ev.DETACHING: self._detaching,
            ev.STOPPING: self._stopping,
            ev.LOST: self._lost,
            ev.REQUEUED: self._requeued,
            ev.DONE: self._finished,
            ev.FAILED: self._finished,
            ev.STOPPED: self._finished,
        }

    def apply(self, event: Event) -> None:
        """Change the state as an event says."""
        self.last_s = max(self.last_s, event.at_s)
        if event.agent:
            self.agents[event.agent] = event.agent_seq
        record = self.records.get(event.job)
        if record is not None:
            self._mark(record)
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event)

    def _mark(self, record: JobRecord) -> None:
        attempt = record.live
        number = attempt.number if attempt else 0
        self.dirty[record.view.id, number] = attempt

    def part(self, event: Event) -> Part | None:
        """Return the live part that an event is about, or ``None``."""
        record = self.records.get(event.job)
        if record is None or record.live is None:
            return None
        if record.live.number != event.attempt:
            return None
        part = record.live.parts.get(event.host)
        return None if part is None or part.has_ended else part

    # Users.

    def _submitted(self, event: Event) -> None:
        spec: Job = event.data["spec"]
        view = JobView(
            id=event.job,
            number=event.data["number"],
            spec=spec,
            role=spec.role,
            minimum=spec.gpus.minimum,
            maximum=spec.gpus.maximum,
            priority=spec.priority,
            submitted_s=event.at_s,
            ready_s=event.at_s,
            speeds=event.data.get("speeds"),
        )
        after = tuple(event.data.get("after", ()))
        record = JobRecord(view=view, after=after)
        self.records[event.job] = record
        if request := event.data.get("request"):
            self.requests[request] = event.job
        self._mark(record)
        for name in after:
            if self.records[name].view.state != DONE:
                record.blocked_by.add(name)
                self.dependents.setdefault(name, []).append(event.job)
        burst = spec.burst
        if burst is not None and view.speeds is None:
            if burst.profile is None:
                view.minimum = view.maximum = 1
                view.is_profiling, view.state = True, PROFILING
            else:
                record.profile, record.needs_plan = burst.profile, True
                view.state = PROFILING
        else:
            view.state = WAITING
        self._enqueue(record, event.at_s)

    def withdraw(self, job: str) -> None:
        """Undo `events.SUBMITTED` of the last job, before any other event."""
        record = self.records.pop(job)
        if record.in_queue:
            self.jobs.remove_waiting(record.view)
        for name in record.blocked_by:
            self.dependents[name].remove(job)
        self.touched.pop(job, None)
        self.dirty.pop((job, 0), None)
        self.requests = {r: made for r, made in self.requests.items() if made != job}

    def _stop_requested(self, event: Event) -> None:
        self.records[event.job].stop_requested = event.data.get("by") or "a user"
        self.touched[event.job] = None

    def _drained(self, event: Event) -> None:
        host = self.cluster.hosts[event.host]
        host.is_drained = event.kind == ev.DRAINED
        # Earlier stores only say who drained it.
        ends = event.data.get("ends", event.data.get("by") == "down")
        host.is_ending = host.is_drained and bool(ends)
        self._refresh(event.host)

    # Agents.

    def _joined(self, event: Event) -> None:
        name = event.host
        sizes = tuple(
            row.get("memory_bytes", 0)
            for row in sorted(event.data["devices"], key=lambda row: row["index"])
        )
        host = self.cluster.hosts.get(name)
        if host is None:
            self.cluster.hosts[name] = HostView(name=name, memory_bytes=sizes)
        else:
            host.memory_bytes, host.is_up = sizes, True
        self.agent_of[name] = event.agent
        self.lives[name] = event.data["life"]
        self.fences.pop(name, None)
        seen: set[tuple[str, int]] = set()
        strays: dict[tuple[str, int], tuple[int, ...]] = {}
        here = self.on_host.setdefault(name, {})
        for row in event.data["attempts"]:
            key = (row["job"], row["attempt"])
            seen.add(key)
            attempt = here.get(key)
            if row["state"] == "ended":
                if attempt is not None:
                    self._end_part(attempt, name, row)
                else:
                    self._ended_late(key, name, row)
            elif attempt is None:
                strays[key] = tuple(row["devices"])
            else:
                part = attempt.parts[name]
                part.is_started = True
                part.uses = tuple(row["devices"])
                self._show_running(attempt)
        self.strays[name] = strays
        for key, attempt in list(here.items()):
            if key not in seen and attempt.parts[name].is_started:
                why = f"no process of it was left when {name} joined"
                self._end_part(attempt, name, {"why": why})
        self._refresh(name)

    def _started(self, event: Event) -> None:
        part = self.part(event)
        if part is None:
            return
        attempt = self.records[event.job].live
        if attempt is None:
            return
        part.is_started = True
        devices = event.data.get("devices")
        if devices is not None:
            part.uses = tuple(devices)
        elif set(part.held) == set(part.wanted):
            part.uses = part.wanted
        self._show_running(attempt)

    def _show_running(self, attempt: Attempt) -> None:
        view = self.records[attempt.job].view
        if view.state == STARTING and all(
            part.is_started or part.has_ended for part in attempt.parts.values()
        ):
            view.state = RUNNING

    def _ended(self, event: Event) -> None:
        key = (event.job, event.attempt)
        strays = self.strays.get(event.host, {})
        if key in strays:
            del strays[key]
            self._refresh(event.host)
        attempt = self.on_host.get(event.host, {}).get(key)
        if attempt is not None:
            self._end_part(attempt, event.host, event.data)
        else:
            self._ended_late(key, event.host, event.data)

    def _ended_late(
        self, key: tuple[str, int], host: str, data: Mapping[str, Any]
    ) -> None:
        """Note the success of a part that counts as lost: it need not run again."""
        record = self.records.get(key[0])
        if record is None or not record.attempts:
            return
        attempt = record.attempts[-1]
        part = attempt.parts.get(host)
        if attempt.number != key[1] or part is None or part.code is not None:
            return
        if part.has_ended and data.get("code") == 0 and not data.get("signaled", True):
            part.code, part.by_itself, part.why = 0, True, ""
            self.dirty[attempt.job, attempt.number] = attempt
            self.touched[attempt.job] = None

    def _end_part(self, attempt: Attempt, host: str, data: Mapping[str, Any]) -> None:
        self.dirty[attempt.job, attempt.number] = attempt
        part = attempt.parts[host]
        part.has_ended, part.code = True, data.get("code")
        part.why = data.get("why", "")
        asked = bool(attempt.stopping) or part.is_released
        part.by_itself = part.code is not None and not data.get("signaled", asked)
        del self.on_host[host][attempt.job, attempt.number]
        view = self.records[attempt.job].view
        if not attempt.stopping and not part.is_released:
            self.jobs.set_stopping(view)
        self._release(view, host, part.held)
        part.held = part.wanted = ()
        self.touched[attempt.job] = None
        if view.is_silent:
            self._show_silence(attempt)
        self._show_running(attempt)

    def _uses(self, event: Event) -> None:
        part, attempt = self.part(event), self.records[event.job].live
        if part is None or attempt is None:
            return
        part.uses = tuple(event.data["devices"])
        left = set(part.held) - set(part.uses) - set(part.wanted)
        self._release(self.records[event.job].view, event.host, left)
        part.held = tuple(n for n in part.held if n not in left)
        self.changed = True

    def _paused(self, event: Event) -> None:
        view = self.records[event.job].view
        before, after = (RUNNING, PAUSED)
        if event.kind == ev.RESUMED:
            before, after = after, before
        if view.state == before:
            view.state = after

    def show_progress(self, event: Event) -> None:
        """Show the last report of a kind of a job."""
        self.records[event.job].progress[event.kind] = {
            "at_s": event.at_s,
            **event.data,
        }

    def _profiled(self, event: Event) -> None:
        self.records[event.job].profile = event.data["profile"]

    # The coordinator's planner and the ledger.

    def _planned(self, event: Event) -> None:
        record = self.records[event.job]
        view = record.view
        record.needs_plan = False
        record.why = event.data.get("why", "")
        view.speeds = event.data.get("speeds")
        self._as_submitted(view)
        view.state = WAITING
        self._enqueue(record, event.at_s)

    @staticmethod
    def _as_submitted(view: JobView) -> None:
        view.is_profiling = False
        view.minimum, view.maximum = view.spec.gpus.minimum, view.spec.gpus.maximum

    def _placed(self, event: Event) -> None:
        record = self.records[event.job]
        view = record.view
        if record.in_queue:
            self.jobs.remove_waiting(view)
            record.in_queue = False
        view.role = event.data.get("role") or _former_role(event, view)
        devices = tuple(map(_device, event.data["devices"]))
        attempt = Attempt(
            job=event.job,
            number=event.attempt,
            purpose=event.data.get("purpose", RUN),
            method=event.data["method"],
            batch=event.data["batch"],
            placed_s=event.at_s,
            parts={},
        )
        for host, numbers in by_host(devices).items():
            self._add_part(attempt, host, numbers)
        record.live = attempt
        record.progress.pop(ev.REPLANNED, None)
        record.attempts.append(attempt)
        self._mark(record)
        record.num_runs += attempt.purpose == RUN
        view.devices, view.attempt = devices, event.attempt
        view.method, view.batch, view.placed_s = (
            attempt.method,
            attempt.batch,
            event.at_s,
        )
        view.state = STARTING
        view.speed, view.beside = None, 0
        if view.speeds is not None and view.role == FOREGROUND:
            view.speed = view.speeds.at(attempt.method, len(devices))
        self._occupy(view, devices)
        self.jobs.add_live(view)

    def _add_part(self, attempt: Attempt, host: str, numbers: tuple[int, ...]) -> None:
        others = (part for name, part in attempt.parts.items() if name != host)
        first = sum(part.num_ranks for part in others)
        attempt.parts[host] = Part(
            host=host,
            first_rank=first,
            wanted=numbers,
            num_ranks=len(numbers),
            held=numbers,
        )
        self.on_host[host][attempt.job, attempt.number] = attempt

    def _occupy(self, view: JobView, devices: Sequence[Device]) -> None:
        cluster = self.cluster
        if view.role == FOREGROUND:
            for rank, device in enumerate(devices):
                cluster.foreground[device] = view
                cluster.ranks[device] = rank
                if device in cluster.background:
                    view.beside |= 1 << rank
        else:
            for device in devices:
                cluster.background[device] = view
                self._show_beside(device, is_there=True)
        cluster.free.take(devices, foreground=view.role == FOREGROUND)
        self.changed = True

    def _release(self, view: JobView, host: str, numbers: Iterable[int]) -> None:
        cluster, is_foreground = self.cluster, view.role == FOREGROUND
        known = cluster.free.devices_of(host)
        devices = [known[number] for number in numbers]
        for device in devices:
            if is_foreground:
                del cluster.foreground[device], cluster.ranks[device]
            else:
                del cluster.background[device]
                self._show_beside(device, is_there=False)
        cluster.free.release(devices, foreground=is_foreground)
        self.changed = True

    def _show_beside(self, device: Device, *, is_there: bool) -> None:
        """Show a foreground what is beside one of its ranks."""
        foreground = self.cluster.foreground.get(device)
        if foreground is not None:
            bit = 1 << self.cluster.ranks[device]
            beside = foreground.beside | bit if is_there else foreground.beside & ~bit
            self.jobs.set_beside(foreground, beside)

    def _attaching(self, event: Event) -> None:
        record = self.records[event.job]
        attempt = record.live
        if attempt is None:
            return
        devices = tuple(Device(*pair) for pair in event.data["devices"])
        for host, numbers in by_host(devices).items():
            part = attempt.parts.get(host)
            if part is None or part.has_ended:
                self._add_part(attempt, host, numbers)
            else:
                part.wanted += numbers
                part.num_ranks = len(part.wanted)
                part.held += tuple(n for n in numbers if n not in part.held)
        record.view.devices += devices
        self.jobs.show_growth(record.view)
        self._occupy(record.view, devices)

    def _detaching(self, event: Event) -> None:
        record = self.records[event.job]
        attempt = record.live
        if attempt is None:
            return
        devices = tuple(Device(*pair) for pair in event.data["devices"])
        for host, numbers in by_host(devices).items():
            part = attempt.parts[host]
            part.wanted = tuple(n for n in part.wanted if n not in numbers)
            part.num_ranks = len(part.wanted)
            part.is_released = not part.wanted
        left = set(devices)
        record.view.devices = tuple(d for d in record.view.devices if d not in left)
        self.jobs.show_growth(record.view)
        self.changed = True

    def _stopping(self, event: Event) -> None:
        record = self.records[event.job]
        if record.live is not None:
            record.live.stopping = event.data["why"]
            record.live.then = event.data["then"]
            record.view.state = STOPPING
            self.jobs.set_stopping(record.view)
            self.changed = True

    def _lost(self, event: Event) -> None:
        if event.job:
            attempt = self.on_host[event.host][event.job, event.attempt]
            self._end_part(attempt, event.host, {"why": event.data["why"]})
            return
        self.cluster.hosts[event.host].is_up = False
        self.fences[event.host] = event.data["fence_s"]
        self._refresh(event.host)

    def _requeued(self, event: Event) -> None:
        record = self.records[event.job]
        view = record.view
        self._no_attempt(record)
        view.role = view.spec.role
        record.why = event.data["why"]
        view.failures = event.data["failures"]
        if event.data.get("unprofiled"):
            self._as_submitted(view)
        record.needs_plan = view.is_profiling and bool(record.profile)
        view.state = PROFILING if view.is_profiling else WAITING
        view.ready_s = record.not_before_s = event.data["ready_s"]
        self._enqueue(record, event.at_s)

    def _finished(self, event: Event) -> None:
        record = self.records[event.job]
        if record.in_queue:
            self.jobs.remove_waiting(record.view)
            record.in_queue = False
        self._no_attempt(record)
        record.view.state = event.kind
        record.why = event.data.get("why", "")
        record.code = 0 if event.kind == ev.DONE else event.data.get("code")
        record.ended_s = event.at_s
        record.needs_plan = False
        for name in self.dependents.pop(event.job, ()):
            waiting = self.records[name]
            if event.kind == ev.DONE:
                waiting.blocked_by.discard(event.job)
                waiting.view.ready_s = event.at_s
                self._enqueue(waiting, event.at_s)
            self.touched[name] = None

    def _no_attempt(self, record: JobRecord) -> None:
        if record.live is not None:
            record.live.has_ended = True
            record.live = None
            record.view.devices = ()
            self.jobs.remove_live(record.view)
        self.changed = True

    def _enqueue(self, record: JobRecord, now_s: float) -> None:
        """Show a job to policies if it can start now, else the ledger does it later."""
        if self.can_start(record, now_s):
            self.enqueue(record)
        self.touched[record.view.id] = None

    def can_start(self, record: JobRecord, now_s: float) -> bool:
        """Return whether only devices are missing."""
        return (
            record.live is None
            and not record.in_queue
            and not record.blocked_by
            and not record.needs_plan
            and not record.stop_requested
            and record.not_before_s <= now_s
            and record.view.state in (WAITING, PROFILING)
        )

    def enqueue(self, record: JobRecord) -> None:
        """Show a job to policies."""
        record.in_queue = True
        self.jobs.add_waiting(record.view)
        self.changed = True

    def _refresh(self, name: str) -> None:
        """Recompute which devices of a host may be used."""
        host = self.cluster.hosts[name]
        usable = 0
        if host.is_up and not host.is_drained:
            usable = (1 << len(host.memory_bytes)) - 1
            for numbers in self.strays.get(name, {}).values():
                usable &= ~sum(1 << number for number in numbers)
        self.cluster.free.set_host(name, host.memory_bytes, usable)
        self.on_host.setdefault(name, {})
        for (job, _), attempt in self.on_host[name].items():
            self.touched[job] = None
            self._show_silence(attempt)
        self.changed = True

    def _show_silence(self, attempt: Attempt) -> None:
        """Show whether a part of an attempt is on a host that is lost."""
        hosts = self.cluster.hosts
        view = self.records[attempt.job].view
        parts = attempt.parts.values()
        silent = any(
            not part.has_ended and not hosts[part.host].is_up for part in parts
        )
        if silent != view.is_silent:
            view.is_silent = silent
            self.jobs.show_growth(view)


def _former_role(event: Event, view: JobView) -> str:
    """Return the role of an attempt of an earlier store, which does not name it.

    Jobs were profiled as backgrounds, also beside a foreground.
    """
    is_profile = event.data.get("purpose") == PROFILE
    return BACKGROUND if is_profile else view.spec.role


def _device(pair: Sequence[Any]) -> Device:
    """Return a device of an event, which is a list if the event was kept."""
    return pair if isinstance(pair, Device) else Device(*pair)


def by_host(devices: Sequence[Device]) -> dict[str, tuple[int, ...]]:
    """Return the numbers of devices by host, both in their first order."""
    if len(devices) == 1:
        return {devices[0].host: (devices[0].number,)}
    found: dict[str, list[int]] = {}
    for device in devices:
        found.setdefault(device.host, []).append(device.number)
    return {host: tuple(numbers) for host, numbers in found.items()}
