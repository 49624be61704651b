"""The only reader and writer of stretto's files.

Files are UTF-8 JSON, one object, keys sorted. Each begins with ``kind``,
``schema_version`` and ``made_by``; the value's own fields follow. Reading refuses
anything unknown, naming file, place, rule and value; writing is atomic.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from stretto._version import __version__
from stretto.errors import SpecError
from stretto.schema._convert import convert
from stretto.schema._json import dump, parse, parse_any, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MADE_BY",
    "SCHEMA_VERSION",
    "convert",
    "decode",
    "encode",
    "kind_in",
    "kind_of",
    "load",
    "parse",
    "parse_any",
    "save",
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
    return decode(read(path), value_type, source=str(path))


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
    return dump(header(kind) | plain(valid, kind))


def decode(data: bytes, value_type: type[_T], *, source: str = "<bytes>") -> _T:
    """Return the value that a file's bytes hold.

    Raises:
        SpecError: naming ``source``, the place in it, the rule and the value.
    """
    body = parse(data, source)
    take_header(body, kind_of(value_type), source)
    return convert(body, value_type, source=source)


def kind_in(path: str | Path) -> str:
    """Return the ``kind`` that a stretto file declares.

    Raises:
        SpecError: the file cannot be read, or is not a stretto file.
    """
    kind = parse(read(path), str(path)).get("kind")
    if not isinstance(kind, str):
        raise SpecError(
            f"{path}: $.kind: must be the kind of a stretto file, got {kind!r:.80}",
            place="$.kind",
        )
    return kind


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
        with replacing(target) as file:
            file.write(data)
    except (OSError, ValueError) as exc:
        raise SpecError(f"{path}: cannot be written: {_reason(exc)}") from exc


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Yield a file that takes a path's place once it is complete on the disk.

    Its name begins with a point and the path's own name. If the block fails, it is
    removed, and what was at the path remains.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(6)}")
    with temporary.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def _reason(exc: OSError | ValueError) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


def header(kind: str) -> dict[str, Any]:
    """Return the entries with which a file of a kind begins."""
    return {"kind": kind, "schema_version": SCHEMA_VERSION, "made_by": MADE_BY}


def read(path: str | Path) -> bytes:
    """Return a file's bytes.

    Raises:
        SpecError: it cannot be read.
    """
    if Path(path).is_char_device():  # such as /dev/zero, which does not end
        raise SpecError(f"{path}: cannot be read: it is a device, not a file")
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as exc:
        raise SpecError(f"{path}: cannot be read: {_reason(exc)}") from exc


def take_header(body: dict[str, Any], kind: str, source: str) -> None:
    """Check and remove the entries with which a file of a kind begins.

    Raises:
        SpecError: an entry is missing or is another kind's or version's.
    """
    for key in ("kind", "schema_version", "made_by"):
        if key not in body:
            raise SpecError(f"{source}: $.{key}: is missing", place=f"$.{key}")
    found, version = body.pop("kind"), body.pop("schema_version")
    made_by = body.pop("made_by")
    if found != kind:
        raise SpecError(
            f"{source}: $.kind: must be {kind!r}, got {found!r:.80}", place="$.kind"
        )
    if version is True or version != SCHEMA_VERSION or not isinstance(version, int):
        raise SpecError(
            f"{source}: $.schema_version: must be {SCHEMA_VERSION}, got "
            f"{version!r:.80} (made by {made_by!r:.80}); this is {MADE_BY}: "
            "make the file again or upgrade stretto",
            place="$.schema_version",
        )
    if not isinstance(made_by, str):
        raise SpecError(
            f"{source}: $.made_by: must be text, got {made_by!r:.80}", place="$.made_by"
        )
