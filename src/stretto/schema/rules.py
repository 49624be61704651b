"""Checks of values, for this package and those that build on it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by the type's name in PyTorch and NumPy."""


_LEAST, _MOST = 1e-30, 1e30
"""No rate is outside of these, and no size or time above: products stay finite."""


def finite(place: str, value: float, *, above: float | None = None) -> None:
    """Require a number of 0 to 1e30, or more than ``above`` if it is given.

    Raises:
        SpecError: naming the place, the rule and the value.
    """
    name = place.rpartition(".")[2]
    if not math.isfinite(value):
        raise SpecError(f"{name} must be finite, got {value}", place=place)
    if above is not None and value <= above:
        raise SpecError(f"{name} must be > {above:g}, got {value:g}", place=place)
    if above is None and value < 0:
        raise SpecError(f"{name} must be >= 0, got {value:g}", place=place)
    if value > _MOST or (above == 0.0 and value < _LEAST):
        raise SpecError(
            f"{name} must be within {_LEAST:g} to {_MOST:g}, got {value:g}", place=place
        )


def positive(place: str, value: float) -> None:
    """Require a finite number above 0.

    Raises:
        SpecError: naming the place, the rule and the value.
    """
    if not 0 < value < math.inf:
        name = place.rpartition(".")[2]
        raise SpecError(f"{name} must be finite and > 0, got {value}", place=place)


def at_least(place: str, value: int, minimum: int) -> None:
    """Require an integer of at least ``least`` that fits in 64 bits.

    Raises:
        SpecError: naming the place, the rule and the value.
    """
    if value < minimum:
        name = place.rpartition(".")[2]
        raise SpecError(f"{name} must be >= {minimum}, got {value}", place=place)
    at_most(place, value, 2**63 - 1)


def at_most(place: str, value: int, maximum: int) -> None:
    """Require an integer of at most ``most``.

    Raises:
        SpecError: naming the place, the rule and the value.
    """
    if value > maximum:
        name = place.rpartition(".")[2]
        raise SpecError(f"{name} must be <= {maximum}, got {value}", place=place)


def one_of(place: str, value: str, allowed: Iterable[str]) -> None:
    """Require one of the allowed words.

    Raises:
        SpecError: naming the place, the rule and the value.
    """
    choices = list(allowed)
    if value not in choices:
        name = place.rpartition(".")[2]
        raise SpecError(
            f"{name} must be one of {', '.join(choices)}, got {value!r:.80}",
            place=place,
        )


def one_line(place: str, value: str) -> None:
    """Require a name for tables and messages: not blank, without control characters.

    Raises:
        SpecError: naming the place and the rule.
    """
    not_empty(place, value)
    if any(ord(letter) < ord(" ") or letter == "\x7f" for letter in value):
        name = place.rpartition(".")[2]
        raise SpecError(
            f"{name} must have no control characters, got {value!r}", place=place
        )


def not_empty(place: str, value: str) -> None:
    """Require a name that is not blank.

    Raises:
        SpecError: naming the place and the rule.
    """
    if not value.strip():
        name = place.rpartition(".")[2]
        raise SpecError(f"{name} must not be empty", place=place)
