"""Ledger, store and clock together: what an engine of a real cluster talks to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.cluster.commands import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.cluster.events import Event
    from stretto.cluster.ledger import Ledger
    from stretto.cluster.store import Store
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an agent gets for a heartbeat or for its events."""

    acknowledged: int
    """The agent sends its events after this number again; it may forget the others."""

    commands: tuple[Command, ...]
    """All that are outstanding for its host."""


@final
class Coordinator:
    """Keeps before it commands. Not thread-safe."""

    def __init__(self, ledger: Ledger, store: Store, clock: Clock) -> None:
        """Begin with the store's events."""
        raise NotImplementedError

    def submit(self, spec: Job, *, user: str = "") -> str:
        """Return the id of a new job.

        Raises:
            Infeasible: it can never fit.
            SpecError: it must start after an unknown job.
            StoreUnavailable: it cannot be kept; nothing was submitted.
        """
        raise NotImplementedError

    def stop(self, job: str, *, user: str = "") -> None:
        """Ask a job to end; one that has ended stays as it is.

        Raises:
            SpecError: there is no such job.
        """
        raise NotImplementedError

    def drain(self, host: str, *, user: str = "") -> None:
        """Move a host's attempts, and start nothing new there."""
        raise NotImplementedError

    def open(self, host: str, *, user: str = "") -> None:
        """Use a drained host again."""
        raise NotImplementedError

    def push(self, host: str, agent: str, events: Sequence[Event]) -> Answer:
        """Take in an agent's heartbeat with its events, oldest first, maybe none.

        ``at_s`` of the events may be 0: the coordinator's time is filled in. While the
        store is unavailable nothing is acknowledged, and commands stay as they were.
        """
        raise NotImplementedError

    def tick(self) -> float | None:
        """Do what is due, and return the seconds until the next call, or ``None``."""
        raise NotImplementedError

    @property
    def trouble(self) -> str:
        """Why the store is unavailable; empty if it works."""
        raise NotImplementedError
