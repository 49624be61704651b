"""Piecewise-linear fits of all-reduce times that one line does not explain.

Libraries switch protocol and algorithm with the size of the message, so times below
about 1 MiB follow several lines with jumps between them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.cost.regression import NOISE_RATIO, Fitted, standard_errors
from stretto.errors import Infeasible, SpecError
from stretto.schema import AllReduceFit, ExtraStartup
from stretto.units import format_bytes, format_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from stretto.schema import CollectiveSample

MAX_SEGMENTS = 3

_MIN_SAMPLES = 3  # of a segment
_RESOLUTION = 1e-4  # relative error below which a better fit is insignificant
_CANDIDATES = 96  # segment boundaries to try


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """``startup_s + s_per_byte * bytes`` from its first size on."""

    from_bytes: int

    startup_s: float
    """Value of the line at zero bytes; negative where a segment starts steep."""

    s_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseTime:
    """Time of an all-reduce alone by size: one line per segment."""

    segments: tuple[Segment, ...]

    ranks: int

    def time_s(self, size_bytes: int) -> float:
        """Return the predicted time of one all-reduce of ``size_bytes``."""
        starts = [segment.from_bytes for segment in self.segments]
        segment = self.segments[max(0, bisect_right(starts, size_bytes) - 1)]
        return segment.startup_s + segment.s_per_byte * size_bytes

    def extra(
        self, startup_s: float, s_per_byte: float, sizes: Sequence[int]
    ) -> tuple[ExtraStartup, ...]:
        """Return the time of messages beyond one line, at the ends of the segments.

        ``sizes`` are the measured sizes. Beyond the smallest and the largest nothing is
        known, so the values at the ends apply. A message is never faster than its
        bytes.
        """
        firsts = [max(min(sizes), s.from_bytes) for s in self.segments]
        lasts = [*(first - 1 for first in firsts[1:]), max(sizes)]
        points: dict[int, float] = {}
        for segment, first, last in zip(self.segments, firsts, lasts, strict=True):
            for size in (first, last):
                time_s = segment.startup_s + segment.s_per_byte * size
                line_s = startup_s + s_per_byte * size
                points.setdefault(size, max(time_s - line_s, -startup_s))
        return tuple(
            ExtraStartup(bytes=size, extra_s=extra_s)
            for size, extra_s in sorted(points.items())
        )

    def linear(self) -> AllReduceFit:
        """Return the line of the largest messages, without the others' excess.

        Its start-up is at least 0.
        """
        last = self.segments[-1]
        return AllReduceFit(
            startup_s=max(0.0, last.startup_s),
            s_per_byte=last.s_per_byte,
            ranks=self.ranks,
        )


def fit_piecewise(
    samples: Iterable[CollectiveSample], *, max_segments: int = MAX_SEGMENTS
) -> Fitted[PiecewiseTime]:
    r"""Fit one to three lines to measured times of one lane.

    Minimizes $\sum_i (\hat t_i / t_i - 1)^2$ over lines and over where they begin
    (among up to 96 sizes), exactly, by dynamic programming over prefix sums. The number
    of segments minimizes $n \ln(\sum_i e_i^2 / n) + 3 k \ln n$ (Bayesian information
    criterion, two coefficients and a start per segment), so a further segment must
    improve the fit enough. A segment holds at least three samples, and the last one
    rises. $O(k c^2)$ for $c$ candidates.

    ``std_errors`` are of the last segment's ``startup_s`` and ``s_per_byte``.

    Raises:
        SpecError: samples of several lanes, of differing ranks, or of under two sizes.
        Infeasible: a message takes clearly less time than one of half its size or less,
            or times do not grow with the size at all.
    """
    import numpy as np

    rows = sorted(samples, key=lambda s: (s.size_bytes, s.duration_s))
    ranks = _check(rows, max_segments)
    size = np.array([s.size_bytes for s in rows], dtype=float)
    time_s = np.array([s.duration_s for s in rows])
    sums = _Sums(size, time_s)
    # Segments start at the first sample of a size.
    begins = [i for i in range(len(rows)) if not i or size[i] > size[i - 1]]
    if len(begins) > _CANDIDATES:
        # Denser among small messages, where protocols change.
        places = np.unique(
            np.round(np.geomspace(1, len(begins), _CANDIDATES)).astype(int) - 1
        )
        begins = [begins[i] for i in places]
    max_pieces = max(1, min(max_segments, len(set(size)) // _MIN_SAMPLES))
    best: tuple[float, list[int]] | None = None
    for misfit, chosen in _partitions(sums, [*begins, len(rows)], max_pieces):
        score = len(rows) * math.log(max(misfit / len(rows), _RESOLUTION**2))
        score += 3 * len(chosen) * math.log(len(rows))
        if best is None or score < best[0]:
            best = (score, chosen)
    if best is None:
        raise Infeasible(
            "the times of the largest messages do not grow with the size, which gives "
            "no bandwidth. Measure larger messages"
        )
    firsts = best[1]
    segments = []
    for first, end in zip(firsts, [*firsts[1:], len(rows)], strict=True):
        # From its own samples: sums over all would lose the large messages to rounding.
        own = _Sums(size[first:end], time_s[first:end])
        startup_s, s_per_byte = own.line(free=first > 0)
        segments.append(
            Segment(
                from_bytes=int(size[first]) if first else 0,
                startup_s=startup_s,
                s_per_byte=s_per_byte,
            )
        )
    curve = PiecewiseTime(segments=tuple(segments), ranks=ranks)
    ratios = [curve.time_s(s.size_bytes) / s.duration_s - 1 for s in rows]
    last = firsts[-1]
    errors = standard_errors(
        [(1 / t, m / t) for m, t in zip(size[last:], time_s[last:], strict=True)],
        ratios[last:],
    )
    return Fitted(
        value=curve,
        std_errors=dict(zip(("startup_s", "s_per_byte"), errors, strict=True)),
        residual_ratios=tuple(ratios),
    )


class _Sums:
    """Prefix sums that give any segment's line and misfit in O(1)."""

    def __init__(self, size: NDArray[np.float64], time_s: NDArray[np.float64]) -> None:
        import numpy as np

        self._scale = float(size[-1])
        one, slope = 1 / time_s, size / self._scale / time_s
        self._prefix = np.array(
            [
                np.concatenate([[0.0], np.cumsum(column)])
                for column in (one * one, one * slope, slope * slope, one, slope)
            ]
        )

    def line(self, *, free: bool) -> tuple[float, float]:
        """Return start-up and seconds per byte of all samples.

        With ``free`` the start-up may be negative.
        """
        end = self._prefix.shape[1] - 1
        startup_s, slope, _ = self._solve(0, end, free=free)
        return startup_s, slope / self._scale

    def misfit(self, first: int, end: int) -> float:
        """Return the sum of squared relative errors of a segment.

        It is infinite for a last segment that does not rise.
        """
        _, slope, misfit = self._solve(first, end, free=first > 0)
        last = end == self._prefix.shape[1] - 1
        return math.inf if last and slope <= 0 else misfit

    def _solve(self, first: int, end: int, *, free: bool) -> tuple[float, float, float]:
        aa, ab, bb, a1, b1 = (
            float(v) for v in self._prefix[:, end] - self._prefix[:, first]
        )
        count = end - first
        determinant = aa * bb - ab * ab
        startup_s = slope = -1.0
        if determinant > 1e-12 * aa * bb:
            startup_s = (bb * a1 - ab * b1) / determinant
            slope = (aa * b1 - ab * a1) / determinant
        # Time never falls with the size, and the first line starts at or above zero.
        if slope <= 1e-6 * abs(startup_s):
            startup_s, slope = a1 / aa, 0.0
        elif not free and startup_s < 0:
            startup_s, slope = 0.0, b1 / bb
        misfit = (
            count
            - 2 * (startup_s * a1 + slope * b1)
            + startup_s**2 * aa
            + 2 * startup_s * slope * ab
            + slope**2 * bb
        )
        return startup_s, slope, max(0.0, misfit)


def _partitions(
    sums: _Sums, edges: Sequence[int], max_pieces: int
) -> Iterable[tuple[float, list[int]]]:
    """Return the best partition into 1, 2, ... segments: misfit and starts of each."""
    count = len(edges) - 1
    # reached[j]: smallest misfit of the samples before edges[j] with k segments.
    reached: list[float] = [math.inf] * (count + 1)
    reached[0] = 0.0
    back: list[list[int]] = []
    cost = {
        (i, j): sums.misfit(edges[i], edges[j])
        for j in range(1, count + 1)
        for i in range(j)
        if edges[j] - edges[i] >= min(_MIN_SAMPLES, edges[-1])
    }
    for number in range(1, max_pieces + 1):
        longer = [math.inf] * (count + 1)
        came = [-1] * (count + 1)
        for (i, j), misfit in cost.items():
            if reached[i] + misfit < longer[j]:
                longer[j], came[j] = reached[i] + misfit, i
        reached = longer
        back.append(came)
        if reached[count] == math.inf:
            continue
        chosen, at = [], count
        for step in reversed(range(number)):
            at = back[step][at]
            chosen.append(edges[at])
        yield reached[count], chosen[::-1]


def _check(rows: Sequence[CollectiveSample], max_segments: int) -> int:
    if max_segments < 1:
        raise SpecError(
            f"max_segments must be >= 1, got {max_segments}", place=".max_segments"
        )
    sizes = {s.size_bytes for s in rows}
    if len(sizes) < 2:
        raise SpecError(f"a line needs samples of two sizes at least, got {len(sizes)}")
    for sample in rows:
        if sample.lanes != 1 or sample.ranks != rows[0].ranks:
            raise SpecError(
                f"samples must be of one lane and {rows[0].ranks} ranks, got one of "
                f"{sample.lanes} lanes and {sample.ranks} ranks"
            )
    slowest: CollectiveSample | None = None
    at = 0
    for sample in rows:
        while 2 * rows[at].size_bytes <= sample.size_bytes:
            if slowest is None or rows[at].duration_s > slowest.duration_s:
                slowest = rows[at]
            at += 1
        if slowest is None:
            continue
        noise = max(NOISE_RATIO, 2 * slowest.spread_s / slowest.duration_s)
        if sample.duration_s < (1 - noise) * slowest.duration_s:
            raise Infeasible(
                f"an all-reduce of {format_bytes(sample.size_bytes)} took "
                f"{format_s(sample.duration_s)}, one of "
                f"{format_bytes(slowest.size_bytes)} {format_s(slowest.duration_s)}: "
                "more bytes cannot take less time. Measure again on a quiet network"
            )
    return rows[0].ranks
