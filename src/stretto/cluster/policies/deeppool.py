"""DeepPool's: foregrounds by burst plans, backgrounds where these leave time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.cluster.devices import EMPTY, NO_FOREGROUND, are_text
from stretto.cluster.policies.base import (
    AbstractPolicy,
    Attach,
    Decision,
    Detach,
    Start,
    Stop,
    devices_text,
)
from stretto.cluster.policies.exclusive import (
    PATIENCE_S,
    at_least_zero,
    first_besides,
    in_turn,
    keeps_devices,
)
from stretto.cluster.policies.offers import NEVER_USED, Offers
from stretto.cluster.policies.sized import SETTLE_S, best, growth
from stretto.cluster.views import BURST, DATA_PARALLEL
from stretto.schema.job import BACKGROUND, FOREGROUND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.cluster.devices import Device, DeviceMap
    from stretto.cluster.views import ClusterView, JobsView, JobView, Speed

MIN_RATE = 0.05
"""A background is not beside a rank where it would have a lower rate, by default."""


@final
class DeepPoolPolicy(AbstractPolicy):
    """Places backgrounds beside foregrounds that run by burst plans.

    # Note [Where a background runs]
    First on ranks that a foreground's plan never uses: they are given back whole. Then
    on devices that no job has. Then beside the ranks where it has the highest rate,
    which are those that are idle longest. Never beside a computing rank 0, the busiest,
    never where it would cost the foreground more than this permits, and without a
    measured pair of jobs beside no computing rank at all. A gang is on the upper ranks
    of one foreground if one offers enough.

    # Note [A foreground takes a background's device]
    It starts at once. The background stays if the new foreground's rank offers enough,
    else it leaves, or is stopped if it cannot do with fewer devices. If the foreground
    permits no background, it starts when they have left.

    # Note [Process groups stay on their hosts]
    When the devices of a process group change, all of its ranks start again with the
    new number. A host can do so for its own ranks alone. So a group on one host gets
    more devices there only; one on several hosts gets none, and is stopped as a whole
    when a foreground needs any of its devices, to start again where it fits.
    """

    name: ClassVar[str] = "deeppool"

    def __init__(
        self,
        *,
        min_rate: float = MIN_RATE,
        patience_s: float = PATIENCE_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Set the lowest rate of a background, and times as of `SizedPolicy`."""
        self._offers = Offers(at_least_zero("min_rate", min_rate))
        self._patience_s = at_least_zero("patience_s", patience_s)
        self._settle_s = at_least_zero("settle_s", settle_s)

    def decide(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> list[Decision]:
        """Return starts of both roles, and which backgrounds move."""
        out: list[Decision] = []
        free = cluster.free
        minimum = jobs.smallest_waiting(FOREGROUND)
        if minimum is not None and free.num_free(NO_FOREGROUND) >= minimum:
            free = free.copy()
            out += self._foregrounds(now_s, free, cluster, jobs)
        if out:
            return out  # backgrounds follow when these are in the views
        first = first_besides(FOREGROUND, jobs, [])
        if first is not None and self._keeps(first, now_s, cluster):
            return out
        if jobs.first(BACKGROUND) is not None:
            free = free.copy() if free is cluster.free else free
            out += self._backgrounds(now_s, free, cluster, jobs)
        elif first is None:
            out += self._more_devices(free, cluster, jobs)
            out += growth(BURST, self._settle_s, now_s, cluster, jobs)[0]
        return out

    def next_s(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> float | None:
        """Return when the next foreground may get more devices."""
        return growth(BURST, self._settle_s, now_s, cluster, jobs)[1]

    def _keeps(self, first: JobView, now_s: float, cluster: ClusterView) -> bool:
        limit = cluster.free.num_usable_with(first.memory_bytes)
        return keeps_devices(first, now_s, self._patience_s, limit)

    # Foregrounds.

    def _foregrounds(
        self, now_s: float, free: DeviceMap, cluster: ClusterView, jobs: JobsView
    ) -> list[Decision]:
        out: list[Decision] = []
        leaving: dict[str, set[Device]] = {}
        for job in in_turn(
            FOREGROUND,
            jobs,
            lambda job: free.num_free(NO_FOREGROUND, job.memory_bytes),
            lambda job: self._keeps(job, now_s, cluster),
        ):
            room = free.num_free(NO_FOREGROUND, job.memory_bytes)
            row = best(job, BURST, room)
            gpus = min(job.maximum, room)
            gpus = gpus if row is None else row.gpus
            devices = free.pick(gpus, EMPTY, job.memory_bytes) or free.pick(
                gpus, NO_FOREGROUND, job.memory_bytes
            )
            if devices is None:
                continue
            free.take(devices, foreground=True)
            waits = self._make_room(job, devices, row, cluster, leaving)
            if not waits and row is None:
                out.append(Start(job.id, devices, DATA_PARALLEL, None))
            elif not waits and row is not None:
                out.append(Start(job.id, devices, BURST, row.batch))
        return out + list(_leave(leaving, jobs))

    def _make_room(
        self,
        job: JobView,
        devices: tuple[Device, ...],
        row: Speed | None,
        cluster: ClusterView,
        leaving: dict[str, set[Device]],
    ) -> bool:
        """Record the backgrounds that leave a foreground's devices.

        Returns whether the foreground has to wait for them.
        """
        waits = False
        for rank, device in enumerate(devices):
            background = cluster.background.get(device)
            if background is None:
                continue
            may_join = cluster.may_join(job, device)
            waits = waits or not may_join
            if not may_join or not self._offers.rate(job, row, rank):
                leaving.setdefault(background.id, set()).add(device)
        return waits

    # Backgrounds.

    def _backgrounds(
        self, now_s: float, free: DeviceMap, cluster: ClusterView, jobs: JobsView
    ) -> list[Decision]:
        """Return which backgrounds start."""
        out: list[Decision] = []
        places = _Places(self._offers, free, cluster, jobs)
        for job in in_turn(
            BACKGROUND,
            jobs,
            places.num_left,
            lambda job: self._keeps(job, now_s, cluster),
        ):
            devices = places.for_job(job, job.minimum)
            if devices is not None:
                out.append(Start(job.id, devices))
        return out

    def _more_devices(
        self, free: DeviceMap, cluster: ClusterView, jobs: JobsView
    ) -> list[Decision]:
        """Return which gangs get more devices, when no job waits."""
        out: list[Decision] = []
        places: _Places | None = None
        for job in jobs.growable(BACKGROUND):
            host = None
            if job.is_one_group:  # see the note of `DeepPoolPolicy`
                if job.num_hosts != 1:
                    continue
                host = job.devices[0].host
            if places is None:
                places = _Places(self._offers, free.copy(), cluster, jobs)
            devices = places.some(job, job.maximum - len(job.devices), host)
            if devices:
                out.append(Attach(job.id, devices))
        return out

    def why_waiting(
        self, job: JobView, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> str:
        """Return what is missing, or for which job free devices are kept."""
        first = jobs.first(FOREGROUND) or jobs.first(job.role)
        keeps = first is not None and self._keeps(first, now_s, cluster)
        if first is not None and first is not job and keeps:
            return f"free devices are kept for {first.id}, which waits longer"
        among = NO_FOREGROUND if job.role == FOREGROUND else EMPTY
        free = cluster.free.num_free(among, job.memory_bytes)
        if job.role == FOREGROUND:
            return f"needs {devices_text(job)}, without a foreground: {free}"
        offered = self._offers.num_offered(jobs)
        return (
            f"needs {devices_text(job)}, {are_text(free)} free and "
            f"{are_text(offered)} idle for "
            "long enough beside a foreground"
        )


@final
class _Places:
    """Where backgrounds can start now, best first; what is given is taken."""

    def __init__(
        self, offers: Offers, free: DeviceMap, cluster: ClusterView, jobs: JobsView
    ) -> None:
        self._offers, self._free = offers, free
        self._cluster, self._jobs = cluster, jobs
        self._taken: set[Device] = set()
        self._max = cluster.free.num_usable
        self._num_offered = offers.num_offered(jobs)
        self._never_used = offers.best(jobs, NEVER_USED)
        self._others = offers.best(jobs)

    def num_left(self, job: JobView) -> int:
        """Return how many devices there are at most for a job.

        They are fewer than the last gang needed that failed.
        """
        left = self._free.num_free(EMPTY, job.memory_bytes) + self._num_offered
        return min(left, self._max)

    def for_job(self, job: JobView, need: int) -> tuple[Device, ...] | None:
        """Return devices for a background's start, or ``None``."""
        if need > 1:
            gang = self._offers.for_gang(self._jobs, need, self._taken)
            rates = [offer.rate for offer in gang]
            devices: tuple[Device, ...] | None = tuple(o.device for o in gang)
            if not gang or min(rates) < NEVER_USED:
                devices = self._free.pick(need, EMPTY, job.memory_bytes) or devices
            if devices and all(self._cluster.may_join(job, d) for d in devices):
                self._take(devices)
                return devices
        found = self.some(job, need)
        if len(found) == need:
            return found
        self._give_back(found)
        if not job.memory_bytes:  # or another one may fit
            self._max = need - 1
        return None

    def some(
        self, job: JobView, maximum: int, host: str | None = None
    ) -> tuple[Device, ...]:
        """Return up to ``maximum`` devices, of one host if given, the best first."""
        found: list[Device] = []
        for device in self._each(job, host):
            found.append(device)
            self._take((device,))
            if len(found) == maximum:
                break
        return tuple(found)

    def _each(self, job: JobView, host: str | None) -> Iterator[Device]:
        for offer in self._never_used:
            if self._suits(job, offer.device, host):
                yield offer.device
        if host is not None:
            yield from self._free.free_on(host, job.memory_bytes)
        else:
            while (some := self._free.pick(1, EMPTY, job.memory_bytes)) is not None:
                yield some[0]
        for offer in self._others:
            if self._suits(job, offer.device, host):
                yield offer.device

    def _suits(self, job: JobView, device: Device, host: str | None) -> bool:
        return (
            device not in self._taken
            and host in (None, device.host)
            and self._cluster.may_join(job, device)
        )

    def _take(self, devices: tuple[Device, ...]) -> None:
        for device in devices:
            if device in self._cluster.foreground:
                self._num_offered -= 1
                self._taken.add(device)
            else:
                self._free.take((device,), foreground=False)

    def _give_back(self, devices: tuple[Device, ...]) -> None:
        """Free devices of a gang that is too large.

        Offers stay passed: the next decision sees them again.
        """
        for device in devices:
            if device not in self._cluster.foreground:
                self._free.release((device,), foreground=False)


def _leave(leaving: dict[str, set[Device]], jobs: JobsView) -> Iterator[Decision]:
    """Yield how backgrounds leave devices; those that stop already are not named."""
    for job in jobs.live(BACKGROUND):
        devices = leaving.get(job.id)
        if devices is None:
            continue
        named = tuple(device for device in job.devices if device in devices)
        if not named:  # it leaves them already
            continue
        is_across = job.is_one_group and job.num_hosts > 1
        if not is_across and len(job.devices) - len(named) >= job.minimum:
            yield Detach(job.id, named)
        else:
            yield Stop(job.id, "a foreground needs its devices")
