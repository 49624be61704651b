"""Costs that the hosts of a burst plan's ranks add to layer times."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from stretto.errors import SpecError
from stretto.schema import rules
from stretto.schema._convert import EARLIER


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How much longer computation takes when several ranks compute at once."""

    ranks: int

    ratio: float
    """The slowest rank's time relative to that of one rank alone. Ranks on hosts of
    their own do not slow each other; ranks that share memory or processors do."""

    def __post_init__(self) -> None:
        rules.at_least(".ranks", self.ranks, 2)
        rules.finite(".ratio", self.ratio, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Time a rank's own thread spends on communication, and how ranks slow each other.

    The thread time is the o of LogP (Culler et al., 1993). Measure on the ranks that
    will train.
    """

    message_s: float
    """Time to begin sending or receiving one message."""

    message_s_per_byte: float
    """Additional time per byte."""

    copy_s_per_byte: float
    """Time to copy one byte of a gradient into a bucket or out of one."""

    exchange_s: float
    """Time for the ranks to exchange how many samples each has, from the last rank's
    request until all know."""

    connection_s: float = field(default=0.0, metadata={EARLIER: "behind_s"})
    """Processor time of a message in the connections' own threads, on each side. It
    slows computation only where ranks share processors."""

    connection_s_per_byte: float = field(
        default=0.0, metadata={EARLIER: "behind_s_per_byte"}
    )
    """Additional processor time per byte."""

    slowdowns: tuple[Slowdown, ...] = ()
    """By ascending number of ranks; empty if not measured."""

    def __post_init__(self) -> None:
        for name in (
            "message_s",
            "message_s_per_byte",
            "copy_s_per_byte",
            "exchange_s",
            "connection_s",
            "connection_s_per_byte",
        ):
            rules.finite(f".{name}", getattr(self, name))
        for i, (one, two) in enumerate(itertools.pairwise(self.slowdowns)):
            if one.ranks >= two.ranks:
                raise SpecError(
                    f"ranks must ascend, got {two.ranks} after {one.ranks}",
                    place=f".slowdowns[{i + 1}].ranks",
                )

    def slowdown(self, ranks: float) -> float:
        """Return the slow-down with this number of ranks at once, at least 1.

        Linear between measured numbers of ranks, and extrapolated from the last two.
        """
        known = [(1.0, 1.0), *((float(s.ranks), s.ratio) for s in self.slowdowns)]
        if len(known) == 1:
            return 1.0
        pairs = itertools.pairwise(known)
        low, high = next((p for p in pairs if ranks <= p[1][0]), tuple(known[-2:]))
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return max(1.0, low[1] + slope * (ranks - low[0]))
