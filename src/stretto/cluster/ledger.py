"""The core of a cluster: events in, commands out. It does no I/O and reads no clock.

# Note [The contract]
An engine (local processes, Ray, virtual time) does, in one thread:

    ledger = Ledger(policy)
    for event in store.events():
        ledger.apply(event)                  # a restart
    ...
    events = ledger.offer(event)             # what an agent or user reports
    events += ledger.decide(now_s)           # what follows from it
    store.append(events, ledger)             # first kept,
    for command in ledger.commands(host):    # then executed
        send(command)

`coordinator.Coordinator` is this loop with the store's failures handled; engines use
that. `offer` returns nothing for a duplicate, a gap or a report that no longer counts.
Every returned event is applied already. `apply` is a pure fold: the state is what the
events say, and commands are computed from the state. A command stays outstanding until
an event shows its effect, so engines may send all outstanding commands with every
answer to a heartbeat, and a restarted coordinator goes on by sending them again.

`heard` records a heartbeat. It is no event; after a restart a host counts as heard at
that time, which only lengthens a fence.

# Note [Attempts and fences]
Each start of a job is an attempt, numbered from 1, and (job, attempt) is its fence. An
attempt has a part on each of its hosts. A part has ended when its host reports it
(`ENDED`, or `JOINED` without it), or when the host was silent for the lease and a
margin: supervisors end their ranks when they have no contact for a lease, counted from
when the last acknowledged heartbeat was sent. A part's devices are free when it has
ended; the job waits again, or ends, when all parts have. So two attempts never live at
once, and no device has two jobs of a role.

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

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from stretto.cluster.commands import Command
    from stretto.cluster.events import Event
    from stretto.cluster.policies.base import AbstractPolicy
    from stretto.cluster.views import ClusterView, JobView
    from stretto.schema.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times that the ledger, agents and supervisors share."""

    silent_s: float = 4.0
    """A host without a heartbeat for so long is lost."""

    lease_s: float = 60.0
    """Supervisors end their ranks after so long without contact."""

    margin_s: float = 10.0
    """Added to the lease before an attempt on a silent host counts as ended."""


@final
class Ledger:
    """All jobs, attempts and devices of a cluster. Not thread-safe."""

    def __init__(self, policy: AbstractPolicy, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self._policy = policy

    def submit(self, spec: Job, now_s: float, *, user: str = "") -> list[Event]:
        """Add a job; the first returned event's ``job`` is its id.

        Raises:
            Infeasible: it can never fit.
            SpecError: it must start after an unknown job.
        """
        raise NotImplementedError

    def offer(self, event: Event) -> list[Event]:
        """Take in what an agent or user reports, and return what to keep."""
        raise NotImplementedError

    def acknowledged(self, agent: str) -> int:
        """Return the last ``agent_seq`` of an agent that was taken in."""
        raise NotImplementedError

    def heard(self, host: str, now_s: float) -> None:
        """Record a heartbeat."""
        raise NotImplementedError

    def decide(self, now_s: float) -> list[Event]:
        """Return what follows now from all events, and from time."""
        raise NotImplementedError

    def next_s(self) -> float | None:
        """Return when to call `decide` although nothing happened, or ``None``."""
        raise NotImplementedError

    def commands(self, host: str | None = None) -> list[Command]:
        """Return the outstanding commands, all or those of a host.

        The host ``""`` is the coordinator itself.
        """
        raise NotImplementedError

    def apply(self, event: Event) -> None:
        """Change the state as a kept event says."""
        raise NotImplementedError

    def reason(self, job: str, now_s: float) -> str:
        """Return why a job waits; empty if it does not."""
        raise NotImplementedError

    def job(self, job: str) -> JobView:
        """Return a job by its id, or the last one of a name.

        Raises:
            SpecError: there is no such job.
        """
        raise NotImplementedError

    @property
    def cluster(self) -> ClusterView:
        """Hosts and devices."""
        raise NotImplementedError
