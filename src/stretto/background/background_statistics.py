"""Statistics that a background reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundStatistics:
    """Counts and times of a background so far."""

    tasks: int
    """Tasks that have ended."""

    running_s: float
    """How long they had the device."""

    waited_s: float
    """How long leases were waited for."""

    elapsed_s: float
    """Since the background was opened."""

    loss: float
    """How much longer the foreground's steps are in which a task ran, by paired steps;
    0 before it is known."""

    loss_error: float | None
    """Two standard errors of the loss, as a share; ``None`` before it is known."""

    foregrounds: int
    """How many foregrounds it has been beside."""

    has_missed_foregrounds: bool
    """Whether a foreground ran while no lease was asked for, so that nothing is known
    of it: this process got no processor time beside it, or did other work."""

    beside_s: float
    """How long tasks had the device in foregrounds' steps that were seen as a whole."""

    steps_s: float
    """Length of these steps."""

    task_steps_s: float
    """Length of those of them in which a task ran."""

    idle_s: float
    """How long the foregrounds waited in them."""

    children_s: float
    """Processor time, beside foregrounds, of processes that this one has started, such
    as a DataLoader's workers. They take no leases."""

    unused_s: Mapping[str, float]
    """How long leases were waited for while a foreground waited, by reason, such as
    ``a control step runs``."""

    isolation: str
    """How the foreground is kept first."""

    @property
    def share(self) -> float:
        """Share of the elapsed time in which tasks ran."""
        return self.running_s / self.elapsed_s if self.elapsed_s > 0.0 else 0.0

    @property
    def idle_ratio(self) -> float:
        """Share of the foregrounds' steps in which they waited."""
        return self.idle_s / self.steps_s if self.steps_s > 0.0 else 0.0

    @property
    def task_steps_ratio(self) -> float:
        """Share of the foregrounds' time that is steps in which a task ran."""
        return self.task_steps_s / self.steps_s if self.steps_s > 0.0 else 0.0

    @property
    def used_ratio(self) -> float:
        """Time of tasks beside a foreground over its idle time."""
        return self.beside_s / self.idle_s if self.idle_s > 0.0 else 0.0
