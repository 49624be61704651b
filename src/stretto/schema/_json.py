"""JSON as our files have it: strict when read, canonical when written."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import msgspec

from stretto.errors import SpecError


def dump(body: dict[str, Any]) -> bytes:
    """The bytes of a file: its header first, all other keys sorted.

    Raises:
        SpecError: UTF-8 can't hold it.
    """
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


def plain(value: Any, source: str, at: str = "$") -> Any:
    """The value as JSON data, with its fields, and NumPy's scalars as numbers.

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


def parse(data: bytes, source: str) -> dict[str, Any]:
    """The object that a file's bytes hold.

    Raises:
        SpecError: they are no JSON, no object, or hold a key twice.
    """
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
