"""Events and commands as plain JSON, for a store's rows and for messages."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from stretto.cluster.commands import (
    Command,
    MakePlan,
    StartPart,
    StopPart,
    UseDevices,
)
from stretto.cluster.events import Event
from stretto.cluster.views import Speed, Speeds
from stretto.errors import SpecError
from stretto.schema import codec
from stretto.schema.job import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def row_of_event(event: Event) -> tuple[Any, ...]:
    """Return the columns of an event, after its number."""
    return (
        event.at_s,
        event.kind,
        event.job,
        event.attempt,
        event.host,
        json.dumps(plain_data(event.data), allow_nan=False),
        event.agent or None,
        event.agent_seq or None,
    )


def event_of_row(row: Sequence[Any]) -> Event:
    """Return the event that `row_of_event` wrote.

    Raises:
        ValueError: the row is damaged.
    """
    at_s, kind, job, attempt, host, data, agent, agent_seq = row
    return Event(
        kind,
        at_s,
        job=job,
        attempt=attempt,
        host=host,
        data=data_of(json.loads(data)),
        agent=agent or "",
        agent_seq=agent_seq or 0,
    )


def plain_event_of_row(row: Sequence[Any]) -> dict[str, Any]:
    """Return what `plain_event` makes of the event of a row, mostly without decoding.

    Raises:
        ValueError: the row is damaged.
    """
    at_s, kind, job, attempt, host, text, agent, agent_seq = row
    data = _renamed(json.loads(text))
    if "spec" in data and data["spec"].get("made_by") != codec.MADE_BY:
        data = plain_data(data_of(data))  # of another release: with the present names
    return {
        "kind": kind,
        "at_s": at_s,
        "job": job,
        "attempt": attempt,
        "host": host,
        "data": data,
        "agent": agent or "",
        "agent_seq": agent_seq or 0,
    }


def plain_event(event: Event) -> dict[str, Any]:
    """Return an event as plain JSON."""
    plain = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    return plain | {"data": plain_data(event.data)}


def event_of(plain: Mapping[str, Any]) -> Event:
    """Return the event that `plain_event` wrote.

    Raises:
        SpecError: a field is missing or invalid.
    """
    given = {"data": {}, **plain}
    data = given.pop("data")
    event = codec.convert({**given, "data": {}}, Event, source="event")
    return dataclasses.replace(event, data=data_of(data))


def plain_command(command: Command) -> dict[str, Any]:
    """Return a command as plain JSON, with its kind."""
    plain = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    if "spec" in plain:
        plain["spec"] = json.loads(codec.encode(plain["spec"]))
    return plain | {"command": type(command).__name__}


def command_of(plain: Mapping[str, Any]) -> Command:
    """Return the command that `plain_command` wrote.

    Raises:
        SpecError: a field is missing or invalid.
    """
    body = _renamed(plain)
    kind = _COMMANDS.get(body.pop("command", ""))
    if kind is None:
        raise SpecError(
            f"command must be one of {', '.join(_COMMANDS)}, got "
            f"{plain.get('command')!r}",
            place="$.command",
        )
    if isinstance(body.get("spec"), dict):
        body["spec"] = {
            key: value
            for key, value in body["spec"].items()
            if key not in ("kind", "schema_version", "made_by")
        }
    command: Command = codec.convert(body, kind, source="command")
    return command


_COMMANDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (StartPart, StopPart, UseDevices, MakePlan)
}


def plain_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's data as plain JSON."""
    plain = dict(data)
    if "spec" in plain:
        plain["spec"] = json.loads(codec.encode(plain["spec"]))
    if plain.get("speeds") is not None:
        plain["speeds"] = {
            method: [dataclasses.asdict(row) for row in rows]
            for method, rows in plain["speeds"].methods.items()
        }
    return plain


def data_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's data from plain JSON.

    Raises:
        ValueError: a value is not what it should be.
    """
    data = _renamed(plain)
    if "spec" in data:
        data["spec"] = codec.decode(
            json.dumps(data["spec"]).encode(), Job, source="event"
        )
    if data.get("speeds") is not None:
        data["speeds"] = Speeds(
            methods={
                method: tuple(codec.convert(row, Speed, source="event") for row in rows)
                for method, rows in data["speeds"].items()
            }
        )
    return data


def _renamed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of plain JSON in which earlier names of keys are the present."""
    return {_FORMER_KEYS.get(key, key): value for key, value in plain.items()}


_FORMER_KEYS = {"way": "method"}
"""Keys of events in earlier stores, and of commands between two releases."""
