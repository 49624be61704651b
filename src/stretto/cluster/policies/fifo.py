"""First come, first served, with backfill: jobs have their devices for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.cluster.policies.base import AbstractPolicy, Decision, Start, Stop
from stretto.cluster.views import DATA_PARALLEL
from stretto.errors import SpecError
from stretto.schema.job import BACKGROUND, FOREGROUND

if TYPE_CHECKING:
    from stretto.cluster.devices import DeviceMap
    from stretto.cluster.views import ClusterView, JobsView, JobView

PATIENCE_S = 3600.0
"""How long jobs may pass the first one, by default."""


class ExclusivePolicy(AbstractPolicy):
    """What policies have in common that give a device to one job at a time.

    # Note [Backfill without starvation]
    Jobs start in the order of priority, then submission. If the first does not fit,
    later ones that fit may pass it. How long jobs will run is not known, so this could
    go on for ever. When the first has waited for ``patience_s``, devices that become
    free are kept for it, and no job passes it any more.

    # Note [Backgrounds give way]
    A background has a device alone while no foreground needs it. If a foreground does
    not fit, the backgrounds that started last are stopped, as many as needed, unless
    even all of them would not suffice.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        """Set how long jobs may pass the first one."""
        if not patience_s >= 0:
            raise SpecError(
                f"patience_s must be >= 0, got {patience_s}", place=".patience_s"
            )
        self._patience_s = patience_s

    def size(self, job: JobView, free: int) -> tuple[int, str, int | None]:
        """Return for a job how many of ``free`` devices, the way and the batch."""
        return min(job.most, free), DATA_PARALLEL, None

    def decide(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> list[Decision]:
        """Return starts, and stops of backgrounds that give way."""
        free = cluster.free
        out: list[Decision] = []
        least = jobs.least_waiting(FOREGROUND)
        if least is not None:
            if free.num_free() >= least:
                free = free.copy()
                out += self._starts(FOREGROUND, now_s, free, jobs)
            stops = self._giving_way(cluster, free, jobs, out)
            if stops:
                return out + stops
        first = jobs.first(FOREGROUND)
        if first is not None and self._keeps(first, now_s, out):
            return out
        least = jobs.least_waiting(BACKGROUND)
        if least is not None and free.num_free() >= least:
            free = free.copy() if free is cluster.free else free
            out += self._starts(BACKGROUND, now_s, free, jobs)
        return out

    def _keeps(self, first: JobView, now_s: float, out: list[Decision]) -> bool:
        """Return whether free devices are kept for a job that still waits."""
        return now_s - first.ready_s >= self._patience_s and not any(
            decision.job == first.id for decision in out
        )

    def _starts(
        self, role: str, now_s: float, free: DeviceMap, jobs: JobsView
    ) -> list[Decision]:
        out: list[Decision] = []
        first = jobs.first(role)
        for job in jobs.waiting(role, free.num_free()):
            num_free = free.num_free()
            if num_free < job.least:
                if not num_free:
                    break
                continue
            if (
                first is not None
                and job is not first
                and self._keeps(first, now_s, out)
            ):
                break
            gpus, way, batch = self.size(job, num_free)
            devices = free.pick(gpus, memory_bytes=job.memory_bytes)
            if devices is None:
                continue
            free.take(devices, foreground=role == FOREGROUND)
            out.append(Start(job.id, devices, way, batch))
        return out

    def _giving_way(
        self,
        cluster: ClusterView,
        free: DeviceMap,
        jobs: JobsView,
        out: list[Decision],
    ) -> list[Decision]:
        """Return the stops of backgrounds that let the first foreground start."""
        started = {decision.job for decision in out}
        first = next((j for j in jobs.waiting(FOREGROUND) if j.id not in started), None)
        if first is None:
            return []
        missing = first.least - free.num_free()
        stops: list[Decision] = []
        coming = 0
        for job in reversed(list(jobs.live(BACKGROUND))):
            if job.state == "stopping":
                coming += len(job.devices)
            elif coming < missing and all(
                cluster.free.is_usable(device) for device in job.devices
            ):
                coming += len(job.devices)
                stops.append(Stop(job.id, f"{first.id} needs its devices"))
        return stops if coming >= missing else []

    def next_s(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> float | None:
        """Return ``None``: patience only keeps devices, it starts nothing."""
        del now_s, cluster, jobs
        return None

    def why_waiting(
        self, job: JobView, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> str:
        """Return what is missing, or for which job free devices are kept."""
        first = jobs.first(FOREGROUND) or jobs.first(job.role)
        if first is not None and first is not job and self._keeps(first, now_s, []):
            return f"free devices are kept for {first.id}, which waits longer"
        return super().why_waiting(job, now_s, cluster, jobs)


@final
class FifoPolicy(ExclusivePolicy):
    """First come, first served, with backfill; as many devices as are free."""

    name: ClassVar[str] = "fifo"
