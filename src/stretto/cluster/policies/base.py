"""The contract of policies."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stretto.cluster.devices import Device, are_text
from stretto.cluster.views import DATA_PARALLEL
from stretto.units import counted, format_bytes

if TYPE_CHECKING:
    from stretto.cluster.views import ClusterView, JobsView, JobView


@dataclass(frozen=True, slots=True)
class Start:
    """Start a waiting job on free devices, in the order of its ranks."""

    job: str
    devices: tuple[Device, ...]
    method: str = DATA_PARALLEL
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Preempt a live job: it stops with grace, then waits again."""

    job: str
    why: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Stop a live foreground job with grace, to start it again with more or fewer.

    The policy chooses the devices when the job waits again; ``gpus`` says for how many
    this happens.
    """

    job: str
    gpus: int
    why: str


@dataclass(frozen=True, slots=True)
class Attach:
    """Give a live background job more devices.

    A process group (`JobView.is_one_group`) gets them on its own host only: its ranks
    start again there, and no other host has to know.
    """

    job: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Detach:
    """Take devices from a live background job, which keeps the others.

    Stop a process group on several hosts instead: all of its ranks must start again.
    """

    job: str
    devices: tuple[Device, ...]


Decision = Start | Stop | Resize | Attach | Detach
"""A policy returns one for each change."""


def devices_text(job: JobView) -> str:
    """Return ``2 devices``, and how much memory they need if the job says so."""
    text = counted(job.minimum, "device")
    return f"{text} with {format_bytes(job.memory_bytes)}" if job.memory_bytes else text


class AbstractPolicy(abc.ABC):
    """Chooses which jobs run where.

    An implementation is deterministic and keeps no state between calls: the same views
    give the same decisions, so that a restarted coordinator decides the same, and the
    simulator runs the code of the cluster. It never changes a view. On each device it
    places at most one foreground and one background; the ledger ignores a decision that
    would break this, and reports it.
    """

    name: ClassVar[str]

    def limit(self, role: str, devices: int) -> int:
        """Return how many devices of a cluster jobs of a role may have.

        A job that needs more is refused, because it would wait forever.

        Args:
            role: the jobs'.
            devices: how many the cluster has.
        """
        del role
        return devices

    @abc.abstractmethod
    def decide(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> list[Decision]:
        """Return what to change now; all decisions hold together.

        It is called after every event and when `next_s` has passed.
        """

    def next_s(
        self, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> float | None:
        """Return when to decide again although nothing happened, or ``None``."""
        del now_s, cluster, jobs
        return None

    def why_waiting(
        self, job: JobView, now_s: float, cluster: ClusterView, jobs: JobsView
    ) -> str:
        """Return why a job that could start does not, in a few words."""
        del now_s, jobs
        free = cluster.free.num_free(memory_bytes=job.memory_bytes)
        if free < job.minimum:
            return f"needs {devices_text(job)}, {are_text(free)} free"
        return "waits for its turn"
