"""Times that probes of the network and of contention measure, for fitting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stretto.schema import rules


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """Time of several all-reduces that run at the same time, one per lane."""

    size_bytes: int
    """Message size of each of them."""

    lanes: int
    """Number of all-reduces at once."""

    ranks: int

    duration_s: float
    """Median time until all of them have ended, on the slowest rank."""

    spread_s: float
    """Interquartile range of that time."""

    repetitions: int

    def __post_init__(self) -> None:
        rules.at_least(".size_bytes", self.size_bytes, 1)
        rules.at_least(".lanes", self.lanes, 1)
        rules.at_least(".ranks", self.ranks, 2)
        rules.finite(".duration_s", self.duration_s, above=0.0)
        rules.finite(".spread_s", self.spread_s)
        rules.at_least(".repetitions", self.repetitions, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionSample:
    """Computation beside continuous all-reduces, and each alone, on all ranks."""

    size_bytes: int
    """Message size of each all-reduce."""

    lanes: int
    """Number of all-reduces at once; each lane runs them one after another."""

    ranks: int

    compute_alone_s: float
    """Time of a fixed piece of work without communication."""

    compute_overlapped_s: float
    """Time of the same work while the all-reduces run."""

    duration_alone_s: float
    """Time of one all-reduce per lane without computation."""

    duration_overlapped_s: float
    """Time of one all-reduce per lane while computation runs."""

    repetitions: int

    def __post_init__(self) -> None:
        rules.at_least(".size_bytes", self.size_bytes, 1)
        rules.at_least(".lanes", self.lanes, 1)
        rules.at_least(".ranks", self.ranks, 2)
        for name in (
            "compute_alone_s",
            "compute_overlapped_s",
            "duration_alone_s",
            "duration_overlapped_s",
        ):
            rules.finite(f".{name}", getattr(self, name), above=0.0)
        rules.at_least(".repetitions", self.repetitions, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownReading:
    """Computation alone and beside communication; medians, the slowest rank's."""

    resource: int

    compute_alone_s: float

    compute_overlapped_s: float

    spread_ratio: float
    """Distance between the quartiles of the slow-down, over its median."""

    repetitions: int

    def __post_init__(self) -> None:
        for name in ("resource", "compute_alone_s", "compute_overlapped_s"):
            rules.positive(f".{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class RateReading:
    """Transmission alone and beside computation, without the start-up.

    The time of a probe's larger message beyond its smaller one.
    """

    resource: int

    wire_bytes: float

    exclusive_s: float

    overlapped_s: float

    repetitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionReadings:
    """The result of one probe of contention by resource; equal on all ranks."""

    slowdowns: tuple[SlowdownReading, ...]

    rates: tuple[RateReading, ...]
    """Empty if the device has no peers."""

    provenance: dict[str, Any] = field(default_factory=dict)
