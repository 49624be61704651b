"""Derive the next event of one job from its past ones: at most one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.cluster import events as ev
from stretto.cluster.commands import PROFILE, RUN
from stretto.cluster.events import Event
from stretto.cluster.records import (
    ENDS,
    FAILED,
    REQUEUE,
    RETRY,
    STOP,
    STOPPED,
    Attempt,
    JobRecord,
    Part,
)
from stretto.units import counted

if TYPE_CHECKING:
    from stretto.cluster.state import State

_MAX_BACKOFF_S = 3600.0

_MAX_DOUBLINGS = 64
"""Limit of a backoff, whose factor would overflow a float after many failures."""

_ENDED = {FAILED: "failed", STOPPED: "was stopped"}


def follows(record: JobRecord, state: State, now_s: float) -> Event | None:
    """Return the event that follows for a job, or ``None``."""
    view, attempt = record.view, record.live
    if view.state in ENDS:
        return None
    if attempt is not None:
        if not attempt.live_parts():
            return _end_of(record, attempt, now_s)
        return _stop_of(record, attempt, state, now_s)
    last = record.attempts[-1] if record.attempts else None
    if last is not None and last.purpose == RUN and last.is_done:
        # Its host was silent until others might have started it; none has.
        return Event(ev.DONE, now_s, view.id, last.number)
    if record.stop_requested:
        when = (
            "while it waited to start again" if record.num_runs else "before it started"
        )
        why = f"{record.stop_requested} stopped it {when}"
        return Event(ev.STOPPED, now_s, view.id, data={"why": why})
    for name in sorted(record.blocked_by):
        end = state.records[name].view.state
        if end in _ENDED:
            data = {"why": f"it starts after {name}, which {_ENDED[end]}", "code": None}
            return Event(ev.FAILED, now_s, view.id, data=data)
    return None


def _stop_of(
    record: JobRecord, attempt: Attempt, state: State, now_s: float
) -> Event | None:
    """Return the event that stops a live attempt, if it must end."""
    if record.stop_requested and attempt.then != STOP:
        why, then = f"{record.stop_requested} stopped it", STOP
    elif attempt.stopping:
        return None
    elif (moved := _unusable_host(attempt, state)) is not None:
        why, then = moved, REQUEUE
    elif (part := attempt.failed_part) is not None:
        why, then = _failure(part), REQUEUE if part.code is None else RETRY
    else:
        return None
    data = {"why": why, "then": then}
    return Event(ev.STOPPING, now_s, record.view.id, attempt.number, data=data)


def _unusable_host(attempt: Attempt, state: State) -> str | None:
    """Return why an attempt must leave its hosts, if it must.

    One whose hosts are all silent continues if they return before its watchdogs fire:
    stopping it would free no device earlier.
    """
    hosts = [state.cluster.hosts[part.host] for part in attempt.live_parts()]
    if not any(host.is_up for host in hosts):
        return None
    for host in hosts:
        if not host.is_up:
            return f"{host.name} is lost"
        if host.is_drained:
            return f"{host.name} is drained"
    return None


def _failure(part: Part) -> str:
    if part.code is None:
        return part.why or f"its ranks on {part.host} are lost"
    why = part.why or f"ended with code {part.code}"
    return f"on {part.host}: {why}"


def _end_of(record: JobRecord, attempt: Attempt, now_s: float) -> Event:
    """Return what follows when no part of an attempt is left."""
    view, part = record.view, attempt.failed_part
    name, number = view.id, attempt.number
    if attempt.is_done and attempt.purpose == RUN:
        return Event(ev.DONE, now_s, name, number)
    if record.stop_requested:
        why = f"{record.stop_requested} stopped it"
        return Event(ev.STOPPED, now_s, name, number, data={"why": why})
    if attempt.then == REQUEUE or (part is not None and part.code is None):
        why = attempt.stopping or ("" if part is None else _failure(part))
        return _requeue(record, attempt, why, now_s)
    if attempt.purpose == PROFILE:
        return _profile_end(record, attempt, now_s)
    if part is None:  # it ended with 0 when it was asked to
        return _requeue(record, attempt, attempt.stopping, now_s)
    rules = view.spec.restart
    if view.failures < rules.attempts:
        doubled = 2 ** min(view.failures, _MAX_DOUBLINGS)
        wait_s = min(rules.backoff_s * doubled, _MAX_BACKOFF_S)
        found = _requeue(record, attempt, _failure(part), now_s + wait_s)
        more = {"failures": view.failures + 1}
        return replace(found, at_s=now_s, data={**found.data, **more})
    # First: the failure ends with the lines that the job has written.
    after = f"after {counted(view.failures, 'restart')}, " if view.failures else ""
    data = {"why": f"{after}{_failure(part)}", "code": part.code}
    return Event(ev.FAILED, now_s, name, number, data=data)


def _profile_end(record: JobRecord, attempt: Attempt, now_s: float) -> Event:
    part = attempt.failed_part
    if part is None and record.profile:
        return _requeue(record, attempt, "it was profiled", now_s)
    why = "it wrote no profile" if part is None else _failure(part)
    # It runs with plain data parallelism.
    found = _requeue(record, attempt, f"profiling failed: {why}", now_s)
    return replace(found, data={**found.data, "unprofiled": True})


def _requeue(record: JobRecord, attempt: Attempt, why: str, ready_s: float) -> Event:
    data = {"why": why, "ready_s": ready_s, "failures": record.view.failures}
    return Event(ev.REQUEUED, ready_s, record.view.id, attempt.number, data=data)
