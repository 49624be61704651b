"""Measured or given figures of the hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.schema import codec, rules
from stretto.schema._convert import ADDED

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of one physical link."""

    latency_s: float
    """Time before the first byte arrives."""

    bandwidth_bytes_per_s: float
    """Sustained rate of this direction on the wire, not the sum of both."""

    stream_bytes_per_s: float | None = None
    """Highest rate of one flow; ``None``: the whole link."""

    def __post_init__(self) -> None:
        rules.finite(".latency_s", self.latency_s)
        rules.finite(".bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above=0.0)
        if self.stream_bytes_per_s is not None:
            rules.finite(".stream_bytes_per_s", self.stream_bytes_per_s, above=0.0)

    @property
    def flow_bytes_per_s(self) -> float:
        """Rate of a flow that has the link to itself."""
        if self.stream_bytes_per_s is None:
            return self.bandwidth_bytes_per_s
        return min(self.stream_bytes_per_s, self.bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraStartup:
    """Start-up of a message of one size beyond the fitted line."""

    bytes: int

    extra_s: float
    """Negative where the message is faster than the line."""

    def __post_init__(self) -> None:
        rules.at_least(".bytes", self.bytes, 0)
        rules.finite(".extra_s", abs(self.extra_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceFit:
    """Fitted time of one all-reduce alone: ``startup_s + s_per_byte * bytes``."""

    startup_s: float

    s_per_byte: float
    """Seconds per byte of the reduced message (not of the bytes on the wire)."""

    ranks: int
    """Ranks of the fit; costs for other numbers of ranks are scaled from it."""

    extra: tuple[ExtraStartup, ...] = field(default=(), metadata={ADDED: True})
    """Departures from the line, by ascending size: start-up above or below
    ``startup_s``, linear between two sizes and constant beyond the ends."""

    def __post_init__(self) -> None:
        rules.finite(".startup_s", self.startup_s)
        rules.finite(".s_per_byte", self.s_per_byte, above=0.0)
        rules.at_least(".ranks", self.ranks, 2)
        for i, point in enumerate(self.extra):
            if i and point.bytes <= self.extra[i - 1].bytes:
                raise SpecError(
                    f"sizes must ascend, got {point.bytes} after "
                    f"{self.extra[i - 1].bytes}",
                    place=f".extra[{i}].bytes",
                )
            if point.extra_s < -self.startup_s * (1 + 1e-9):
                raise SpecError(
                    f"extra_s must be >= -startup_s ({-self.startup_s:g}), got "
                    f"{point.extra_s:g}",
                    place=f".extra[{i}].extra_s",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Slow-down of simultaneous all-reduces (ASC-WFBP Eq. 7-11)."""

    gamma: tuple[float, ...]
    """``gamma[k-1]``: with k at once each takes ``gamma[k-1]`` times as long per byte
    as alone; the first is 1. Beyond the list the total rate stays constant."""

    startup_per_lane_s: float = field(default=0.0, metadata={ADDED: True})
    """Time that every further lane adds to each all-reduce's start-up: 0 if hosts and
    network start them in parallel."""

    def __post_init__(self) -> None:
        rules.finite(".startup_per_lane_s", self.startup_per_lane_s)
        if not self.gamma or not abs(self.gamma[0] - 1.0) <= 1e-9:
            begin = self.gamma[:1]
            raise SpecError(
                f"gamma must begin with 1.0, got {begin[0] if begin else 'nothing'}",
                place=".gamma[0]" if begin else ".gamma",
            )
        for i, value in enumerate(self.gamma):
            rules.finite(f".gamma[{i}]", value, above=0.0)
            if i and value < self.gamma[i - 1]:
                raise SpecError(
                    f"gamma must not fall, got {value:g} after {self.gamma[i - 1]:g}",
                    place=f".gamma[{i}]",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeContention:
    r"""Compute rate while communication with ``r`` threads runs: LIBRA Eq. 5.

    $\sigma(r) = \alpha_1 - \alpha_2 r$, work done per second relative to 1 alone.
    """

    alpha1: float

    alpha2: float

    def __post_init__(self) -> None:
        rules.finite(".alpha1", self.alpha1, above=0.0)
        rules.finite(".alpha2", self.alpha2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    r"""Communication rate with ``r`` threads: LIBRA Eq. 6, bytes/s on the wire.

    $x(r) = \gamma_1 - \gamma_2 e^{-\gamma_3 r^{\gamma_4}}$
    """

    gamma1: float

    gamma2: float

    gamma3: float

    gamma4: float

    def __post_init__(self) -> None:
        rules.finite(".gamma1", self.gamma1, above=0.0)
        for name in ("gamma2", "gamma3", "gamma4"):
            rules.finite(f".{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How communication and computation slow each other (LIBRA section III)."""

    compute: ComputeContention

    overlapped: RateCurve
    """Rate of a flow while computation runs."""

    exclusive: RateCurve
    """Rate of a flow while no computation runs."""

    resources: tuple[int, ...]
    """Resource levels ``r`` that a collective may use, ascending."""

    def __post_init__(self) -> None:
        if not self.resources:
            raise SpecError("resources must not be empty", place=".resources")
        for i, value in enumerate(self.resources):
            rules.at_least(f".resources[{i}]", value, 1)
            if i and value <= self.resources[i - 1]:
                raise SpecError(
                    f"resources must ascend, got {value} after {self.resources[i - 1]}",
                    place=f".resources[{i}]",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts, links and fitted coefficients.

    ``allreduce``, ``concurrency`` and ``contention`` may be ``None``; the link figures
    and the collectives' closed forms then replace them.
    """

    name: str

    hosts: int

    ranks_per_host: int

    inter_host: Link

    intra_host: Link

    allreduce: AllReduceFit | None = None

    concurrency: Concurrency | None = None

    contention: Contention | None = None

    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules.at_least(".hosts", self.hosts, 1)
        rules.at_least(".ranks_per_host", self.ranks_per_host, 1)

    @property
    def ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.hosts * self.ranks_per_host

    @property
    def bottleneck(self) -> Link:
        """The slowest link that a collective over all ranks crosses."""
        return self.inter_host if self.hosts > 1 else self.intra_host

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Return the cluster in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the cluster atomically."""
        codec.save(path, self)
