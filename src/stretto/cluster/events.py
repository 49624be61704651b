"""Events of a cluster: the only input of the ledger, and its only record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# By users, through the coordinator.
SUBMITTED = "submitted"
"""``job`` is its new id. Data: ``spec``, a `schema.job.Job`; ``number``; ``request``,
which no other submission has, if the client gave one."""
REFUSED = "refused"
"""A job file that was not accepted. Data: ``name``, ``why``."""
STOP_REQUESTED = "stop-requested"
"""A user wants the job to end. Data: ``by``."""
DRAINED = "drained"
"""Nothing new starts on ``host``; its attempts are moved. Data: ``by``, and ``ends`` if
it is because the cluster ends: the next start uses the host again."""
OPENED = "opened"
"""``host`` accepts attempts again. Data: ``by``."""

# By agents; each has a host, and all but `JOINED` name a job and an attempt.
JOINED = "joined"
"""An agent begins or returns. Data: ``life``, a number that grows with each life of the
host's agent, such as a counter in a file; ``devices``, a list of objects with ``index``
and ``memory_bytes`` (0: unknown); ``attempts``, all that the host's supervisors know: a
list of objects with ``job``, ``attempt``, ``state`` (``running`` or ``ended``),
``devices`` (indices) and, if it has ended, the data of `ENDED`. What was started and is
missing there has ended."""
STARTED = "started"
"""All ranks of the attempt on ``host`` run."""
ENDED = "ended"
"""No process of the attempt is left on ``host``. Data: ``code``, 0 only if all ranks
ended with 0, null if it is unknown or nothing was started; ``why``, text; ``rank``, the
first that failed; ``signaled``, whether the host had asked the ranks to end. All but
``code`` are optional."""
ATTACHED = "attached"
"""A background attempt uses exactly these devices of ``host``. Data: ``devices``."""
DETACHED = "detached"
"""A background attempt uses exactly these devices of ``host``, and no longer touches
the others. Data: ``devices``, the indices that are left."""
STEP = "step"
"""Progress, about every 10 s. Data: ``step``, ``step_s``, ``samples_per_s``, ``idle_s``
of a rank that makes none for long; all optional. Nothing follows from it, and most old
ones are removed (`step_thinning`)."""
PAUSED = "paused"
RESUMED = "resumed"
SLOWED = "slowed"
"""The background beside it costs a foreground more than it permits. Data: ``loss``."""
REPLANNED = "replanned"
"""The job changed its plan while it runs. Data: ``step``; ``step_s``, of the steps
before; ``predicted_s``; ``took_s``, of the change; ``why``; all optional."""
CHECKPOINTED = "checkpointed"
"""Data: ``step``, and ``path`` if there is one."""
PROFILED = "profiled"
"""A profiling attempt measured the job. Data: ``profile``, a path."""

# By the coordinator's planner.
PLANNED = "planned"
"""Data: ``speeds``, a `views.Speeds`, or null with ``why``."""

# By the ledger itself.
PLACED = "placed"
"""The attempt has its devices. Data: ``purpose``, ``role``, ``devices`` as pairs of
host and index in the order of ranks, ``method``, ``batch``."""
ATTACHING = "attaching"
"""Data: ``devices``, pairs that are added."""
DETACHING = "detaching"
"""Data: ``devices``, pairs that are taken away."""
STOPPING = "stopping"
"""The attempt must end. Data: ``why``, ``then`` (see `ledger`), ``kill_s``."""
LOST = "lost"
"""With an attempt: its part on ``host`` has certainly ended, by its watchdog. Without:
``host`` is silent. Data: ``why``, and for a host ``fence_s``."""
REQUEUED = "requeued"
"""The attempt has ended and the job waits again. Data: ``why``, ``ready_s``,
``failures``."""
DONE = "done"
FAILED = "failed"
"""Data: ``why``, ``code``."""
STOPPED = "stopped"
"""Data: ``why``."""

FROM_AGENTS = frozenset(
    (
        JOINED,
        STARTED,
        ENDED,
        ATTACHED,
        DETACHED,
        STEP,
        PAUSED,
        RESUMED,
        SLOWED,
        REPLANNED,
        CHECKPOINTED,
        PROFILED,
    )
)

BY_THE_COORDINATOR = frozenset(
    (
        SUBMITTED,
        REFUSED,
        STOP_REQUESTED,
        DRAINED,
        OPENED,
        PLANNED,
        PLACED,
        ATTACHING,
        DETACHING,
        STOPPING,
        LOST,
        REQUEUED,
        DONE,
        FAILED,
        STOPPED,
    )
)

KINDS = FROM_AGENTS | BY_THE_COORDINATOR

ENDS = (DONE, FAILED, STOPPED)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    kind: str

    at_s: float
    """On the coordinator's clock (`coordinator.Clock`), which never goes back."""

    job: str = ""

    attempt: int = 0

    host: str = ""

    data: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON, except ``spec`` and ``speeds``, which the store encodes."""

    agent: str = ""
    """Which life of which agent reports it, such as ``node1#17``; empty otherwise."""

    agent_seq: int = 0
    """1, 2, 3, ... in each life of an agent; 0 without an agent."""
