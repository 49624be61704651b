"""The commands that follow from a state: what is wanted and not yet reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.cluster.commands import (
    MakePlan,
    StartPart,
    StopPart,
    UseDevices,
)
from stretto.cluster.records import RETRY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.cluster.commands import Command
    from stretto.cluster.records import Attempt, JobRecord, Part
    from stretto.cluster.state import State
    from stretto.schema.job import Job

_FAILED_GRACE_S = 10.0
"""The wait of a supervisor for its own ranks after one has failed."""


def commands(state: State, host: str | None = None) -> list[Command]:
    """Return outstanding commands: all (``None``), a host's, or of no host ("")."""
    found: list[Command] = []
    names = list(state.cluster.hosts) if host is None else [host] if host else []
    for name in names:
        for (job, _), attempt in state.on_host.get(name, {}).items():
            record = state.records[job]
            found += _for_part(record, attempt, attempt.parts[name])
        for job, number in state.strays.get(name, {}):
            found.append(
                StopPart(
                    host=name,
                    job=job,
                    attempt=number,
                    signal="KILL",
                    grace_s=0.0,
                    why="it should no longer run here",
                )
            )
    if not host:
        found += [
            MakePlan(job=job, spec=record.view.spec, profile=record.profile)
            for job, record in state.records.items()
            if record.needs_plan and record.live is None
        ]
    return found


def _grace_s(spec: Job, attempt: Attempt) -> float:
    """Return how long ranks may take to end.

    Where a rank has failed, the others would wait for it forever, on every host.
    """
    grace_s = spec.restart.grace_s
    return min(grace_s, _FAILED_GRACE_S) if attempt.then == RETRY else grace_s


def _for_part(record: JobRecord, attempt: Attempt, part: Part) -> Iterator[Command]:
    spec = record.view.spec
    if attempt.stopping or part.is_released:
        yield StopPart(
            host=part.host,
            job=attempt.job,
            attempt=attempt.number,
            signal=spec.restart.signal,
            grace_s=_grace_s(spec, attempt),
            why=attempt.stopping or "its devices are needed",
        )
    elif not part.is_started:
        yield StartPart(
            host=part.host,
            job=attempt.job,
            attempt=attempt.number,
            spec=spec,
            purpose=attempt.purpose,
            devices=part.wanted,
            first_rank=part.first_rank,
            ranks=sum(each.num_ranks for each in attempt.parts.values()),
            hosts=tuple(attempt.parts),
            method=attempt.method,
            batch=attempt.batch,
            resume=record.num_runs > 1,
        )
    elif part.uses is None or set(part.uses) != set(part.wanted):
        yield UseDevices(
            host=part.host,
            job=attempt.job,
            attempt=attempt.number,
            devices=part.wanted,
        )
