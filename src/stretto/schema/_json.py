"""Read JSON strictly and write it canonically.

msgspec is imported where it is used: its import costs every command 20 to 30 ms, and
help needs no file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from typing import Any

from stretto.errors import SpecError


def dump(body: dict[str, Any]) -> bytes:
    """Return the bytes of a file: its header first, all other keys sorted.

    Raises:
        SpecError: UTF-8 cannot encode it.
    """
    import msgspec

    header = {key: body.pop(key) for key in ("kind", "schema_version", "made_by")}
    ordered = header | {key: _sorted(body[key]) for key in sorted(body)}
    try:
        compact = msgspec.json.encode(ordered)
        return msgspec.json.format(compact, indent=1) + b"\n"
    except (RecursionError, UnicodeEncodeError) as exc:
        raise SpecError(f"{header['kind']}: cannot be written: {exc}") from exc


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value


def plain(value: Any, source: str, at: str = "$") -> Any:
    """Return the value as JSON data, with its fields, and NumPy's scalars as numbers.

    Raises:
        SpecError: JSON cannot represent it.
    """
    try:
        return _plain_below(value, source, at)
    except RecursionError as exc:
        raise SpecError(
            f"{source}: {at}: is nested too deeply to be written", place=at
        ) from exc


def _plain_below(value: Any, source: str, at: str) -> Any:
    # Exact types first: JSON may not be able to write a subclass (a NumPy float).
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if abs(value) >= 10 ** (_MAX_DIGITS - 1):
            rule = f"must be an integer of fewer than {_MAX_DIGITS} digits"
            raise SpecError(f"{source}: {at}: {rule}", place=at)
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise SpecError(f"{source}: {at}: must be finite, got {value}", place=at)
        return value + 0.0  # writes -0.0 as 0.0, because the two are equal
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
        f"{source}: {at}: JSON cannot hold a {type(value).__name__}, got {value!r:.80}",
        place=at,
    )


def parse(data: bytes, source: str) -> dict[str, Any]:
    """Return the object that a file's bytes hold.

    Raises:
        SpecError: the bytes are not JSON or not an object, or contain a duplicate key
            or a number that no field can have.
    """
    body = parse_any(data, source)
    if not isinstance(body, dict):
        raise SpecError(
            f"{source}: $: must be an object, got {type(body).__name__}", place="$"
        )
    return body


def parse_any(data: bytes, source: str) -> Any:
    """Return the value that a file's bytes hold.

    Raises:
        SpecError: the bytes are not JSON, or contain a duplicate key or a number that
            no field can have.
    """
    import msgspec

    defect: tuple[str, str] | None = None
    try:
        body = msgspec.json.decode(data)
        defect = _first_defect(data)
    except (msgspec.DecodeError, ValueError) as exc:
        # Python's parser accepts numbers that JSON does not have, so it can locate
        # them.
        with contextlib.suppress(ValueError, RecursionError):
            defect = _first_defect(data)
        if defect is None:
            why = _not_json(exc, data)
            raise SpecError(f"{source}: is not JSON: {why}", place="$") from exc
    except RecursionError as exc:
        raise SpecError(f"{source}: is nested too deeply", place="$") from exc
    if defect is not None:
        place, rule = defect
        raise SpecError(f"{source}: {place}: {rule}", place=place)
    return body


def _not_json(error: Exception, data: bytes) -> str:
    """Return why bytes are not JSON, with the line and the column."""
    rule, at = str(error).removeprefix("JSON is malformed: "), len(data)
    if (found := _BYTE.search(rule)) is not None:
        rule, at = rule[: found.start()], int(found[1])
    elif isinstance(error, UnicodeDecodeError):
        try:
            data.decode()
        except UnicodeDecodeError as exc:  # the other counts from a string's begin
            rule, at = f"is not UTF-8: {exc.reason}", exc.start
    elif "truncated" in rule:
        rule = "it ends too early"
    before = data[:at]
    line, begin = before.count(b"\n") + 1, before.rfind(b"\n") + 1
    column = len(before[begin:].decode(errors="replace")) + 1
    return f"line {line}, column {column}: {rule}"


_BYTE = re.compile(r" \(byte ([0-9]+)\)$")


@dataclasses.dataclass(frozen=True, slots=True)
class _Defect:
    """Marks, while parsing, the place of a value that a file may not hold."""

    rule: str

    key: str = ""
    """A key that appears twice in the object that this replaces."""


def _first_defect(data: bytes) -> tuple[str, str] | None:
    """Return the place of the first value that breaks a general rule, and the rule.

    The rules for all files: no duplicate keys, only finite numbers, integers that a
    float can hold.
    """
    any_defect = False

    def defect(rule: str, key: str = "") -> _Defect:
        nonlocal any_defect
        any_defect = True
        return _Defect(rule, key)

    def made(pairs: list[tuple[str, Any]]) -> Any:
        value = dict(pairs)
        if len(value) == len(pairs):
            return value
        keys = [key for key, _ in pairs]
        repeated = next(k for i, k in enumerate(keys) if k in keys[:i])
        return defect("is a duplicate key", repeated)

    def number(text: str) -> Any:
        value = float(text)
        return value if math.isfinite(value) else defect(_not_finite(text))

    def integer(text: str) -> Any:
        if len(text) <= _MAX_DIGITS:
            return int(text)
        return defect(
            f"must be an integer of at most {_MAX_DIGITS} digits, got {len(text)}"
        )

    body = json.loads(
        data.decode(),
        object_pairs_hook=made,
        parse_constant=lambda text: defect(_not_finite(text)),
        parse_float=number,
        parse_int=integer,
    )
    return _found(body, "$") if any_defect else None


_MAX_DIGITS = 300
"""So that every integer can be converted to a float; fields have smaller limits."""


def _not_finite(text: str) -> str:
    return f"must be a finite number, got {text:.30}"


def _found(value: Any, place: str) -> tuple[str, str] | None:
    """Return the first defect in a value, and its place."""
    if isinstance(value, _Defect):
        return (f"{place}.{value.key}" if value.key else place), value.rule
    below: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        below = [(f"{place}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        below = [(f"{place}[{i}]", item) for i, item in enumerate(value)]
    for at, item in below:
        if (found := _found(item, at)) is not None:
            return found
    return None
