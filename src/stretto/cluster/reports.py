"""Check agents' reports before they change a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.cluster import events as ev
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.cluster.events import Event

_STATES = ("running", "ended")
_ANY = 2**20


def check(event: Event) -> None:
    """Check that an agent may report an event, and that its data is complete.

    Raises:
        SpecError: naming the kind, the place in the data, the rule and the value.
    """
    if event.kind not in ev.FROM_AGENTS:
        raise SpecError(f"an agent cannot report {event.kind!r}")
    data, place = event.data, f"{event.kind}: $.data"
    if event.kind == ev.JOINED:
        _check_joined(data, place)
    elif event.kind == ev.ENDED:
        _check_end(data, place)
    elif event.kind in (ev.ATTACHED, ev.DETACHED, ev.STARTED):
        if event.kind != ev.STARTED or data.get("devices") is not None:
            _check_devices(data, place, _ANY)
    elif event.kind == ev.PROFILED and not isinstance(data.get("profile"), str):
        raise _wrong(f"{place}.profile", "text", data.get("profile"))


def _check_joined(data: Mapping[str, Any], place: str) -> None:
    _whole(data, "life", place, minimum=1)
    devices = _objects(data, "devices", place)
    for i, row in enumerate(devices):
        _whole(row, "index", f"{place}.devices[{i}]")
        if "memory_bytes" in row:
            _whole(row, "memory_bytes", f"{place}.devices[{i}]")
    indices = sorted(row["index"] for row in devices)
    if indices != list(range(len(devices))):
        raise _wrong(f"{place}.devices", "numbered 0, 1, 2, ...", indices)
    for i, row in enumerate(_objects(data, "attempts", place)):
        here = f"{place}.attempts[{i}]"
        if not isinstance(row.get("job"), str):
            raise _wrong(f"{here}.job", "text", row.get("job"))
        _whole(row, "attempt", here, minimum=1)
        if row.get("state") not in _STATES:
            raise _wrong(f"{here}.state", " or ".join(_STATES), row.get("state"))
        if row["state"] == "ended":
            _check_end(row, here)
        else:
            _check_devices(row, here, len(devices))


def _check_end(data: Mapping[str, Any], place: str) -> None:
    if data.get("code") is not None:
        _whole(data, "code", place, minimum=-_ANY)


def _check_devices(data: Mapping[str, Any], place: str, count: int) -> None:
    found = data.get("devices")
    if not isinstance(found, list | tuple):
        raise _wrong(f"{place}.devices", "a list", found)
    for i, number in enumerate(found):
        if type(number) is not int or not 0 <= number < count:
            rule = f"an index below {count}"
            raise _wrong(f"{place}.devices[{i}]", rule, number)


def _objects(data: Mapping[str, Any], key: str, place: str) -> list[dict[str, Any]]:
    found = data.get(key)
    if not isinstance(found, list | tuple) or not all(
        isinstance(row, dict) for row in found
    ):
        raise _wrong(f"{place}.{key}", "a list of objects", found)
    return list(found)


def _whole(data: Mapping[str, Any], key: str, place: str, *, minimum: int = 0) -> None:
    found = data.get(key)
    if type(found) is not int or found < minimum:
        raise _wrong(f"{place}.{key}", f"an integer of at least {minimum}", found)


def _wrong(place: str, rule: str, found: object) -> SpecError:
    return SpecError(f"{place}: must be {rule}, got {found!r:.80}", place=place)
