"""A policy's decisions as events, after a check that they break no rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.cluster import events as ev
from stretto.cluster.commands import PROFILE, RUN
from stretto.cluster.devices import Device
from stretto.cluster.events import Event
from stretto.cluster.policies.base import (
    Attach,
    Detach,
    Resize,
    Start,
    Stop,
)
from stretto.cluster.records import REQUEUE
from stretto.cluster.state import by_host
from stretto.errors import SpecError
from stretto.schema.job import BACKGROUND, FOREGROUND
from stretto.units import counted

if TYPE_CHECKING:
    from stretto.cluster.policies.base import Decision
    from stretto.cluster.records import Attempt, JobRecord
    from stretto.cluster.state import State
    from stretto.cluster.views import JobView


def event_of(decision: Decision, state: State, now_s: float) -> Event:
    """Return the event that makes a decision part of the state.

    Raises:
        SpecError: the decision breaks a rule of `policies.base.AbstractPolicy`.
    """
    record = state.records.get(decision.job)
    if record is None:
        raise SpecError(f"job {decision.job!r} is unknown")
    match decision:
        case Start():
            return _start(decision, record, state, now_s)
        case Attach():
            return _attach(decision, record, state, now_s)
        case Detach():
            return _detach(decision, record, now_s)
        case Stop() | Resize():
            attempt = _live(record)
            data = {"why": decision.why, "then": REQUEUE}
            return Event(ev.STOPPING, now_s, decision.job, attempt.number, data=data)


def _start(decision: Start, record: JobRecord, state: State, now_s: float) -> Event:
    view = record.view
    if not record.in_queue:
        raise SpecError("it does not wait for devices")
    if not view.minimum <= len(decision.devices) <= view.maximum:
        raise SpecError(
            f"it can use {view.minimum} to {view.maximum} devices, not "
            f"{len(decision.devices)}"
        )
    _check_free(view, decision.devices, state)
    devices = list(decision.devices)
    if any(device.host != devices[0].host for device in devices):
        devices = [
            Device(host, number)
            for host, numbers in by_host(decision.devices).items()
            for number in numbers
        ]
    return Event(
        ev.PLACED,
        now_s,
        decision.job,
        view.attempt + 1,
        data={
            "purpose": PROFILE if view.is_profiling else RUN,
            "role": view.role,
            "devices": devices,
            "method": decision.method,
            "batch": decision.batch,
        },
    )


def _attach(decision: Attach, record: JobRecord, state: State, now_s: float) -> Event:
    view, attempt = record.view, _live(record)
    if view.role != BACKGROUND:
        raise SpecError("only a background's devices change while it runs")
    if len(view.devices) + len(decision.devices) > view.maximum:
        raise SpecError(f"it can use at most {counted(view.maximum, 'device')}")
    hosts = {device.host for device in (*view.devices, *decision.devices)}
    if view.is_one_group and len(hosts) > 1:
        raise SpecError("a process group gets more devices on its own host only")
    for host in by_host(decision.devices):
        part = attempt.parts.get(host)
        if part is not None and part.is_released and not part.has_ended:
            raise SpecError(f"it is leaving {host}")
    _check_free(view, decision.devices, state)
    return Event(
        ev.ATTACHING,
        now_s,
        decision.job,
        attempt.number,
        data={"devices": list(decision.devices)},
    )


def _detach(decision: Detach, record: JobRecord, now_s: float) -> Event:
    view, attempt = record.view, _live(record)
    if view.role != BACKGROUND:
        raise SpecError("only a background's devices change while it runs")
    left = set(view.devices) - set(decision.devices)
    if len(left) != len(view.devices) - len(decision.devices):
        raise SpecError("it does not have all these devices")
    if len(left) < view.minimum:
        raise SpecError(f"it needs {counted(view.minimum, 'device')}: stop it")
    if view.is_one_group and view.num_hosts > 1:
        raise SpecError("it is a process group on several hosts: stop it")
    return Event(
        ev.DETACHING,
        now_s,
        decision.job,
        attempt.number,
        data={"devices": list(decision.devices)},
    )


def _live(record: JobRecord) -> Attempt:
    if record.live is None or record.live.stopping:
        raise SpecError("it does not run")
    return record.live


def _check_free(view: JobView, devices: tuple[Device, ...], state: State) -> None:
    """Require devices that the job may have.

    Raises:
        SpecError: a device is unknown, occupied, or too small.
    """
    cluster = state.cluster
    if len(set(devices)) < len(devices):
        raise SpecError("a device is named twice")
    foreground = view.role == FOREGROUND
    held = cluster.foreground if foreground else cluster.background
    for device in devices:
        if device in held:
            raise SpecError(f"{device} has {held[device].id}")
        if not cluster.may_join(view, device):
            if not cluster.free.is_usable(device):
                raise SpecError(f"{device} cannot be used")
            raise SpecError(
                f"{device}: too little memory, or the foreground permits no background"
            )
