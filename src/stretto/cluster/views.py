"""What policies see: devices, jobs, and how fast jobs run. Policies only read it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

from stretto.schema.job import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DATA_PARALLEL, WEAK, BATCH_OPTIMAL, BURST = "strong", "weak", "batch-optimal", "burst"
WAYS = (DATA_PARALLEL, WEAK, BATCH_OPTIMAL, BURST)
"""How a job uses more devices, see `planners.burst.scaling`."""


class Device(NamedTuple):
    """One device of a cluster."""

    host: str
    number: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a job runs in one way on a number of devices."""

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
    """What backgrounds beside it cost: 1 - speed with them / speed alone."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """A job's speeds by way, each by ascending number of devices."""

    ways: Mapping[str, Sequence[Speed]]

    def at(self, way: str, gpus: int) -> Speed | None:
        """Return the speed on the largest known number of devices up to ``gpus``."""
        rows = self.ways.get(way, ())
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
    """As in ``spec``; ``background`` while the job is profiled."""

    least: int
    most: int
    """Devices that it can use; 1 while the job is profiled."""

    priority: int

    submitted_s: float

    ready_s: float = 0.0
    """When it last began to wait."""

    state: str = "submitted"

    attempt: int = 0
    """The last attempt; 0 before the first."""

    devices: tuple[Device, ...] = ()
    """Those that the live attempt has, in the order of ranks."""

    way: str = DATA_PARALLEL
    batch: int | None = None
    """How the live attempt uses its devices."""

    placed_s: float = 0.0
    """When the live attempt got its devices."""

    failures: int = 0

    speeds: Speeds | None = None
    """``None`` if the job was never profiled."""

    @property
    def allows_background(self) -> bool:
        """Whether a background may run beside it."""
        return self.spec.background.allow

    @property
    def memory_bytes(self) -> int:
        """Largest memory on a device; 0 if unknown."""
        return self.spec.memory_bytes

    @property
    def key(self) -> tuple[int, float, int]:
        """Order in which jobs wait: priority, then time, then number."""
        return (-self.priority, self.submitted_s, self.number)


@final
class JobsView:
    """The jobs that wait and run, by role. Jobs that cannot start yet are not here."""

    def __init__(self) -> None:
        self._by_id: dict[str, JobView] = {}
        self._waiting: dict[str, list[tuple[tuple[int, float, int], JobView]]] = {}
        self._live: dict[str, dict[str, JobView]] = {}

    def __getitem__(self, job: str) -> JobView:
        """Return a job by id."""
        return self._by_id[job]

    def waiting(self, role: str) -> Iterator[JobView]:
        """Yield the jobs of a role that wait for devices, in their order."""
        for _, job in self._waiting.get(role, ()):
            yield job

    def num_waiting(self, role: str) -> int:
        """Return how many jobs of a role wait for devices."""
        return len(self._waiting.get(role, ()))

    def live(self, role: str) -> Iterable[JobView]:
        """Return the jobs of a role that have devices, in the order of their start."""
        return self._live.get(role, {}).values()

    # Only the ledger calls these.

    def add_waiting(self, job: JobView) -> None:
        """Add a job that waits for devices."""
        self._by_id[job.id] = job
        insort(self._waiting.setdefault(job.role, []), (job.key, job))

    def add_live(self, job: JobView) -> None:
        """Add a job that has devices."""
        self._by_id[job.id] = job
        self._live.setdefault(job.role, {})[job.id] = job

    def remove(self, job: JobView) -> None:
        """Remove a job that ended or cannot start for now."""
        if self._by_id.pop(job.id, None) is None:
            return
        if self._live.get(job.role, {}).pop(job.id, None) is None:
            rows = self._waiting[job.role]
            del rows[bisect_left(rows, job.key, key=lambda row: row[0])]


@final
@dataclass(slots=True, eq=False, kw_only=True)
class HostView:
    """A host, its devices, and who has them."""

    name: str

    number: int
    """Order in which hosts first joined."""

    memory_bytes: tuple[int, ...]
    """By device; 0 if unknown."""

    is_open: bool = True
    """It is heard from, and not drained."""

    foreground: list[str | None] = field(default_factory=list)
    """The foreground job on each device."""

    background: list[str | None] = field(default_factory=list)
    """The background job on each device."""

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return len(self.memory_bytes)


@final
class ClusterView:
    """All hosts that ever joined, and their free devices."""

    def __init__(self) -> None:
        self.hosts: list[HostView] = []
        self._by_name: dict[str, HostView] = {}

    def __getitem__(self, host: str) -> HostView:
        """Return a host by name."""
        return self._by_name[host]

    @property
    def num_free(self) -> int:
        """Devices of open hosts that no job has."""
        raise NotImplementedError

    @property
    def num_devices(self) -> int:
        """Devices of open hosts."""
        raise NotImplementedError
