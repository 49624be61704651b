"""Convert a cluster's state to rows of SQLite tables.

Called by `stretto.cluster.store`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.cluster.events import Event
    from stretto.cluster.records import Attempt, JobRecord
    from stretto.cluster.state import State

TABLES = {
    "jobs": (
        "id",
        "number",
        "name",
        "role",
        "user",
        "queue",
        "priority",
        "state",
        "why",
        "code",
        "attempt",
        "failures",
        "submitted_s",
        "ready_s",
        "ended_s",
        "devices",
    ),
    "attempts": (
        "job",
        "attempt",
        "host",
        "purpose",
        "method",
        "batch",
        "placed_s",
        "state",
        "why",
        "code",
        "devices",
    ),
    "devices": (
        "host",
        "number",
        "memory_bytes",
        "state",
        "foreground",
        "background",
    ),
}
"""Columns by table, keys first."""

Rows = dict[str, list[tuple[Any, ...]]]


def changed_rows(state: State, events: Sequence[Event]) -> Rows:
    """Return the rows that changed since the last write, as they are now."""
    hosts = {event.host for event in events if event.host}
    attempts = [attempt for attempt in state.dirty.values() if attempt is not None]
    for attempt in attempts:
        hosts.update(attempt.parts)
    jobs = dict.fromkeys(job for job, _ in state.dirty)
    return {
        "jobs": [_job_row(state.records[job]) for job in jobs],
        "attempts": [row for attempt in attempts for row in _part_rows(attempt)],
        "devices": _device_rows(state, sorted(hosts)),
    }


def all_rows(state: State) -> Rows:
    """Return the rows of everything."""
    records = state.records.values()
    return {
        "jobs": [_job_row(record) for record in records],
        "attempts": [
            row
            for record in records
            for attempt in record.attempts
            for row in _part_rows(attempt)
        ],
        "devices": _device_rows(state, state.cluster.hosts),
    }


def _job_row(record: JobRecord) -> tuple[Any, ...]:
    view, spec = record.view, record.view.spec
    return (
        view.id,
        view.number,
        spec.name,
        spec.role,
        spec.user,
        spec.queue,
        spec.priority,
        view.state,
        record.why,
        record.code,
        view.attempt,
        view.failures,
        view.submitted_s,
        view.ready_s,
        record.ended_s,
        json.dumps([list(device) for device in view.devices]),
    )


def _part_rows(attempt: Attempt) -> list[tuple[Any, ...]]:
    rows = []
    for part in attempt.parts.values():
        state = "starting"
        if part.has_ended:
            state = "ended"
        elif attempt.stopping or part.is_released:
            state = "stopping"
        elif part.is_started:
            state = "running"
        rows.append(
            (
                attempt.job,
                attempt.number,
                part.host,
                attempt.purpose,
                attempt.method,
                attempt.batch,
                attempt.placed_s,
                state,
                part.why or attempt.stopping,
                part.code,
                json.dumps(list(part.held)),
            )
        )
    return rows


def _device_rows(state: State, hosts: Iterable[str]) -> list[tuple[Any, ...]]:
    cluster, rows = state.cluster, []
    for name in hosts:
        host = cluster.hosts.get(name)
        if host is None:
            continue
        status = "lost" if not host.is_up else "drained" if host.is_drained else "open"
        for device, size in zip(
            cluster.free.devices_of(name), host.memory_bytes, strict=False
        ):
            foreground = cluster.foreground.get(device)
            background = cluster.background.get(device)
            rows.append(
                (
                    name,
                    device.number,
                    size,
                    status,
                    None if foreground is None else foreground.id,
                    None if background is None else background.id,
                )
            )
    return rows
