"""Records of jobs: their attempts, and the attempts' parts on hosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from stretto.cluster.views import JobView

SUBMITTED, PROFILING, WAITING = "submitted", "profiling", "waiting"
STARTING, RUNNING, PAUSED, STOPPING = "starting", "running", "paused", "stopping"
DONE, FAILED, STOPPED = "done", "failed", "stopped"
ENDS = (DONE, FAILED, STOPPED)

REQUEUE, RETRY, STOP = "requeue", "retry", "stop"
"""How a job continues when its stopping attempt has ended: it waits again, for free or
after a failure, or ends."""


@final
@dataclass(slots=True, eq=False, kw_only=True)
class Part:
    """The ranks of an attempt on one host."""

    host: str

    first_rank: int

    wanted: tuple[int, ...]
    """The devices that it should use, in the order of ranks; none once it has ended."""

    num_ranks: int
    """Its ranks, also once it has ended: parts that start later count them."""

    held: tuple[int, ...]
    """The devices that it may be using; a superset of ``wanted``."""

    is_started: bool = False

    uses: tuple[int, ...] | None = None
    """The devices that it uses by its last report; ``None``: not known."""

    is_released: bool = False
    """All its devices were taken away, so it ends and the attempt continues."""

    has_ended: bool = False

    code: int | None = None
    """0 only if all its ranks ended with 0; ``None``: unknown, because it was lost."""

    by_itself: bool = False
    """It ended, and nothing had asked it to."""

    why: str = ""


@final
@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One start of a job."""

    job: str

    number: int

    purpose: str

    method: str

    batch: int | None

    placed_s: float

    parts: dict[str, Part]
    """By host, in the order of ranks."""

    stopping: str = ""
    """Why it must end; empty if it need not."""

    then: str = ""
    """`REQUEUE`, `RETRY` or `STOP`, if it must end."""

    has_ended: bool = False

    def live_parts(self) -> list[Part]:
        """Return the parts that have not ended."""
        return [part for part in self.parts.values() if not part.has_ended]

    @property
    def failed_part(self) -> Part | None:
        """The part that failed, one that failed by itself before others."""
        failed = [
            part
            for part in self.parts.values()
            if part.has_ended and part.code != 0 and not part.is_released
        ]
        return next((part for part in failed if part.by_itself), None) or (
            failed[0] if failed else None
        )

    @property
    def is_done(self) -> bool:
        """Whether all parts ended with success, and nothing had asked them to."""
        return all(
            part.has_ended and part.code == 0 and part.by_itself
            for part in self.parts.values()
            if not part.is_released
        )


@final
@dataclass(slots=True, eq=False, kw_only=True)
class JobRecord:
    """All that is known of a job."""

    view: JobView

    after: tuple[str, ...] = ()
    """Ids of jobs that must be done before."""

    blocked_by: set[str] = field(default_factory=set)
    """Jobs of ``after`` that are not done."""

    live: Attempt | None = None

    attempts: list[Attempt] = field(default_factory=list)
    """All, oldest first."""

    in_queue: bool = False
    """It waits for devices, and policies see it."""

    not_before_s: float = 0.0

    stop_requested: str = ""
    """The user or cause that requested it; empty if not requested."""

    profile: str = ""
    """Path of its layer profile; empty if it has no profile."""

    needs_plan: bool = False

    num_runs: int = 0
    """How many attempts of purpose `RUN` were placed."""

    why: str = ""
    """Why it last ended, failed or was requeued."""

    code: int | None = None

    ended_s: float | None = None

    progress: dict[str, Any] = field(default_factory=dict)
    """The last reports' contents: step times, checkpoints, losses."""
