"""Policies that choose how many devices a foreground gets by how fast it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.cluster.policies.base import Decision, Resize
from stretto.cluster.policies.exclusive import (
    PATIENCE_S,
    ExclusivePolicy,
    at_least_zero,
)
from stretto.cluster.views import BATCH_OPTIMAL, DATA_PARALLEL, WEAK
from stretto.schema.job import BACKGROUND, FOREGROUND

if TYPE_CHECKING:
    from stretto.cluster.views import ClusterView, JobsView, JobView, Speed

SETTLE_S = 600.0
"""How long a job keeps its devices before it may get more, by default."""

NEAR_RATIO = 0.02
"""The fewest devices are chosen among those with a speed this close to the best."""

GROW_RATIO = 1.25
"""A job starts again on more devices if it becomes faster by this factor."""


def best(job: JobView, method: str, free: int) -> Speed | None:
    """Return the speed of the number of devices that a job should get.

    It is the fastest with at most ``free`` devices; among those within `NEAR_RATIO` of
    it, that with the fewest. ``None``: no number that it can use is known.
    """
    if job.speeds is None:
        return None
    maximum = min(job.maximum, free)
    rows = [
        row
        for row in job.speeds.methods.get(method, ())
        if job.minimum <= row.gpus <= maximum
    ]
    if not rows:
        return None
    fastest = max(row.speedup for row in rows)
    return next(row for row in rows if row.speedup >= (1 - NEAR_RATIO) * fastest)


def growth(
    method: str, settle_s: float, now_s: float, cluster: ClusterView, jobs: JobsView
) -> tuple[list[Decision], float | None]:
    """Return which job starts again on more devices, and when to ask again.

    One at a time, the first that gains `GROW_RATIO`, if no job waits.
    """
    waits = any(jobs.first(role) is not None for role in (FOREGROUND, BACKGROUND))
    if (
        waits
        or not cluster.free.num_free()
        or any(True for _ in jobs.stopping(FOREGROUND))
    ):
        return [], None
    later_s: float | None = None
    for job in jobs.growable(FOREGROUND):
        has = len(job.devices)
        if job.speed is None:
            continue
        free = cluster.free.num_free(memory_bytes=job.memory_bytes)
        row = best(job, method, has + free)
        if row is None or row.speedup < GROW_RATIO * job.speed.speedup:
            continue
        due_s = job.placed_s + settle_s
        if due_s <= now_s:
            why = f"{row.gpus} devices make it faster"
            return [Resize(job.id, row.gpus, why)], None
        later_s = due_s if later_s is None else min(later_s, due_s)
    return [], later_s


class SizedPolicy(ExclusivePolicy):
    """Gives a foreground the number of free devices at which it runs fastest.

    A job whose speeds are not known gets as many as are free.
    """

    method: ClassVar[str]

    def __init__(
        self, *, patience_s: float = PATIENCE_S, settle_s: float = SETTLE_S
    ) -> None:
        """Set how long jobs may pass the first one, and how long they keep devices."""
        super().__init__(patience_s=patience_s)
        self._settle_s = at_least_zero("settle_s", settle_s)

    def size(self, job: JobView, free: int) -> tuple[int, str, int | None]:
        """Return the number of devices with the best speed."""
        row = best(job, self.method, free)
        if row is None:
            return super().size(job, free)
        return row.gpus, self.method, row.batch

    def decide(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> list[Decision]:
        """Return starts, or the restart of a job on more devices."""
        found = super().decide(now_s, cluster, jobs)
        return found or growth(self.method, self._settle_s, now_s, cluster, jobs)[0]

    def next_s(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> float | None:
        """Return when the next job may get more devices."""
        return growth(self.method, self._settle_s, now_s, cluster, jobs)[1]


@final
class StrongPolicy(SizedPolicy):
    """Keeps each job's batch: more devices get fewer samples each."""

    name: ClassVar[str] = "strong"
    method: ClassVar[str] = DATA_PARALLEL


@final
class WeakPolicy(SizedPolicy):
    """Gives each device the samples that one device had: the batch grows."""

    name: ClassVar[str] = "weak"
    method: ClassVar[str] = WEAK


@final
class BatchOptimalPolicy(SizedPolicy):
    """Takes for each number of devices the batch that reaches the target soonest."""

    name: ClassVar[str] = "batch-optimal"
    method: ClassVar[str] = BATCH_OPTIMAL
