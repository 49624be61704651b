"""The only reader and writer of our files.

Files are UTF-8 JSON, one object, keys sorted. Each begins with ``kind``,
``schema_version`` and ``made_by``; the values' own fields follow. Reading refuses
whatever it does not know, naming file, place, rule and value; writing is atomic.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stretto._version import __version__
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stretto.schema.timeline import Timeline

SCHEMA_VERSION = 1
MADE_BY = f"stretto {__version__}"

_T = TypeVar("_T")
_US_PER_S = 1e6


def kind_of(value_type: type) -> str:
    """The ``kind`` under which values of a type are filed."""
    return value_type.__name__.lower()


def load(path: str | Path, value_type: type[_T]) -> _T:
    """The value in a file.

    Raises:
        SpecError: the file can't be read or breaks a rule.
    """
    return decode(_read(path), value_type, source=str(path))


def save(path: str | Path, value: Any) -> None:
    """Writes a value's file: whole, or not at all.

    Raises:
        SpecError: the file can't be written.
    """
    write_atomically(path, encode(value))


def encode(value: Any) -> bytes:
    """The canonical bytes of a value's file: equal values give equal bytes."""
    body = msgspec.to_builtins(value)
    return _dump(_header(kind_of(type(value))) | body)


def decode(data: bytes, value_type: type[_T], *, source: str = "<bytes>") -> _T:
    """The value that a file's bytes hold.

    Raises:
        SpecError: naming ``source``, the place in it, the rule and the value.
    """
    body = _parse(data, source)
    _take_header(body, kind_of(value_type), source)
    return convert(body, value_type, source=source)


def convert(body: Any, value_type: type[_T], *, source: str, place: str = "$") -> _T:
    """A value from plain JSON data that carries no header.

    Raises:
        SpecError: naming ``source``, the place in it, the rule and the value.
    """
    for at, rule in _key_errors(body, value_type, place):
        raise SpecError(f"{source}: {at}: {rule}", place=at)
    try:
        return msgspec.convert(body, value_type)
    except msgspec.ValidationError as exc:
        raise _located(exc, body, source, place) from exc


def load_timeline(path: str | Path) -> Timeline:
    """The timeline in a Chrome trace written by `save_timeline`.

    Raises:
        SpecError: the file can't be read or breaks a rule.
    """
    from stretto.schema.timeline import Timeline

    source = str(path)
    body = _parse(_read(path), source)
    _take_header(body, "timeline", source)
    events = body.pop("traceEvents", None)
    if not isinstance(events, list):
        raise SpecError(f"{source}: $.traceEvents: must be a list", place="$")
    tracks: dict[Any, str] = {}
    spans: list[dict[str, Any]] = []
    for i, event in enumerate(events):
        try:
            if event["ph"] == "M" and event["name"] == "thread_name":
                tracks[event["tid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                start_us = event["ts"]
                spans.append(
                    {
                        "track": tracks[event["tid"]],
                        "name": event["name"],
                        "start_s": start_us / _US_PER_S,
                        "end_s": (start_us + event["dur"]) / _US_PER_S,
                        "args": event.get("args", {}),
                    }
                )
        except (KeyError, TypeError) as exc:
            at = f"$.traceEvents[{i}]"
            raise SpecError(
                f"{source}: {at}: is no trace event of ours: {exc!r}", place=at
            ) from exc
    body["spans"] = spans
    return convert(body, Timeline, source=source)


def save_timeline(path: str | Path, timeline: Timeline) -> None:
    """Writes a timeline as Chrome trace events that Perfetto opens.

    Raises:
        SpecError: the file can't be written.
    """
    body = {"name": timeline.name, "traceEvents": trace_events({"": timeline})}
    write_atomically(path, _dump(_header("timeline") | body))


def trace_events(timelines: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    """Chrome trace events of several timelines, one process each, under their labels.

    Times are in microseconds, as the format has them.
    """
    events: list[dict[str, Any]] = []
    for pid, (label, timeline) in enumerate(timelines.items()):
        events.append(_metadata("process_name", pid, 0, label or timeline.name))
        tids = {track: tid for tid, track in enumerate(timeline.tracks)}
        for track, tid in tids.items():
            events.append(_metadata("thread_name", pid, tid, track))
        events.extend(
            {
                "ph": "X",
                "pid": pid,
                "tid": tids[span.track],
                "name": span.name,
                "ts": span.start_s * _US_PER_S,
                "dur": span.duration_s * _US_PER_S,
                "args": span.args,
            }
            for span in timeline.spans
        )
    return events


def write_atomically(path: str | Path, data: bytes) -> None:
    """Writes a file whole or not at all, by renaming a synced temporary file.

    Raises:
        SpecError: the folder does not exist or can't be written.
    """
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}."
        )
    except OSError as exc:
        raise SpecError(f"{target}: can't be written: {exc.strerror}") from exc
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except OSError as exc:
        Path(temporary).unlink(missing_ok=True)
        raise SpecError(f"{target}: can't be written: {exc.strerror}") from exc


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {"name": value}}


def _header(kind: str) -> dict[str, Any]:
    return {"kind": kind, "schema_version": SCHEMA_VERSION, "made_by": MADE_BY}


def _dump(body: dict[str, Any]) -> bytes:
    header = {key: body.pop(key) for key in ("kind", "schema_version", "made_by")}
    ordered = header | {key: body[key] for key in sorted(body)}
    compact = msgspec.json.encode(_sorted(ordered, top=True))
    return msgspec.json.format(compact, indent=1) + b"\n"


def _sorted(value: Any, *, top: bool = False) -> Any:
    if isinstance(value, dict):
        keys = list(value) if top else sorted(value)
        return {key: _sorted(value[key]) for key in keys}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise SpecError(f"{path}: can't be read: {exc.strerror}") from exc


def _parse(data: bytes, source: str) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SpecError(f"{source}: is not JSON: {exc}", place="$") from exc
    if not isinstance(body, dict):
        raise SpecError(
            f"{source}: $: must be an object, got {type(body).__name__}", place="$"
        )
    return body


def _take_header(body: dict[str, Any], kind: str, source: str) -> None:
    for key in ("kind", "schema_version", "made_by"):
        if key not in body:
            raise SpecError(f"{source}: $.{key}: is missing", place=f"$.{key}")
    found, version = body.pop("kind"), body.pop("schema_version")
    made_by = body.pop("made_by")
    if found != kind:
        raise SpecError(
            f"{source}: $.kind: must be {kind!r}, got {found!r}", place="$.kind"
        )
    if version is True or version != SCHEMA_VERSION or not isinstance(version, int):
        raise SpecError(
            f"{source}: $.schema_version: must be {SCHEMA_VERSION}, got {version!r} "
            f"(made by {made_by!r}); this is {MADE_BY}: "
            "make the file again or upgrade stretto",
            place="$.schema_version",
        )
    if not isinstance(made_by, str):
        raise SpecError(
            f"{source}: $.made_by: must be text, got {made_by!r}", place="$.made_by"
        )


def _key_errors(body: Any, value_type: Any, place: str) -> Iterator[tuple[str, str]]:
    """Places whose keys are unknown or missing; msgspec lets unknown ones pass."""
    value_type = _dataclass_in(value_type)
    if value_type is None:
        return
    if isinstance(body, list):
        for i, item in enumerate(body):
            yield from _key_errors(item, value_type, f"{place}[{i}]")
        return
    if not isinstance(body, dict):
        return
    fields = {f.name: f for f in dataclasses.fields(value_type)}
    hints = typing.get_type_hints(value_type)
    for key, item in body.items():
        if key not in fields:
            known = ", ".join(sorted(fields))
            yield f"{place}.{key}", f"is an unknown key; known are {known}"
        else:
            yield from _key_errors(item, hints[key], f"{place}.{key}")
    for key in fields:
        if key not in body:
            yield f"{place}.{key}", "is missing"


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a hint is, or holds as tuple item or optional value."""
    if dataclasses.is_dataclass(hint):
        return hint
    if typing.get_origin(hint) in (tuple, list, typing.Union, types.UnionType):
        for argument in typing.get_args(hint):
            if (found := _dataclass_in(argument)) is not None:
                return found
    return None


def _located(
    exc: msgspec.ValidationError, body: Any, source: str, place: str
) -> SpecError:
    """The error with one place: msgspec's path and, below it, the rule's own."""
    text = str(exc)
    message, _, path = text.partition(" - at `")
    at = place + path.rstrip("`").removeprefix("$")
    if isinstance(exc.__cause__, SpecError):
        message = str(exc.__cause__)
        at += exc.__cause__.place
    elif (found := _lookup(body, at.removeprefix(place))) is not _NOTHING:
        message = f"{message}, value {found!r:.80}"
    return SpecError(f"{source}: {at}: {message}", place=at)


_NOTHING = object()


def _lookup(body: Any, path: str) -> Any:
    for key, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
        try:
            body = body[int(index)] if index else body[key]
        except (KeyError, IndexError, TypeError):
            return _NOTHING
    return body
