"""A part of the devices for foregrounds, the rest for backgrounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.cluster.devices import EMPTY, NO_FOREGROUND
from stretto.cluster.policies.base import AbstractPolicy, Decision, Start
from stretto.cluster.policies.exclusive import (
    PATIENCE_S,
    at_least_zero,
    in_turn,
    keeps_devices,
)
from stretto.errors import SpecError
from stretto.schema.job import BACKGROUND, FOREGROUND
from stretto.units import counted

if TYPE_CHECKING:
    from stretto.cluster.devices import DeviceMap
    from stretto.cluster.views import ClusterView, JobsView, JobView


@final
class PartitionPolicy(AbstractPolicy):
    """Splits the devices by number; jobs of one role never get the other's part.

    Each part is first come, first served, with backfill, see
    `exclusive.ExclusivePolicy`. Which devices belong to a part is not fixed: only how
    many jobs of each role may have.
    """

    name: ClassVar[str] = "partition"

    def __init__(
        self, *, foreground_ratio: float = 0.5, patience_s: float = PATIENCE_S
    ) -> None:
        """Set the foregrounds' part of all devices, 0 to 1, and the patience."""
        if not 0.0 <= foreground_ratio <= 1.0:
            raise SpecError(
                f"foreground_ratio must be 0 to 1, got {foreground_ratio}",
                place=".foreground_ratio",
            )
        self._ratio = foreground_ratio
        self._patience_s = at_least_zero("patience_s", patience_s)

    def limit(self, role: str, devices: int) -> int:
        """Return how many devices a role has."""
        foreground = round(devices * self._ratio)
        return foreground if role == FOREGROUND else devices - foreground

    def parts(self, cluster: ClusterView) -> dict[str, int]:
        """Return how many of the open hosts' devices each role has."""
        usable = cluster.free.num_usable
        return {role: self.limit(role, usable) for role in (FOREGROUND, BACKGROUND)}

    def decide(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> list[Decision]:
        """Return starts."""
        out: list[Decision] = []
        free = cluster.free
        with_foreground = free.num_usable - free.num_free(NO_FOREGROUND)
        taken = {
            FOREGROUND: with_foreground,
            BACKGROUND: free.num_usable - free.num_free(EMPTY) - with_foreground,
        }
        for role, part in self.parts(cluster).items():
            left = min(part - taken[role], free.num_free())
            minimum = jobs.smallest_waiting(role)
            if minimum is not None and left >= minimum:
                free = free.copy() if free is cluster.free else free
                out += self._starts(role, left, part, free, now_s, jobs)
        return out

    def _starts(
        self,
        role: str,
        left: int,
        part: int,
        free: DeviceMap,
        now_s: float,
        jobs: JobsView,
    ) -> list[Decision]:
        """Return which jobs of a role start on at most ``left`` of its part."""
        out: list[Decision] = []
        others = free.num_free() - left

        def room(job: JobView) -> int:
            return min(free.num_free() - others, free.num_free(EMPTY, job.memory_bytes))

        for job in in_turn(
            role,
            jobs,
            room,
            lambda job: self._keeps(job, now_s, part, free),
        ):
            gpus = min(job.maximum, room(job))
            devices = free.pick(gpus, memory_bytes=job.memory_bytes)
            if devices is not None:
                free.take(devices, foreground=role == FOREGROUND)
                out.append(Start(job.id, devices))
        return out

    def _keeps(self, first: JobView, now_s: float, part: int, free: DeviceMap) -> bool:
        limit = min(part, free.num_usable_with(first.memory_bytes))
        return keeps_devices(first, now_s, self._patience_s, limit)

    def why_waiting(
        self, job: JobView, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> str:
        """Return what is missing in the role's part."""
        part = self.parts(cluster)[job.role]
        if part < job.minimum:
            return f"needs {counted(job.minimum, 'device')}, {job.role}s have {part}"
        first = jobs.first(job.role)
        free = cluster.free
        keeps = first is not None and self._keeps(first, now_s, part, free)
        if first is not None and first is not job and keeps:
            return f"free devices are kept for {first.id}, which waits longer"
        return super().why_waiting(job, now_s, cluster, jobs)
