"""Types of options that the parser checks, so that an error names the option."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import click

from stretto.errors import StrettoError
from stretto.units import parse_bytes, parse_rate_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGEST = 10**9
"""The largest number of an option without a limit of its own."""

_FASTEST = 1e15 / 8
"""The fastest rate, in bytes per second."""


@final
class Whole(click.IntRange):
    """A whole number: at most 10^9, unless ``max`` says otherwise."""

    name = "integer"  # click's own is "integer range", which its errors print

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number, or raise a usage error."""
        number: int = super().convert(value, param, ctx)
        if self.max is None and number > _LARGEST:
            self.fail(f"{value} is larger than {_LARGEST}.", param, ctx)
        return number


@final
class Real(click.FloatRange):
    """A finite number: at most 10^9, unless ``max`` says otherwise."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number, or raise a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        if self.max is None and number > _LARGEST:
            self.fail(f"{value} is larger than {_LARGEST}.", param, ctx)
        return number


@final
class Size(click.ParamType[int]):
    """Bytes with a unit: ``25MiB``."""

    name = "size"

    def __init__(self, *, least: int = 0) -> None:
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return whole bytes, or raise a usage error."""
        if isinstance(value, int):
            return value
        try:
            size_bytes = parse_bytes(value)
        except StrettoError as error:
            self.fail(str(error), param, ctx)
        if size_bytes < self._least:
            self.fail(f"a size of at least {self._least} B, got {value!r}", param, ctx)
        return size_bytes


@final
class Rate(click.ParamType[float | None]):
    """Bytes per second: ``300mbit``; with ``optional`` also ``none``.

    ``least`` is the smallest rate, in bytes per second.
    """

    name = "rate"

    def __init__(self, *, least: float = 0.0, optional: bool = False) -> None:
        self._least, self._optional = least, optional

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        """Return bytes per second, or raise a usage error."""
        if not isinstance(value, str):
            return float(value)
        if self._optional and value == "none":
            return None
        try:
            rate = parse_rate_bytes_per_s(value)
        except StrettoError as error:
            self.fail(str(error), param, ctx)
        if not self._least <= rate <= _FASTEST:
            least = f"{self._least * 8 / 1e3:g}kbit"
            self.fail(f"a rate from {least} to 1000tbit, got {value!r}", param, ctx)
        return rate


@final
class WholeNumbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers above 0, separated by commas: ``16,64,2048``."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers, or raise a usage error."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(w.isdecimal() and 0 < int(w) <= _LARGEST for w in words):
            self.fail(
                f"numbers from 1 to {_LARGEST} separated by commas, got {value!r}",
                param,
                ctx,
            )
        return tuple(int(word) for word in words)


@final
class Sizes(click.ParamType[tuple[int, ...]]):
    """Sizes above 0, separated by commas: ``1KiB,16MiB``."""

    name = "sizes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return whole bytes, or raise a usage error."""
        if isinstance(value, tuple):
            return value
        size = Size(least=1)
        return tuple(size.convert(part, param, ctx) for part in str(value).split(","))


class RenamedOption(click.Option):
    """An option that is accepted under former names too, which the help omits."""

    def __init__(self, *args: Any, former: Sequence[str] = (), **kwargs: Any) -> None:
        """Accept the names ``former`` beside those of a usual option."""
        super().__init__(*args, **kwargs)
        self.former = tuple(former)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Add the option to click's parser, with its former names."""
        shown = self.opts
        self.opts = [*shown, *self.former]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown
