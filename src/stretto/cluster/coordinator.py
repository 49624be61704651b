"""Ledger, store and clock together: what an engine of a real cluster talks to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from stretto.cluster import reports
from stretto.cluster.commands import Command, MakePlan
from stretto.cluster.events import PLANNED, REFUSED, Event
from stretto.errors import Infeasible, SpecError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.cluster.ledger import Ledger
    from stretto.cluster.store import Store
    from stretto.cluster.views import Speeds
    from stretto.schema.job import Job


@final
class Clock:
    """Seconds since 1970 that never go back, whatever the host's clock does."""

    def __init__(
        self,
        last_s: float,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        """Begin at the later of the wall clock and the last kept event's time."""
        self._base_s = max(last_s, wall()) - monotonic()
        self._monotonic = monotonic

    def __call__(self) -> float:
        """Return the time now."""
        return self._base_s + self._monotonic()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The coordinator's answer to an agent's heartbeat or events."""

    acknowledged: int
    """The agent sends its events after this number again; it may forget the others."""

    commands: tuple[Command, ...]
    """All that are outstanding for its host."""

    join: bool = False
    """The agent's events do not count until it sends `events.JOINED`, with all that its
    host's supervisors know, as the next event of its life. Until then no
    watchdog is reset."""


@final
class Coordinator:
    """Keeps events before it commands what follows. Not thread-safe.

    While the store is unavailable, users' requests are refused, events of agents are
    taken in but not acknowledged, and hosts get no new command; running jobs continue.
    """

    def __init__(
        self, ledger: Ledger, store: Store, clock: Callable[[], float]
    ) -> None:
        """Begin with the store's events.

        Raises:
            ClusterError: the store is damaged.
        """
        self.ledger, self._store, self._clock = ledger, store, clock
        for event in store.events():
            ledger.apply(event)
        for event in store.last_steps():
            ledger.state.show_progress(event)
        ledger.state.dirty.clear()
        self._unkept: list[Event] = []
        self._kept_agents: dict[str, int] = dict(ledger.state.agents)
        self.trouble = ""
        """Why the store is unavailable; empty if it works."""

    # Users.

    def submit(self, spec: Job, *, user: str = "", request: str = "") -> str:
        """Return the id of a new job.

        Args:
            spec: the job.
            user: who submits it.
            request: what no other submission has; a request that comes again, because
                its answer was lost, gets the job that it has made.

        Raises:
            Infeasible: it can never fit.
            SpecError: it must start after an unknown job.
            StoreUnavailable: it cannot be kept; nothing was submitted.
        """
        self._check_store()
        if known := self.ledger.state.requests.get(request):
            return known
        now_s = self._clock()
        try:
            events = self.ledger.submit(spec, now_s, user=user, request=request)
        except (Infeasible, SpecError) as exc:
            data = {"name": spec.name, "why": str(exc)}
            with contextlib.suppress(StoreUnavailable):
                self._store.append(
                    [Event(REFUSED, now_s, data=data)], self.ledger.state
                )
            raise
        try:
            self._store.append(events, self.ledger.state)
        except StoreUnavailable:
            self.ledger.withdraw(events[0].job)
            raise
        self._follow()
        return events[0].job

    def stop(self, job: str, *, user: str = "") -> None:
        """Ask a job to end; one that has ended stays as it is.

        Raises:
            SpecError: there is no such job.
            StoreUnavailable: the request cannot be kept.
        """
        self._check_store()
        self._request(self.ledger.stop(job, self._clock(), user=user))

    def drain(self, host: str, *, user: str = "", ends: bool = False) -> None:
        """Move a host's attempts, and start nothing new there, see `Ledger.drain`.

        Raises:
            SpecError: there is no such host.
            StoreUnavailable: the request cannot be kept.
        """
        self._check_store()
        now_s = self._clock()
        self._request(self.ledger.drain(host, now_s, user=user, ends=ends))

    def open(self, host: str, *, user: str = "") -> None:
        """Use a drained host again.

        Raises:
            SpecError: there is no such host.
            StoreUnavailable: the request cannot be kept.
        """
        self._check_store()
        self._request(self.ledger.open(host, self._clock(), user=user))

    def _check_store(self) -> None:
        """Refuse what a user wants while the store is unavailable."""
        self._keep([])
        if self.trouble:
            raise StoreUnavailable(self.trouble)

    def _request(self, events: list[Event]) -> None:
        """Keep a user's request, and do what follows."""
        self._keep(events)
        if self.trouble:
            raise StoreUnavailable(
                f"{self.trouble}. The request is executed once it can be written, "
                "unless the coordinator ends before that"
            )
        self._follow()

    # Agents and the planner.

    def push(self, host: str, agent: str, events: Sequence[Event]) -> Answer:
        """Take in an agent's heartbeat with its events, oldest first, maybe none.

        The coordinator's time is filled in, and ``host`` and ``agent``.

        Raises:
            SpecError: an event is of no agent's kind, or its data is not what that
                kind has; nothing was taken in.
        """
        for event in events:  # all, before the first changes anything
            reports.check(event)
        now_s = self._clock()
        kept: list[Event] = []
        for event in events:
            named = replace(event, at_s=now_s, host=host, agent=agent)
            kept += self.ledger.offer(named)
        joined = self.ledger.is_current(host, agent)
        if joined:
            self.ledger.heard(host, now_s)
        self._keep(kept)
        self._follow()
        acknowledged = self.ledger.acknowledged(agent)
        if self.trouble:
            acknowledged = min(acknowledged, self._kept_agents.get(agent, 0))
        hidden = self.trouble or not joined
        return Answer(
            acknowledged=acknowledged,
            commands=() if hidden else tuple(self.ledger.commands(host)),
            join=not joined,
        )

    def plans_to_make(self) -> list[MakePlan]:
        """Return the jobs that wait for a plan."""
        if self.trouble:
            return []
        found = self.ledger.commands("")
        return [command for command in found if isinstance(command, MakePlan)]

    def planned(self, job: str, speeds: Speeds | None, *, why: str = "") -> None:
        """Take in a plan's speeds, or why it has no speeds."""
        data = {"speeds": speeds, "why": why}
        event = Event(PLANNED, self._clock(), job=job, data=data)
        self._keep(self.ledger.offer(event))
        self._follow()

    def tick(self) -> float | None:
        """Do what is due, and return the seconds until the next call, or ``None``.

        Call it when every message that has arrived was read: hosts that were not heard
        count as silent.
        """
        self._follow(all_heard=True)
        next_s = self.ledger.next_s()
        return None if next_s is None else max(0.0, next_s - self._clock())

    def _follow(self, *, all_heard: bool = False) -> None:
        """Decide what follows from what was taken in."""
        self._keep([])
        if not self.trouble:
            self._keep(self.ledger.decide(self._clock(), all_heard=all_heard))

    def _keep(self, events: list[Event]) -> None:
        """Write events, and before them those that could not be written."""
        self._unkept += events
        if not self._unkept:
            self.trouble = ""
            return
        try:
            self._store.append(self._unkept, self.ledger.state)
        except StoreUnavailable as exc:
            self.trouble = str(exc)
            return
        self._kept_agents = dict(self.ledger.state.agents)
        self._unkept.clear()
        self.trouble = ""
