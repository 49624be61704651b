"""The core of a cluster: events in, commands out. It does no I/O and reads no clock.

# Note [The contract]
An engine (local processes, Ray, virtual time) does, in one thread:

    ledger = Ledger(policy)
    for event in store.events():
        ledger.apply(event)                  # a restart
    ...
    events = ledger.offer(event)             # what an agent or user reports
    events += ledger.decide(now_s)           # what follows from it
    store.append(events, ledger.state)       # first kept,
    for command in ledger.commands(host):    # then executed
        send(command)

`coordinator.Coordinator` is this loop with the store's failures handled; engines use
that. `offer` returns nothing for a duplicate, a gap or a report that no longer counts.
Every returned event is applied already. `apply` is a pure fold: the state is what the
events say, and commands are computed from the state. A command stays outstanding until
an event shows its effect, so engines may send all outstanding commands with every
answer to a heartbeat, and a restarted coordinator sends them again.

`heard` records a heartbeat. It is not an event; after a restart a host counts as heard
at that time, which only lengthens a fence.

# Note [Attempts and fences]
Each start of a job is an attempt, numbered from 1, and (job, attempt) is its fence. An
attempt has a part on each of its hosts. A part has ended when its host reports it
(`ENDED`, or `JOINED` without it), or when the host was silent for the watchdog's time
and a margin: supervisors end their ranks when they have no contact for that time, from
when the last acknowledged heartbeat was sent. A part's devices are free when it has
ended; the job waits again, or ends, when all parts have. So two attempts never live at
once, and no device has two jobs of a role.

# Note [What agents must do]
An agent sends one request at a time, with all its events that are not acknowledged,
oldest first, and drops answers to earlier requests. It executes the commands of an
answer only if it sent the request less than `watchdog_s` ago; that sending is then
its last contact. Its host's supervisors end their ranks `watchdog_s` after the last
contact, even if the agent has ended. An agent that must join (`coordinator.Answer`)
reports `JOINED` next. It keeps the record of an ended attempt until `ENDED` is
acknowledged.

# Note [How an attempt ends]
All ranks ended with 0: `DONE`. A rank failed: the other parts are stopped; then
`REQUEUED` after a backoff, or `FAILED` if no restart is left. Preempted, resized,
drained or a host lost: `REQUEUED` at once, and no restart is counted. Requested by a
user: `STOPPED`.

# Note [States of a job]
submitted -> profiling -> planned -> waiting -> starting -> running (or paused) ->
stopping -> waiting | done | failed | stopped. Jobs without a burst plan, and those with
a profile, are not profiled. `Ledger.reason` says why a job waits.
"""

from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from stretto.cluster import events as ev
from stretto.cluster import outstanding
from stretto.cluster.consequences import follows
from stretto.cluster.decisions import event_of
from stretto.cluster.events import Event
from stretto.cluster.policies.base import devices_text
from stretto.cluster.records import ENDS
from stretto.cluster.state import State
from stretto.errors import Infeasible, SpecError
from stretto.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.cluster.commands import Command
    from stretto.cluster.policies.base import AbstractPolicy
    from stretto.cluster.records import JobRecord
    from stretto.cluster.views import ClusterView, HostView, JobView
    from stretto.schema.job import Job

_logger = logging.getLogger(__name__)

_MAX_ROUNDS = 16
"""After this number of rounds, a policy that still decides something is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times that the ledger, agents and supervisors share."""

    silent_s: float = 4.0
    """A host without a heartbeat for so long is lost."""

    watchdog_s: float = 60.0
    """Supervisors end their ranks after so long without contact."""

    margin_s: float = 10.0
    """Added to `watchdog_s` before an attempt on a silent host counts as ended."""


@final
class Ledger:
    """All jobs, attempts and devices of a cluster. Not thread-safe."""

    def __init__(self, policy: AbstractPolicy, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self.state = State()
        self.gone: frozenset[str] = frozenset()
        """Hosts that were known once and will not return, as the engine says."""
        self.first_number = 1
        """The first job's number in a store without jobs."""
        self.refused_decision = ""
        """The last decision of the policy that broke a rule; empty if none did."""
        self._policy = policy
        self._heard: dict[str, float] = {}
        self._delayed: list[tuple[float, int, str]] = []
        self._policy_s: float | None = None

    def take(self, event: Event) -> None:
        """Take in a submission that needs no check and is not kept, as in a trace."""
        self.state.apply(event)

    # What users want.

    def submit(
        self, spec: Job, now_s: float, *, user: str = "", request: str = ""
    ) -> list[Event]:
        """Add a job; the first returned event's ``job`` is its id.

        Raises:
            Infeasible: it can never fit.
            SpecError: it must start after an unknown job.
        """
        self._check_fits(spec)
        after = tuple(self.job(name).id for name in spec.after)
        last = next(reversed(self.state.records.values()), None)
        number = self.first_number if last is None else last.view.number + 1
        spec = replace(spec, user=user) if user else spec
        data: dict[str, Any] = {"spec": spec, "number": number}
        if request:
            data["request"] = request
        if after:
            data["after"] = after
        name = f"{spec.name}-{number}"
        return self._applied([Event(ev.SUBMITTED, now_s, job=name, data=data)])

    def withdraw(self, job: str) -> None:
        """Undo the submission that was the last thing to happen."""
        self.state.withdraw(job)

    def stop(self, job: str, now_s: float, *, user: str = "") -> list[Event]:
        """Ask a job to end; nothing happens if it has ended, or was asked already.

        Raises:
            SpecError: there is no such job.
        """
        record = self.state.records[self.job(job).id]
        if record.stop_requested or record.view.state in ENDS:
            return []
        event = Event(
            ev.STOP_REQUESTED, now_s, job=record.view.id, data={"by": user or "a user"}
        )
        return self._applied([event])

    def drain(
        self, host: str, now_s: float, *, user: str = "", ends: bool = False
    ) -> list[Event]:
        """Move a host's attempts, and start nothing new there.

        Args:
            host: its name.
            now_s: the time.
            user: who wants it.
            ends: it is because the cluster ends; a host that a user has drained stays
                so afterwards.

        Raises:
            SpecError: there is no such host.
        """
        found = self._host(host)
        if found.is_drained and (ends or not found.is_ending):
            return []
        data = {"by": user, "ends": ends}
        return self._applied([Event(ev.DRAINED, now_s, host=host, data=data)])

    def open(self, host: str, now_s: float, *, user: str = "") -> list[Event]:
        """Use a drained host again.

        Raises:
            SpecError: there is no such host.
        """
        if not self._host(host).is_drained:
            return []
        return self._applied([Event(ev.OPENED, now_s, host=host, data={"by": user})])

    def _host(self, host: str) -> HostView:
        found = self.cluster.hosts.get(host)
        if found is None:
            names = ", ".join(self.cluster.hosts) or "none has joined"
            raise SpecError(f"host {host!r:.80} is unknown; hosts: {names}")
        return found

    def _check_fits(self, spec: Job) -> None:
        """Refuse what the known hosts could not run even if they were empty."""
        known = self.cluster.hosts.values()
        hosts = [host for host in known if host.name not in self.gone]
        if not hosts:
            return
        need, size = spec.gpus.minimum, spec.memory_bytes
        large = sum(
            1 for h in hosts for has in h.memory_bytes if not has or has >= size
        )
        if need > large:
            devices = sum(len(h.memory_bytes) for h in hosts)
            of = f"{large} of that memory" if large < devices else str(devices)
            raise Infeasible(
                f"job {spec.name!r} needs {counted(need, 'device')}"
                + (f" with {size} bytes of memory" if size else "")
                + f", the cluster has {of}: ask for fewer, or add hosts"
            )
        devices = sum(len(host.memory_bytes) for host in hosts)
        limit = self._policy.limit(spec.role, devices)
        if need > limit:
            raise Infeasible(
                f"job {spec.name!r} needs {counted(need, 'device')}, policy "
                f"{self._policy.name} gives {spec.role}s {limit} of {devices}: ask for "
                "fewer, or start the cluster with another policy"
            )

    # What agents report.

    def offer(self, event: Event) -> list[Event]:
        """Take in what an agent or the planner reports, and return what to keep."""
        if event.agent:
            if event.agent_seq <= self.state.agents.get(event.agent, 0):
                return []
            if event.kind != ev.JOINED and not self.is_current(event.host, event.agent):
                return []
        if not self._counts(event):
            self.state.agents[event.agent] = event.agent_seq
            return []
        if event.kind == ev.JOINED:
            self.heard(event.host, event.at_s)
        return self._applied([event])

    def is_current(self, host: str, agent: str) -> bool:
        """Return whether events of a life of an agent count; else it must join."""
        known = self.cluster.hosts.get(host)
        return known is not None and known.is_up and self.state.agent_of[host] == agent

    def _counts(self, event: Event) -> bool:
        """Return whether a report changes anything."""
        if event.kind == ev.JOINED:
            life = int(event.data["life"])
            return self.state.lives.get(event.host, life) <= life
        if event.kind == ev.PLANNED:
            record = self.state.records.get(event.job)
            return record is not None and record.needs_plan
        part = self.state.part(event)
        if part is None:
            stray = (event.job, event.attempt)
            strays = self.state.strays.get(event.host, {})
            return event.kind == ev.ENDED and stray in strays
        return event.kind != ev.STARTED or not part.is_started

    def acknowledged(self, agent: str) -> int:
        """Return the last ``agent_seq`` of an agent that was taken in."""
        return self.state.agents.get(agent, 0)

    def heard(self, host: str, now_s: float) -> None:
        """Record a heartbeat."""
        self._heard[host] = now_s

    # What follows.

    def decide(self, now_s: float, *, all_heard: bool = True) -> list[Event]:
        """Return what follows now from all events, and from time.

        Args:
            now_s: the time.
            all_heard: no message waits to be read, so a host that was not heard is
                silent. After a pause of the coordinator it is not known before that.
        """
        out: list[Event] = []
        if all_heard:
            out += self._lost_hosts(now_s)
        out += self._passed_fences(now_s)
        for _ in range(_MAX_ROUNDS):
            out += self._settled(now_s)
            self._wake(now_s)
            due = self._policy_s is not None and self._policy_s <= now_s
            if not self.state.changed and not due:
                break
            self.state.changed = False
            self._policy_s = None
            out += self._policy_events(now_s)
            if not self.state.changed:
                break
        else:
            _logger.warning(
                "policy %s still returned decisions after %d rounds; the rest wait for "
                "the next event. decide() must return nothing if nothing has changed",
                self._policy.name,
                _MAX_ROUNDS,
            )
        return out

    def next_s(self) -> float | None:
        """Return when to call `decide` although nothing happened, or ``None``."""
        times = [time_s for time_s in (self._policy_s,) if time_s is not None]
        if self._delayed:
            times.append(self._delayed[0][0])
        times += self.state.fences.values()
        if self.limits.silent_s < float("inf"):
            times += [
                self._heard.get(host.name, 0.0) + self.limits.silent_s
                for host in self.cluster.hosts.values()
                if host.is_up
            ]
        return min(times, default=None)

    def _lost_hosts(self, now_s: float) -> list[Event]:
        if self.limits.silent_s == float("inf"):
            return []
        limits, out = self.limits, []
        for host in self.cluster.hosts.values():
            heard_s = self._heard.setdefault(host.name, now_s)
            if host.is_up and now_s - heard_s >= limits.silent_s:
                data = {
                    "why": f"nothing heard for {now_s - heard_s:.1f} s",
                    "fence_s": heard_s + limits.watchdog_s + limits.margin_s,
                }
                out.append(Event(ev.LOST, now_s, host=host.name, data=data))
        return self._applied(out)

    def _passed_fences(self, now_s: float) -> list[Event]:
        out = []
        for host, fence_s in list(self.state.fences.items()):
            if fence_s > now_s:
                continue
            data = {"why": f"{host} was silent for longer than the watchdog"}
            out += [
                Event(ev.LOST, now_s, job, number, host, data)
                for job, number in self.state.on_host[host]
            ]
            del self.state.fences[host]
        return self._applied(out)

    def _wake(self, now_s: float) -> None:
        """Show jobs whose backoff has passed to the policy."""
        while self._delayed and self._delayed[0][0] <= now_s:
            job = heapq.heappop(self._delayed)[2]
            record = self.state.records[job]
            if self.state.can_start(record, now_s):
                self.state.enqueue(record)

    def _settled(self, now_s: float) -> list[Event]:
        """Return what follows for the jobs to which something happened."""
        out: list[Event] = []
        records = self.state.records
        while self.state.touched:
            touched = [records[job] for job in self.state.touched]
            self.state.touched.clear()
            if len(touched) > 1:
                touched.sort(key=lambda r: r.view.number)
            for record in touched:
                found = follows(record, self.state, now_s)
                if found is not None:
                    out += self._applied([found])
                elif record.live is None:
                    self._queue(record, now_s)
        return out

    def _queue(self, record: JobRecord, now_s: float) -> None:
        """Show a job that can start to the policy, or remember when it can."""
        if record.view.state in ENDS:
            return
        if record.not_before_s > now_s:
            item = (record.not_before_s, record.view.number, record.view.id)
            heapq.heappush(self._delayed, item)
        elif self.state.can_start(record, now_s):
            self.state.enqueue(record)

    def _policy_events(self, now_s: float) -> list[Event]:
        out: list[Event] = []
        cluster, jobs = self.state.cluster, self.state.jobs
        try:
            decisions = self._policy.decide(now_s, cluster, jobs)
        except Exception as exc:
            # A policy of another package must not end the coordinator.
            self.refused_decision = f"{self._policy.name}: {type(exc).__name__}: {exc}"
            _logger.exception("policy %s failed", self._policy.name)
            return []
        for decision in decisions:
            try:
                event = event_of(decision, self.state, now_s)
            except SpecError as exc:
                self.refused_decision = f"{self._policy.name}: {decision}: {exc}"
                _logger.warning("refused decision of policy %s", self.refused_decision)
                continue
            out += self._applied([event])
        self._policy_s = self._policy.next_s(now_s, cluster, jobs)
        return out

    def _applied(self, events: Iterable[Event]) -> list[Event]:
        kept = list(events)
        for event in kept:
            self.state.apply(event)
        return kept

    # What engines and users read.

    def commands(self, host: str | None = None) -> list[Command]:
        """Return the outstanding commands, all or those of a host.

        The host ``""`` is the coordinator itself.
        """
        return outstanding.commands(self.state, host)

    def apply(self, event: Event) -> None:
        """Change the state as a kept event says."""
        self.state.apply(event)

    def reason(self, job: str, now_s: float) -> str:
        """Return why a job waits; empty if it does not.

        Raises:
            SpecError: there is no such job.
        """
        record = self.state.records[self.job(job).id]
        view = record.view
        if record.live is not None or view.state in ENDS:
            return ""
        if record.blocked_by:
            return f"starts after {', '.join(sorted(record.blocked_by))}"
        if record.needs_plan:
            return "is being planned"
        if record.not_before_s > now_s:
            left_s = record.not_before_s - now_s
            return f"starts again in {left_s:.0f} s, because {record.why}"
        usable = self.cluster.free.num_usable_with(view.memory_bytes)
        if usable < view.minimum:
            return (
                f"needs {devices_text(view)}, the open hosts have {usable}"
                f"{self._closed_text()}"
            )
        return self._policy.why_waiting(view, now_s, self.cluster, self.state.jobs)

    def _closed_text(self) -> str:
        """Return which hosts get no jobs, and why."""
        hosts = [h for h in self.cluster.hosts.values() if h.name not in self.gone]
        silent = [host.name for host in hosts if not host.is_up]
        drained = [host.name for host in hosts if host.is_up and host.is_drained]
        text = ""
        if silent:
            text += (
                f"; not heard from: {', '.join(silent)}, see `stretto cluster status`"
            )
        if drained:
            text += f"; drained: {', '.join(drained)}"
        return text

    def job(self, job: str) -> JobView:
        """Return a job by its id, or the last one of a name.

        Raises:
            SpecError: there is no such job.
        """
        record = self.state.records.get(job)
        if record is None:
            named = [r for r in self.state.records.values() if r.view.spec.name == job]
            if not named:
                raise SpecError(
                    f"job {job!r:.80} is unknown: see `stretto cluster list`"
                )
            record = named[-1]
        return record.view

    @property
    def cluster(self) -> ClusterView:
        """Hosts and devices."""
        return self.state.cluster
