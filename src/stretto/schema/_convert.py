"""Convert plain JSON data to values, naming the place of whatever breaks a rule."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from typing import TYPE_CHECKING, Any, TypeVar

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

_T = TypeVar("_T")

ADDED = "added"
"""Metadata key of a field that is missing from files of earlier releases."""

FORMERLY = "formerly"
"""Metadata key of a field's earlier name, which is refused with the new one."""


EARLIER = "earlier"
"""Metadata key of a field's name in files of earlier releases, which is read too."""


def convert(body: Any, value_type: type[_T], *, source: str, place: str = "$") -> _T:
    """Return a value from plain JSON data that has no header.

    Raises:
        SpecError: naming ``source``, the place in it, the rule and the value.
    """
    import msgspec  # late, as in `stretto.schema._json`

    body = _with_present_keys(body, value_type)
    for at, rule in _key_errors(body, value_type, place):
        raise SpecError(f"{source}: {at}: {rule}", place=at)
    try:
        return msgspec.convert(body, value_type)
    except msgspec.ValidationError as exc:
        raise _located(exc, body, source, place) from exc
    except SpecError as exc:
        at = place + exc.place
        raise SpecError(f"{source}: {at}: {exc}", place=at) from exc


def _with_present_keys(body: Any, value_type: Any) -> Any:
    """Return plain data with the present names of fields in place of earlier ones."""
    value_type = _dataclass_in(value_type)
    if value_type is None or not _has_earlier_names(value_type):
        return body
    if isinstance(body, list):
        return [_with_present_keys(item, value_type) for item in body]
    if not isinstance(body, dict):
        return body
    fields = dataclasses.fields(value_type)
    hints = _hints_of(value_type)
    now = {f.metadata[EARLIER]: f.name for f in fields if EARLIER in f.metadata}
    names = {key: now[key] if now.get(key, key) not in body else key for key in body}
    return {
        name: _with_present_keys(body[key], hints.get(name))
        for key, name in names.items()
    }


def _key_errors(body: Any, value_type: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield places whose keys are unknown or missing; msgspec ignores unknown ones."""
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
    hints = _hints_of(value_type)
    formerly = {f.metadata.get(FORMERLY): f.name for f in fields.values()}
    for key, item in body.items():
        if key in formerly and key not in fields:
            yield f"{place}.{key}", f"is called {formerly[key]} now: rename it"
        elif key not in fields:
            known = ", ".join(sorted(fields))
            yield f"{place}.{key}", f"is an unknown key; known are {known}"
        else:
            yield from _key_errors(item, hints[key], f"{place}.{key}")
    for key, known_field in fields.items():
        # A field added in a later release has a default that gives older files' meaning
        if key not in body and not known_field.metadata.get(ADDED):
            yield f"{place}.{key}", "is missing"


@functools.cache
def _has_earlier_names(value_type: type) -> bool:
    """Return whether a field of a dataclass, or of one within it, has another name."""
    if any(EARLIER in f.metadata for f in dataclasses.fields(value_type)):
        return True
    inner = map(_dataclass_in, _hints_of(value_type).values())
    return any(_has_earlier_names(kind) for kind in inner if kind is not None)


@functools.cache
def _hints_of(value_type: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; finding them takes long."""
    return typing.get_type_hints(value_type)


def _dataclass_in(hint: Any) -> Any:
    """Return the dataclass that a hint is, or holds as tuple item or optional value."""
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
    """Return the error with one place: msgspec's path, then the rule's own path."""
    text = str(exc)
    message, _, path = text.partition(" - at `")
    path = _with_key(body, path.rstrip("`").removeprefix("$"), message)
    at = place + path
    if isinstance(exc.__cause__, SpecError):
        message = str(exc.__cause__)
        at += exc.__cause__.place
    elif (found := _lookup(body, at.removeprefix(place))) is not _NOTHING:
        message = f"{message}, value {found!r:.80}"
    return SpecError(f"{source}: {at}: {message}", place=at)


def _with_key(body: Any, path: str, message: str) -> str:
    """Return msgspec's path with the key of a mapping's value, which it leaves out."""
    parent = _lookup(body, path.removesuffix("[...]"))
    if not path.endswith("[...]") or not isinstance(parent, dict):
        return path
    got = message.rpartition(", got `")[2].rstrip("`")
    keys = (key for key, value in parent.items() if _KINDS.get(type(value)) == got)
    key = next(keys, None)
    return path if key is None else f"{path.removesuffix('[...]')}.{key}"


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list: "array",
    dict: "object",
}

_NOTHING = object()


def _lookup(body: Any, path: str) -> Any:
    for key, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
        try:
            body = body[int(index)] if index else body[key]
        except (KeyError, IndexError, TypeError):
            return _NOTHING
    return body
