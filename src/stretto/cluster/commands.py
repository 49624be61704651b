"""Commands that the ledger sends to hosts.

A command describes a wanted state and stays outstanding until an event shows that it is
reached, so it may be sent, and executed, any number of times.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.schema.job import Job

RUN, PROFILE = "run", "profile"
"""Purposes of an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPart:
    """Start an attempt's ranks on a host; outstanding until `STARTED` or `ENDED`.

    A host refuses it, with `ENDED` and a code other than 0, if it knows a later attempt
    of the job; it ignores it if the attempt is known already.
    """

    host: str
    job: str
    attempt: int

    spec: Job

    purpose: str
    """`RUN`, or `PROFILE`: measure the job's layers on one device."""

    devices: tuple[int, ...]
    """Indices on this host, in the order of its ranks."""

    first_rank: int
    """The rank of the first of ``devices``."""

    ranks: int
    """The number of ranks of the whole attempt."""

    hosts: tuple[str, ...]
    """All hosts of the attempt; rank 0 runs on the first."""

    method: str
    """How devices are used: one of `views.METHODS`."""

    batch: int | None
    """Samples of a step on all devices, if the policy chose it."""

    resume: bool
    """An earlier attempt ran, and may have left a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPart:
    """End an attempt's ranks on a host; outstanding until `ENDED`.

    The host signals the ranks at once and kills what is left after ``grace_s`` counted
    from the first such command. A host that does not know the attempt answers `ENDED`.
    """

    host: str
    job: str
    attempt: int

    signal: str

    grace_s: float

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UseDevices:
    """Let a background attempt use exactly these devices of a host.

    Outstanding until `ATTACHED` or `DETACHED` names the same devices.
    """

    host: str
    job: str
    attempt: int

    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan:
    """Plan a profiled job; for the coordinator itself, outstanding until `PLANNED`."""

    job: str

    spec: Job

    profile: str
    """Path of the layer profile."""


Command = StartPart | StopPart | UseDevices | MakePlan
