"""Views of a ledger's state for the command line."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from stretto.cluster import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from stretto.cluster.ledger import Ledger
    from stretto.cluster.records import JobRecord


def job_rows(ledger: Ledger, now_s: float) -> list[dict[str, Any]]:
    """Return a row for each job, in the order of submission."""
    return [_row(ledger, record, now_s) for record in ledger.state.records.values()]


def _row(ledger: Ledger, record: JobRecord, now_s: float) -> dict[str, Any]:
    view = record.view
    return {
        "job": view.id,
        "name": view.spec.name,
        "role": view.spec.role,
        "user": view.spec.user,
        "priority": view.spec.priority,
        "state": view.state,
        "attempt": view.attempt,
        "devices": [list(device) for device in view.devices],
        "step": record.progress.get("step", {}).get("step"),
        "submitted_s": view.submitted_s,
        "ended_s": record.ended_s,
        "why": _why(ledger, record, now_s),
    }


def _why(ledger: Ledger, record: JobRecord, now_s: float) -> str:
    """Return why a job waits, or ended as it did; empty while it runs."""
    reason = ledger.reason(record.view.id, now_s)
    return reason or ("" if record.live is not None else record.why)


def job_details(ledger: Ledger, job: str, now_s: float) -> dict[str, Any]:
    """Return all that is known of a job.

    Raises:
        SpecError: there is no such job.
    """
    record = ledger.state.records[ledger.job(job).id]
    view = record.view
    speed = None
    if view.speeds is not None and view.devices:
        speed = view.speeds.at(view.method, len(view.devices))
    predicted_s = None if speed is None else speed.step_s
    replanned = record.progress.get(ev.REPLANNED, {})
    return _row(ledger, record, now_s) | {
        "method": view.method,
        "batch": view.batch or view.spec.batch,
        "failures": view.failures,
        "code": record.code,
        "progress": _progress(record),
        "predicted_step_s": replanned.get("predicted_s") or predicted_s,
        "replanned": dict(replanned),
        "command": list(view.spec.command),
        "launch": view.spec.launch,
        "directory": view.spec.directory,
        "after": list(record.after),
    }


def _progress(record: JobRecord) -> dict[str, Any]:
    """Return the last report of a job's steps; one that has ended cannot hang."""
    found = dict(record.progress.get("step", {}))
    if record.live is None:
        found.pop("idle_s", None)
    return found


def status(
    ledger: Ledger,
    policy: str,
    all_hosts: Mapping[str, Sequence[str]],
    connected: Collection[str],
    trouble: str,
    why_silent: Callable[[str], str],
) -> dict[str, Any]:
    """Return hosts, devices and who has them, and the number of jobs by state.

    Args:
        ledger: of the cluster.
        policy: its name.
        all_hosts: names of each host's devices.
        connected: the hosts whose agents are connected.
        trouble: why the store is unavailable, or empty.
        why_silent: returns what to do about a host that is not heard from.
    """
    users: dict[tuple[str, int], dict[str, str]] = {}
    attempts = []
    for record in ledger.state.records.values():
        if record.live is None:
            continue
        attempts.append([record.view.id, record.live.number])
        for part in record.live.live_parts():
            for index in part.held:
                row = users.setdefault((part.host, index), {})
                row[record.view.role] = record.view.id
    hosts = []
    for name, devices in all_hosts.items():
        host = ledger.cluster.hosts.get(name)
        joined = host is not None and host.is_up and name in connected
        hosts.append(
            {
                "host": name,
                "joined": joined,
                "why": "" if joined else why_silent(name),
                "drained": host is not None and host.is_drained,
                "ending": host is not None and host.is_ending,
                "devices": [
                    {
                        "name": device,
                        "foreground": users.get((name, index), {}).get("foreground"),
                        "background": users.get((name, index), {}).get("background"),
                    }
                    for index, device in enumerate(devices)
                ],
            }
        )
    states = Counter(record.view.state for record in ledger.state.records.values())
    return {
        "policy": policy,
        "trouble": trouble,
        "hosts": hosts,
        "jobs": dict(sorted(states.items())),
        "attempts": attempts,
    }
