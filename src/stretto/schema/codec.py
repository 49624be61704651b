"""The only reader and writer of stretto's files.

Files are UTF-8 JSON, one object, keys sorted. Each begins with ``kind``,
``schema_version`` and ``made_by``; the value's own fields follow. Reading rejects
anything unknown, naming file, place, rule and value; writing is atomic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stretto._version import __version__
from stretto.errors import SpecError
from stretto.schema._convert import convert
from stretto.schema._json import dump, parse, plain
from stretto.schema._trace import take_timelines, trace_events

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.schema.timeline import Timeline

__all__ = [
    "MADE_BY",
    "SCHEMA_VERSION",
    "convert",
    "decode",
    "encode",
    "kind_in",
    "kind_of",
    "load",
    "load_timeline",
    "load_timelines",
    "save",
    "save_timeline",
    "save_timelines",
    "trace_events",
    "write_atomically",
]

SCHEMA_VERSION = 1
MADE_BY = f"stretto {__version__}"

_T = TypeVar("_T")


def kind_of(value_type: type) -> str:
    """Return the ``kind`` of files that hold values of a type."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", value_type.__name__).lower()


def load(path: str | Path, value_type: type[_T]) -> _T:
    """Return the value in a file.

    Raises:
        SpecError: the file cannot be read or breaks a rule.
    """
    return decode(_read(path), value_type, source=str(path))


def save(path: str | Path, value: Any) -> None:
    """Write a value's file atomically.

    Raises:
        SpecError: the file cannot be written.
    """
    write_atomically(path, encode(value))


def encode(value: Any) -> bytes:
    """Return the canonical bytes of a value's file: equal values give equal bytes.

    Raises:
        SpecError: the value holds what no file can hold, or a field of a wrong type.
    """
    kind = kind_of(type(value))
    # Through the decoder and back: 0 and 0.0 in a field give the same bytes, and a
    # value that could not be read again is not written.
    valid = convert(plain(value, kind), type(value), source=kind)
    return dump(_header(kind) | plain(valid, kind))


def decode(data: bytes, value_type: type[_T], *, source: str = "<bytes>") -> _T:
    """Return the value that a file's bytes hold.

    Raises:
        SpecError: naming ``source``, the place in it, the rule and the value.
    """
    body = parse(data, source)
    _take_header(body, kind_of(value_type), source)
    return convert(body, value_type, source=source)


def kind_in(path: str | Path) -> str:
    """Return the ``kind`` that a stretto file declares.

    Raises:
        SpecError: the file cannot be read, or is not a stretto file.
    """
    kind = parse(_read(path), str(path)).get("kind")
    if not isinstance(kind, str):
        raise SpecError(
            f"{path}: $.kind: must be the kind of a stretto file, got {kind!r}",
            place="$.kind",
        )
    return kind


def load_timeline(path: str | Path) -> Timeline:
    """Return the timeline in a Chrome trace written by `save_timeline`.

    Raises:
        SpecError: the file cannot be read or breaks a rule.
    """
    source = str(path)
    body = parse(_read(path), source)
    _take_header(body, "timeline", source)
    name = body.pop("name", None)
    timelines = take_timelines(body, source)
    if not isinstance(name, str):
        raise SpecError(f"{source}: $.name: must be text, got {name!r}", place="$.name")
    if len(timelines) != 1:
        raise SpecError(
            f"{source}: $.traceEvents: must hold one timeline, got {len(timelines)}",
            place="$.traceEvents",
        )
    return dataclasses.replace(*timelines.values(), name=name)


def save_timeline(path: str | Path, timeline: Timeline) -> None:
    """Write a timeline as Chrome trace events that Perfetto opens.

    Raises:
        SpecError: the file cannot be written.
    """
    body = {
        "name": timeline.name,
        "displayTimeUnit": "ms",
        "traceEvents": trace_events({timeline.name: timeline}),
    }
    write_atomically(path, dump(_header("timeline") | body))


def load_timelines(path: str | Path) -> dict[str, Timeline]:
    """Return the timelines in a trace written by `save_timelines`, by label.

    Each has its label as its name.

    Raises:
        SpecError: the file cannot be read or breaks a rule.
    """
    source = str(path)
    body = parse(_read(path), source)
    _take_header(body, "trace", source)
    return take_timelines(body, source)


def save_timelines(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Write several timelines as one Chrome trace, one process per timeline or rank.

    Raises:
        SpecError: the file cannot be written.
    """
    body = {"displayTimeUnit": "ms", "traceEvents": trace_events(timelines)}
    write_atomically(path, dump(_header("trace") | body))


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file atomically, by renaming a synced temporary file.

    A target that is not a regular file (a pipe, a terminal) is written directly. A
    link is kept, and the file it points to is replaced.

    Raises:
        SpecError: the folder does not exist or cannot be written.
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
        raise SpecError(f"{path}: cannot be written: {_reason(exc)}") from exc
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
            raise SpecError(f"{path}: cannot be written: {_reason(exc)}") from exc
        raise


def _reason(exc: OSError | ValueError) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _header(kind: str) -> dict[str, Any]:
    return {"kind": kind, "schema_version": SCHEMA_VERSION, "made_by": MADE_BY}


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as exc:
        raise SpecError(f"{path}: cannot be read: {_reason(exc)}") from exc


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
