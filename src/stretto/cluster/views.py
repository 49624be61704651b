"""Views for policies, which only read them: devices, jobs, and jobs' speeds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import TYPE_CHECKING, final

from stretto.cluster.devices import Device, DeviceMap
from stretto.schema.job import BACKGROUND, FOREGROUND, INDEPENDENT, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Reversible

DATA_PARALLEL, WEAK, BATCH_OPTIMAL, BURST = "strong", "weak", "batch-optimal", "burst"
METHODS = (DATA_PARALLEL, WEAK, BATCH_OPTIMAL, BURST)
"""Methods of scaling, by which a job uses more devices; see
`planners.burst.scaling`. A field ``method`` is one of these."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a job runs on a number of devices, under one method of scaling."""

    gpus: int

    batch: int

    step_s: float

    speedup: float
    """Progress toward the job's target, relative to one device with the job's batch."""

    idle_ratios: tuple[float, ...] = ()
    """By rank: the part of a step in which the device is idle; 1.0: never used."""

    background: tuple[float, ...] = ()
    """By rank: the rate of a background job beside it, over its rate alone; empty if
    nothing was measured."""

    loss: float = 0.0
    """The cost of backgrounds beside it: 1 - speed with them / speed alone."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """A job's speeds by method of scaling, each by ascending number of devices."""

    methods: Mapping[str, Sequence[Speed]]

    def at(self, method: str, gpus: int) -> Speed | None:
        """Return the speed on the largest known number of devices up to ``gpus``."""
        rows = self.methods.get(method, ())
        at = bisect_left(rows, gpus + 1, key=lambda row: row.gpus)
        return rows[at - 1] if at else None


@final
@dataclass(slots=True, eq=False, kw_only=True)
class JobView:
    """A job and its state."""

    id: str

    number: int
    """Order of submission."""

    spec: Job

    role: str
    """The role in ``spec``, also while the job is profiled; `state.State` has an
    exception for attempts of earlier releases."""

    minimum: int
    maximum: int
    """Devices that it can use; 1 while the job is profiled."""

    priority: int

    submitted_s: float

    ready_s: float = 0.0
    """When it last began to wait."""

    state: str = "submitted"

    is_profiling: bool = False
    """It is being profiled, or waits for that."""

    attempt: int = 0
    """The last attempt; 0 before the first."""

    devices: tuple[Device, ...] = ()
    """Devices of the live attempt, in the order of ranks."""

    method: str = DATA_PARALLEL
    batch: int | None = None
    """How the live attempt uses its devices."""

    speed: Speed | None = None
    """The known speed of the live attempt."""

    is_silent: bool = False
    """A part of the live attempt is on a host that is lost, so it gets no more
    devices."""

    beside: int = 0
    """Bits of the live attempt's ranks that have a background beside them."""

    placed_s: float = 0.0
    """When the live attempt got its devices."""

    failures: int = 0

    speeds: Speeds | None = None
    """``None`` if the job was never profiled."""

    @property
    def allows_background(self) -> bool:
        """Whether a background may run beside it: never beside a measurement."""
        return self.spec.background.allow and not self.is_profiling

    @property
    def is_one_group(self) -> bool:
        """Whether its ranks are one process group, which a change restarts whole."""
        gang = self.spec.gang
        return gang is None or gang.kind != INDEPENDENT

    @property
    def num_hosts(self) -> int:
        """On how many hosts the live attempt has devices."""
        return len({device.host for device in self.devices})

    @property
    def memory_bytes(self) -> int:
        """Largest memory on a device; 0 if unknown."""
        return self.spec.memory_bytes

    @property
    def key(self) -> tuple[int, float, int]:
        """Order in which jobs wait: priority, then time, then number."""
        return (-self.priority, self.submitted_s, self.number)


Row = tuple[tuple[int, float, int], JobView]


@final
class JobsView:
    """The jobs that wait and run, by role. Jobs that cannot start yet are not here."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, list[Row]]] = {}
        self._live: dict[str, dict[str, JobView]] = {}
        self._stopping: dict[str, dict[str, JobView]] = {}
        self._growable: dict[str, dict[str, JobView]] = {}
        self.hosting: dict[int, dict[int, dict[str, JobView]]] = {}
        """Live foreground jobs that allow a background and have a known speed: by the
        identity of ``speed``, then by ``beside``. Those of a group offer the same."""

    def waiting(self, role: str) -> Iterator[JobView]:
        """Yield the jobs of a role that wait for devices, in their order."""
        for _, job in merge(*self._waiting.get(role, {}).values()):
            yield job

    def queues(self, role: str) -> Mapping[int, Sequence[Row]]:
        """Return the jobs of a role that wait, by the fewest devices they need.

        Each list is in order; its rows begin with the job's key.
        """
        return self._waiting.get(role, {})

    def first(self, role: str) -> JobView | None:
        """Return the job of a role whose turn it is, or ``None``."""
        heads = [row[0] for row in self._waiting.get(role, {}).values()]
        return min(heads)[1] if heads else None

    def only_waiting(self) -> JobView | None:
        """Return the one job that waits for devices; ``None`` otherwise."""
        found: JobView | None = None
        for queues in self._waiting.values():
            for rows in queues.values():
                if found is not None or len(rows) > 1:
                    return None
                found = rows[0][1]
        return found

    def smallest_waiting(self, role: str) -> int | None:
        """Return the fewest devices with which a waiting job can start, or ``None``."""
        return min(self._waiting.get(role, {}), default=None)

    def live(self, role: str) -> Reversible[JobView]:
        """Return the jobs of a role that run or start, in the order of their start."""
        return self._live.get(role, {}).values()

    def stopping(self, role: str) -> Reversible[JobView]:
        """Return the jobs of a role that have devices and are to end."""
        return self._stopping.get(role, {}).values()

    def growable(self, role: str) -> Reversible[JobView]:
        """Return the live jobs of a role that could use more devices."""
        return self._growable.get(role, {}).values()

    # Only the ledger calls these.

    def add_waiting(self, job: JobView) -> None:
        """Add a job that waits for devices."""
        rows = self._waiting.setdefault(job.role, {}).setdefault(job.minimum, [])
        insort(rows, (job.key, job))

    def remove_waiting(self, job: JobView) -> None:
        """Remove a job that waits for devices."""
        by_minimum = self._waiting[job.role]
        rows = by_minimum[job.minimum]
        del rows[bisect_left(rows, job.key, key=lambda row: row[0])]
        if not rows:
            del by_minimum[job.minimum]

    def add_live(self, job: JobView) -> None:
        """Add a job that has devices."""
        self._live.setdefault(job.role, {})[job.id] = job
        self._host(job)
        self.show_growth(job)

    def set_stopping(self, job: JobView) -> None:
        """Show that a live job is to end."""
        if self._live[job.role].pop(job.id, None) is not None:
            self._unhost(job)
            self.show_growth(job)
            self._stopping.setdefault(job.role, {})[job.id] = job

    def remove_live(self, job: JobView) -> None:
        """Remove a job that no longer has devices."""
        if self._live[job.role].pop(job.id, None) is not None:
            self._unhost(job)
            self.show_growth(job)
        else:
            del self._stopping[job.role][job.id]

    def show_growth(self, job: JobView) -> None:
        """Show whether a live job could use more devices than it has now."""
        live = job.id in self._live.get(job.role, {}) and not job.is_silent
        if live and len(job.devices) < job.maximum:
            self._growable.setdefault(job.role, {})[job.id] = job
        elif job.role in self._growable:
            self._growable[job.role].pop(job.id, None)

    def set_beside(self, job: JobView, beside: int) -> None:
        """Show which ranks of a foreground have a background beside them."""
        self._unhost(job)
        job.beside = beside
        if job.id in self._live.get(job.role, {}):
            self._host(job)

    def _host(self, job: JobView) -> None:
        if job.role == FOREGROUND and job.speed is not None and job.allows_background:
            groups = self.hosting.setdefault(id(job.speed), {})
            groups.setdefault(job.beside, {})[job.id] = job

    def _unhost(self, job: JobView) -> None:
        groups = self.hosting.get(id(job.speed), {})
        group = groups.get(job.beside, {})
        if group.pop(job.id, None) is not None and not group:
            del groups[job.beside]
            if not groups:
                del self.hosting[id(job.speed)]


@final
@dataclass(slots=True, eq=False, kw_only=True)
class HostView:
    """A host and its devices."""

    name: str

    memory_bytes: tuple[int, ...]
    """By device; 0 if unknown."""

    is_up: bool = True
    """It is heard from."""

    is_drained: bool = False
    """Nothing new starts on it."""

    is_ending: bool = False
    """It is drained because the cluster ends, and only until then."""


@final
class ClusterView:
    """All hosts that ever joined, and who has their devices."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostView] = {}
        """By name, in the order in which they joined."""

        self.free = DeviceMap()
        """Free devices; a policy picks from a copy."""

        self.foreground: dict[Device, JobView] = {}
        """The foreground job on each device that has one."""

        self.background: dict[Device, JobView] = {}
        """The background job on each device that has one."""

        self.ranks: dict[Device, int] = {}
        """The foreground's rank on each device that has one."""

    def memory_of(self, device: Device) -> int:
        """Return a device's memory in bytes; 0 if unknown."""
        return self.hosts[device.host].memory_bytes[device.number]

    def may_join(self, job: JobView, device: Device) -> bool:
        """Return whether a job may be on a device beside what is there.

        A foreground decides what runs beside it, and both need their memory. A
        foreground on a host that is lost or drained gets no background.
        """
        if not self.free.is_usable(device):
            return False
        size = self.memory_of(device)
        if 0 < size < job.memory_bytes:
            return False
        beside = self.background.get(device)
        foreground = job
        if job.role == BACKGROUND:
            beside, foreground = job, self.foreground.get(device, job)
        if beside is None or foreground is beside:
            return True
        if not foreground.allows_background:
            return False
        return not size or foreground.memory_bytes + beside.memory_bytes <= size
