"""The options of optimizers, as numbers that ranks compare and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from stretto.burst.checks.numbers import number_of_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer

TOLERANCE = 1e-9
"""Tolerance of options: other processors may round a schedule's rate differently."""

_SMALLEST, _LARGEST = 1e-30, 1e270
"""Smaller and larger numbers, infinity among them, count as equal."""

_CONSTANT = frozenset((bool, int, float, str, type(None)))
"""Types of options whose digest is kept while they stay equal."""


@final
class OptionDigest:
    """Digests of options; those of constants are kept while they stay equal."""

    def __init__(self) -> None:
        self._last: tuple[list[Any], tuple[int, float]] = ([], (0, 0.0))
        self._read: dict[int, tuple[Tensor, int, float]] = {}

    def of(self, options: list[Any]) -> tuple[int, float]:
        """Return a digest of values other than numbers, and a sum for the numbers.

        The weighted sum is over the logarithms of the numbers.
        """
        is_constant = all(
            type(value) in _CONSTANT
            or (type(value) is tuple and all(type(v) in _CONSTANT for v in value))
            for value in options
        )
        if is_constant and options == self._last[0]:
            return self._last[1]
        words: list[str] = []
        total, weight = 0.0, 0.0
        for value in options:
            for atom in self._atoms(value):
                if isinstance(atom, str):
                    words.append(atom)
                    continue
                words.append("number")
                weight = (weight + 0.6180339887498949) % 1.0
                total += (1.0 + weight) * logarithm(atom)
        found = number_of_words(words), total
        if is_constant:
            self._last = options, found
        return found

    def _atoms(self, value: Any) -> Iterator[float | str]:
        if isinstance(value, bool | int | float):
            yield float(value)
        elif isinstance(value, Tensor):
            yield self._number(value)
        elif isinstance(value, str) or value is None:
            yield repr(value)
        elif isinstance(value, Sequence):
            for held in value:
                yield from self._atoms(held)

    def _number(self, tensor: Tensor) -> float:
        """Return a tensor's value, or its values' sum; it is read if it has changed."""
        known = self._read.get(id(tensor))
        version = tensor._version  # noqa: SLF001
        if (
            known is None
            or known[0] is not tensor
            or known[1] != version
            or tensor.device.type == "cpu"
        ):
            value = float(tensor.detach().double().sum())
            if len(self._read) > 256:
                self._read.clear()
            known = self._read[id(tensor)] = (tensor, version, value)
        return known[2]


def options_of(
    optimizer: Optimizer, groups: Iterable[int]
) -> Iterator[tuple[int, str, Any]]:
    """Yield the options of parameter groups: each with its group, name and value."""
    for i in groups:
        group = optimizer.param_groups[i]
        for key in getattr(optimizer, "defaults", ()):
            if key != "params" and key in group:
                yield i, str(key), group[key]


def plain(value: Any) -> Any:
    """Return an option's value with a tensor's as numbers."""
    return value.tolist() if isinstance(value, Tensor) else value


def as_json(value: Any) -> Any:
    """Return an option's value as JSON gives it back."""
    value = plain(value)
    if isinstance(value, (list, tuple)):
        return [as_json(held) for held in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return type(value).__name__


def is_near(one: Any, other: Any) -> bool:
    """Return whether options are equal, up to the rounding of other processors."""
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(is_near(a, b) for a, b in pairs)
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    return bool(one == other)


def logarithm(value: float) -> float:
    """Return a signed logarithm: equal relative changes give equal differences."""
    if math.isnan(value):
        return -1.0
    size = min(abs(value), _LARGEST)
    return math.copysign(math.log1p(size / _SMALLEST), value) if size else 0.0
