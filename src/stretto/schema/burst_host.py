"""What the hosts of a burst plan's ranks add to layers' times."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from stretto.errors import SpecError
from stretto.schema import _rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How much longer computation takes when several ranks compute at once."""

    ranks: int

    ratio: float
    """The slowest rank's time against that of one alone. Ranks that have hosts of
    their own do not slow each other; those that share memory or processors do."""

    def __post_init__(self) -> None:
        _rules.at_least(".ranks", self.ranks, 2)
        _rules.finite(".ratio", self.ratio, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What a rank's own thread takes for communication, and how ranks slow each other.

    The first is the o of LogP (Culler et al., 1993). Measured on the ranks that will
    train.
    """

    message_s: float
    """To begin sending or receiving one message."""

    message_s_per_byte: float
    """More of it for each byte."""

    copy_s_per_byte: float
    """To copy a gradient into a bucket or out of one."""

    exchange_s: float
    """From when the last rank asks how many samples each has until all know."""

    behind_s: float = 0.0
    """Processor time of a message in the connections' own threads, on each side. It
    slows computation only where ranks share processors."""

    behind_s_per_byte: float = 0.0
    """More of it for each byte."""

    slowdowns: tuple[Slowdown, ...] = ()
    """By ascending number of ranks; empty where none was measured."""

    def __post_init__(self) -> None:
        for name in (
            "message_s",
            "message_s_per_byte",
            "copy_s_per_byte",
            "exchange_s",
            "behind_s",
            "behind_s_per_byte",
        ):
            _rules.finite(f".{name}", getattr(self, name))
        for i, (one, two) in enumerate(itertools.pairwise(self.slowdowns)):
            if one.ranks >= two.ranks:
                raise SpecError(
                    f"ranks must ascend, got {two.ranks} after {one.ranks}",
                    place=f".slowdowns[{i + 1}].ranks",
                )

    def slowdown(self, ranks: float) -> float:
        """The ratio for so many ranks at once, at least 1.

        Linear between measured numbers of ranks and on from the last two.
        """
        known = [(1.0, 1.0), *((float(s.ranks), s.ratio) for s in self.slowdowns)]
        if len(known) == 1:
            return 1.0
        pairs = itertools.pairwise(known)
        low, high = next((p for p in pairs if ranks <= p[1][0]), tuple(known[-2:]))
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return max(1.0, low[1] + slope * (ranks - low[0]))
