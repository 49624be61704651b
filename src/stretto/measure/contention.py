"""Measure how communication of a given resource and computation slow each other.

The samples of LIBRA's model (section III-A): with $r$ the resource of a collective,
$g(b, r)$ a computation beside it, $p(c, r)$ its transmission beside computation and
$q(c, r)$ its transmission alone. The loop is here. An `AbstractContentionBench` does
the timing: real collectives (`stretto.measure.beside`), or a kernel that emulates one
where a device has no peers (`stretto.measure.synthetic`).
"""

from __future__ import annotations

import abc
import random
import statistics
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stretto.errors import NoisyProfile, SpecError
from stretto.measure.steady import quartile_distance
from stretto.schema.samples import ContentionReadings, RateReading, SlowdownReading
from stretto.units import format_bytes, format_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEFAULT_RESOURCES = (1, 2, 4, 8, 16, 32)
DEFAULT_SIZES_BYTES = (4 * 2**20, 16 * 2**20)

_MIN_REPETITIONS = 3


class AbstractContentionBench(abc.ABC):
    """Times single pieces of work on one device.

    With several ranks every call is collective: all ranks make the same calls in the
    same order. Times are this rank's, in seconds.
    """

    @property
    @abc.abstractmethod
    def wire_factor(self) -> float | None:
        """Bytes on the busiest link per byte of a message; ``None``: nothing is sent.

        If nothing is sent, `send_s` is not called.
        """

    @abc.abstractmethod
    def compute_s(self, resource: int | None) -> float:
        """Time a fixed piece of computation, with communication throughout.

        ``None``: computation alone.
        """

    @abc.abstractmethod
    def send_s(self, resource: int, size_bytes: int, *, beside: bool) -> float:
        """Time one collective, with computation throughout or alone."""

    @abc.abstractmethod
    def agree(self, value: float) -> float:
        """Return the first rank's value."""

    @abc.abstractmethod
    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the largest over all ranks, element by element."""

    @abc.abstractmethod
    def provenance(self) -> dict[str, Any]:
        """Return what was measured on, and how."""


def read_contention(
    bench: AbstractContentionBench,
    *,
    resources: Sequence[int] = DEFAULT_RESOURCES,
    sizes_bytes: tuple[int, int] = DEFAULT_SIZES_BYTES,
    repetitions: int = 7,
    budget_s: float = 60.0,
    progress: Callable[[float, str], None] | None = None,
) -> ContentionReadings:
    """Measure samples of LIBRA's model over levels of resource.

    Levels are visited in another order in each turn, and every measurement beside
    communication is paired with one alone just before it. So a machine that becomes
    slower is not mistaken for contention.

    Args:
        bench: Does the timing.
        resources: At least two levels.
        sizes_bytes: Two messages; the difference of their times is transmission.
        repetitions: Turns, as far as the budget allows; at least 3 are made.
        budget_s: No turn begins after this.
        progress: Called with the completed share and a line.

    Raises:
        SpecError: there are fewer than two levels, or the sizes do not grow.
        NoisyProfile: a larger message did not take longer.
    """
    levels = tuple(sorted(set(resources)))
    if len(levels) < 2 or levels[0] < 1:
        raise SpecError(
            "contention needs at least two levels of resource of at least 1, got "
            f"{', '.join(map(str, levels)) or 'none'}"
        )
    if not 0 < sizes_bytes[0] < sizes_bytes[1]:
        raise SpecError(
            f"the second message must be larger than the first, got {sizes_bytes[0]} "
            f"and {sizes_bytes[1]} bytes"
        )
    started = perf_counter()
    sends = bench.wire_factor is not None
    bench.compute_s(None)  # the first turn is warm-up
    for level in levels:
        bench.compute_s(level)
    computed: dict[int, list[list[float]]] = {level: [] for level in levels}
    sent: dict[int, list[list[float]]] = {level: [] for level in levels}
    for turn in range(max(repetitions, _MIN_REPETITIONS)):
        passed_s = bench.agree(perf_counter() - started)
        if turn >= _MIN_REPETITIONS and passed_s > budget_s:
            break
        order = list(levels)
        random.Random(turn).shuffle(order)
        for level in order:
            pair = [bench.compute_s(None), bench.compute_s(level)]
            computed[level].append(bench.slowest(pair))
            if sends:
                row = [
                    bench.send_s(level, size, beside=beside)
                    for beside in (False, True)
                    for size in sizes_bytes
                ]
                sent[level].append(bench.slowest(row))
            if progress is not None:
                share = turn + (order.index(level) + 1) / len(order)
                progress(min(1.0, share / repetitions), f"contention at {level}")
    return ContentionReadings(
        slowdowns=tuple(_slowdown(level, computed[level]) for level in levels),
        rates=tuple(
            _rate(level, sent[level], sizes_bytes, bench.wire_factor)
            for level in levels
            if bench.wire_factor is not None
        ),
        provenance={
            **bench.provenance(),
            "resources": list(levels),
            "sizes_bytes": list(sizes_bytes) if sends else [],
            "elapsed_s": round(bench.agree(perf_counter() - started), 3),
        },
    )


def _slowdown(resource: int, pairs: Sequence[Sequence[float]]) -> SlowdownReading:
    # The median of pairs' ratios, not the ratio of medians: both halves of a pair ran
    # under the same conditions.
    ratios = [beside / alone for alone, beside in pairs]
    alone_s = statistics.median(alone for alone, _ in pairs)
    slower = statistics.median(ratios)
    return SlowdownReading(
        resource=resource,
        compute_alone_s=alone_s,
        compute_overlapped_s=slower * alone_s,
        spread_ratio=quartile_distance(ratios) / slower,
        repetitions=len(pairs),
    )


def _rate(
    resource: int,
    rows: Sequence[Sequence[float]],
    sizes_bytes: tuple[int, int],
    wire_factor: float,
) -> RateReading:
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    exclusive_s, overlapped_s = medians[1] - medians[0], medians[3] - medians[2]
    for what, small_s, large_s in (
        ("alone", medians[0], medians[1]),
        ("beside computation", medians[2], medians[3]),
    ):
        if large_s <= small_s:
            raise NoisyProfile(
                f"with resource {resource}, {what}, a message of "
                f"{format_bytes(sizes_bytes[1])} took {format_s(large_s)} and one of "
                f"{format_bytes(sizes_bytes[0])} {format_s(small_s)}: they give no "
                "rate. Measure larger messages, on a quiet machine"
            )
    return RateReading(
        resource=resource,
        wire_bytes=wire_factor * (sizes_bytes[1] - sizes_bytes[0]),
        exclusive_s=exclusive_s,
        overlapped_s=overlapped_s,
        repetitions=len(rows),
    )
