"""The only reader and writer of our files.

Files are UTF-8 JSON, one object, keys sorted. Each begins with ``kind``,
``schema_version`` and ``made_by``; the values' own fields follow. Reading refuses
whatever it does not know, naming file, place, rule and value; writing is atomic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import tempfile
import types
import typing
from dataclasses import dataclass, field
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
_NS_PER_S = 1e9
_NS_PER_US = 1e3


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
    """The canonical bytes of a value's file: equal values give equal bytes.

    Raises:
        SpecError: the value holds what no file can hold, or a field of a wrong type.
    """
    kind = kind_of(type(value))
    # Through the decoder and back: 0 and 0.0 in a field give the same bytes, and what
    # would not be read again is not written.
    valid = convert(_plain(value, kind), type(value), source=kind)
    return _dump(_header(kind) | _plain(valid, kind))


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
    except SpecError as exc:
        at = place + exc.place
        raise SpecError(f"{source}: {at}: {exc}", place=at) from exc


def kind_in(path: str | Path) -> str:
    """The ``kind`` that a file of ours says it holds.

    Raises:
        SpecError: the file can't be read, or is none of ours.
    """
    kind = _parse(_read(path), str(path)).get("kind")
    if not isinstance(kind, str):
        raise SpecError(
            f"{path}: $.kind: must be the kind of a stretto file, got {kind!r}",
            place="$.kind",
        )
    return kind


def load_timeline(path: str | Path) -> Timeline:
    """The timeline in a Chrome trace written by `save_timeline`.

    Raises:
        SpecError: the file can't be read or breaks a rule.
    """
    source = str(path)
    body = _parse(_read(path), source)
    _take_header(body, "timeline", source)
    name = body.pop("name", None)
    timelines = _take_timelines(body, source)
    if not isinstance(name, str):
        raise SpecError(f"{source}: $.name: must be text, got {name!r}", place="$.name")
    if len(timelines) != 1:
        raise SpecError(
            f"{source}: $.traceEvents: must hold one process, got {len(timelines)}",
            place="$.traceEvents",
        )
    return dataclasses.replace(*timelines.values(), name=name)


def save_timeline(path: str | Path, timeline: Timeline) -> None:
    """Writes a timeline as Chrome trace events that Perfetto opens.

    Raises:
        SpecError: the file can't be written.
    """
    body = {
        "name": timeline.name,
        "displayTimeUnit": "ms",
        "traceEvents": trace_events({timeline.name: timeline}),
    }
    write_atomically(path, _dump(_header("timeline") | body))


def load_timelines(path: str | Path) -> dict[str, Timeline]:
    """The timelines in a trace written by `save_timelines`, under their labels.

    Each has its label as its name.

    Raises:
        SpecError: the file can't be read or breaks a rule.
    """
    source = str(path)
    body = _parse(_read(path), source)
    _take_header(body, "trace", source)
    return _take_timelines(body, source)


def save_timelines(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Writes several timelines as one Chrome trace, one process each.

    Raises:
        SpecError: the file can't be written.
    """
    body = {"displayTimeUnit": "ms", "traceEvents": trace_events(timelines)}
    write_atomically(path, _dump(_header("trace") | body))


def trace_events(timelines: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    """Chrome trace events of several timelines, one process each, under their labels.

    Times are in microseconds, as the format has them, rounded to nanoseconds;
    ``track``, ``start_s`` and ``end_s`` stand beside them exactly. Viewers nest what
    overlaps on one thread, so spans of one track that overlap get threads of their
    own, and what waits stands apart from what is sent.

    Raises:
        SpecError: a span's ``args`` hold what no file can hold.
    """
    events: list[dict[str, Any]] = []
    # Numbers from 1: viewers take process 0 and thread 0 for the idle task.
    tid = 0
    for pid, (label, timeline) in enumerate(timelines.items(), start=1):
        process = {"ph": "M", "pid": pid}
        events.append(process | {"name": "process_name", "args": {"name": label}})
        order = {"sort_index": pid}
        events.append(process | {"name": "process_sort_index", "args": order})
        rows = _rows(timeline)
        tids: dict[str, int] = {}
        for row in dict.fromkeys(sorted(rows, key=_row_order)):
            tid += 1
            tids[_row_name(row)] = tid
            thread = process | {"tid": tid}
            args = {"name": _row_name(row)}
            events.append(thread | {"name": "thread_name", "args": args})
            order = {"sort_index": tid}
            events.append(thread | {"name": "thread_sort_index", "args": order})
        for i, (span, row) in enumerate(zip(timeline.spans, rows, strict=True)):
            start_ns = round(span.start_s * _NS_PER_S)
            end_ns = round(span.end_s * _NS_PER_S)
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": tids[_row_name(row)],
                    "name": span.name,
                    "ts": start_ns / _NS_PER_US,
                    "dur": (end_ns - start_ns) / _NS_PER_US,
                    "track": span.track,
                    "start_s": float(span.start_s),
                    "end_s": float(span.end_s),
                    "args": _plain(span.args, label, f"$.spans[{i}].args"),
                }
            )
    return events


@dataclass(frozen=True, kw_only=True)
class _SpanEvent:
    """A complete event of a trace of ours."""

    ph: str
    pid: int
    tid: int
    name: str
    ts: float
    dur: float
    track: str
    start_s: float
    end_s: float
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Requires that the two ways of saying the times agree, to 2 ns."""
        for name, want_s, have_us in (
            ("ts", self.start_s, self.ts),
            ("dur", self.end_s - self.start_s, self.dur),
        ):
            slack_us = 2e-3 + 1e-9 * abs(have_us)
            if not abs(want_s * _NS_PER_S / _NS_PER_US - have_us) <= slack_us:
                raise SpecError(
                    f"{name} must agree with start_s {self.start_s!r} and end_s "
                    f"{self.end_s!r}, got {have_us!r}",
                    place=f".{name}",
                )


def _take_timelines(body: dict[str, Any], source: str) -> dict[str, Timeline]:
    """The timelines in the trace events, which must be all that the body holds."""
    from stretto.schema.timeline import Span, Timeline

    events = body.pop("traceEvents", None)
    if not isinstance(events, list):
        raise SpecError(
            f"{source}: $.traceEvents: must be a list", place="$.traceEvents"
        )
    if body.pop("displayTimeUnit", "ms") != "ms":
        raise SpecError(
            f"{source}: $.displayTimeUnit: must be 'ms'", place="$.displayTimeUnit"
        )
    for key in body:
        raise SpecError(
            f"{source}: $.{key}: is an unknown key; known are displayTimeUnit, "
            "traceEvents and, with one timeline, name",
            place=f"$.{key}",
        )
    labels: dict[int, str] = {}
    spans: dict[int, list[Span]] = {}
    for i, event in enumerate(events):
        at = f"$.traceEvents[{i}]"
        if isinstance(event, dict) and event.get("ph") == "M":
            if event.get("name") == "process_name":
                label, pid = _process_of(event, source, at)
                if pid in labels or label in labels.values():
                    raise SpecError(
                        f"{source}: {at}: process {pid} {label!r} stands twice",
                        place=at,
                    )
                labels[pid] = label
                spans[pid] = []
            continue
        if not isinstance(event, dict) or event.get("ph") != "X":
            raise SpecError(
                f"{source}: {at}: must be a complete event or metadata of ours, "
                f"got {event!r:.80}",
                place=at,
            )
        found = convert(event, _SpanEvent, source=source, place=at)
        if found.pid not in spans:
            raise SpecError(
                f"{source}: {at}.pid: no process_name event before names process "
                f"{found.pid}",
                place=f"{at}.pid",
            )
        plain = {
            key: getattr(found, key)
            for key in ("track", "name", "start_s", "end_s", "args")
        }
        spans[found.pid].append(convert(plain, Span, source=source, place=at))
    return {
        label: Timeline(name=label, spans=tuple(spans[pid]))
        for pid, label in labels.items()
    }


def _process_of(event: dict[str, Any], source: str, at: str) -> tuple[str, int]:
    args, pid = event.get("args"), event.get("pid")
    label = args.get("name") if isinstance(args, dict) else None
    if not isinstance(label, str) or type(pid) is not int:
        raise SpecError(
            f"{source}: {at}: must name a process, got {event!r:.80}", place=at
        )
    return label, pid


def _rows(timeline: Timeline) -> list[tuple[int, str, bool, int]]:
    """The row of each span, so that no two spans of one row overlap.

    A row is (order of its track, track, whether it holds waits, number).
    """
    order = {track: i for i, track in enumerate(timeline.tracks)}
    rows: list[tuple[int, str, bool, int]] = [(0, "", False, 0)] * len(timeline.spans)
    ends_s: dict[tuple[str, bool], list[float]] = {}
    spans = timeline.spans
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].start_s, i)):
        span = spans[i]
        waits = span.args.get("kind") == "wait"
        busy_s = ends_s.setdefault((span.track, waits), [])
        for number, end_s in enumerate(busy_s):
            if end_s <= span.start_s:
                busy_s[number] = span.end_s
                break
        else:
            number = len(busy_s)
            busy_s.append(span.end_s)
        rows[i] = (order[span.track], span.track, waits, number)
    return rows


def _row_order(row: tuple[int, str, bool, int]) -> tuple[int, bool, int]:
    order, _, waits, number = row
    return order, waits, number


def _row_name(row: tuple[int, str, bool, int]) -> str:
    _, track, waits, number = row
    return track + (" waiting" if waits else "") + (f" ({number + 1})" * (number > 0))


def write_atomically(path: str | Path, data: bytes) -> None:
    """Writes a file whole or not at all, by renaming a synced temporary file.

    What is no regular file (a pipe, a terminal) is written to as it is. A link stays,
    and the file behind it is replaced.

    Raises:
        SpecError: the folder does not exist or can't be written.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name[:64]}."
        )
    except (OSError, ValueError) as exc:
        raise SpecError(f"{path}: can't be written: {_reason(exc)}") from exc
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        if isinstance(exc, OSError):
            raise SpecError(f"{path}: can't be written: {_reason(exc)}") from exc
        raise


def _reason(exc: OSError | ValueError) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _header(kind: str) -> dict[str, Any]:
    return {"kind": kind, "schema_version": SCHEMA_VERSION, "made_by": MADE_BY}


def _dump(body: dict[str, Any]) -> bytes:
    header = {key: body.pop(key) for key in ("kind", "schema_version", "made_by")}
    ordered = header | {key: _sorted(body[key]) for key in sorted(body)}
    try:
        compact = msgspec.json.encode(ordered)
        return msgspec.json.format(compact, indent=1) + b"\n"
    except (RecursionError, UnicodeEncodeError) as exc:
        raise SpecError(f"{header['kind']}: can't be written: {exc}") from exc


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value


def _plain(value: Any, source: str, at: str = "$") -> Any:
    """The value as JSON data, NumPy's scalars included.

    Raises:
        SpecError: JSON can't hold it.
    """
    try:
        return _plain_below(value, source, at)
    except RecursionError as exc:
        raise SpecError(
            f"{source}: {at}: is nested too deeply to be written", place=at
        ) from exc


def _plain_below(value: Any, source: str, at: str) -> Any:
    # Exact types first: a subclass (a NumPy float) may not be what JSON writes.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise SpecError(f"{source}: {at}: must be finite, got {value}", place=at)
        return value + 0.0  # -0.0 equals 0.0 and must give its bytes
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(
                    f"{source}: {at}: keys must be text, got {key!r}", place=at
                )
        return {
            key: _plain_below(item, source, f"{at}.{key}")
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _plain_below(item, source, f"{at}[{i}]") for i, item in enumerate(value)
        ]
    for plain_type in (str, int, float):
        if isinstance(value, plain_type):
            return _plain_below(plain_type(value), source, at)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return _plain_below(item(), source, at)
    raise SpecError(
        f"{source}: {at}: JSON can't hold a {type(value).__name__}, got {value!r:.80}",
        place=at,
    )


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as exc:
        raise SpecError(f"{path}: can't be read: {_reason(exc)}") from exc


def _parse(data: bytes, source: str) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
        repeated = _repeated_key(data)
    except (msgspec.DecodeError, ValueError) as exc:
        raise SpecError(f"{source}: is not JSON: {exc}", place="$") from exc
    except RecursionError as exc:
        raise SpecError(f"{source}: is nested too deeply", place="$") from exc
    if repeated is not None:
        raise SpecError(f"{source}: {repeated}: stands twice", place=repeated)
    if not isinstance(body, dict):
        raise SpecError(
            f"{source}: $: must be an object, got {type(body).__name__}", place="$"
        )
    return body


class _Repeated(str):
    """Stands, while parsing, for an object with this key twice."""

    __slots__ = ()


def _repeated_key(data: bytes) -> str | None:
    """The place of the first key that stands twice in one object."""
    any_repeated = False

    def make(pairs: list[tuple[str, Any]]) -> Any:
        nonlocal any_repeated
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        any_repeated = True
        keys = [key for key, _ in pairs]
        return _Repeated(next(k for i, k in enumerate(keys) if k in keys[:i]))

    body = json.loads(data.decode(), object_pairs_hook=make)
    return _place_of_repeated(body, "$") if any_repeated else None


def _place_of_repeated(value: Any, place: str) -> str | None:
    if isinstance(value, _Repeated):
        return f"{place}.{value}"
    below: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        below = [(f"{place}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        below = [(f"{place}[{i}]", item) for i, item in enumerate(value)]
    for at, item in below:
        if (found := _place_of_repeated(item, at)) is not None:
            return found
    return None


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
