"""Compare two plans in pairs on a machine whose speed changes during the comparison.

A block of steps of one plan runs between two blocks of another. The ratio of the middle
block to its neighbors cancels slow changes of the machine. A disagreement of the two
neighbors shows a fast change, and such a pair counts less.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIN_NOISE = 0.01
"""Minimum error assumed for a pair's log ratio: two blocks never agree better."""

MAX_NOISE = 1.0
"""Upper limit of the noise estimate: noisier pairs carry no information."""

_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation, for normal errors."""

_NEIGHBOR_SHARE = 0.5
"""Share of the neighbors' disagreement that counts as a pair's error."""

_JUMP_SHARE = 0.3
"""Share of the usual change from block to block that counts as every pair's error: the
middle block may coincide with a fast or slow period that neither neighbor shows."""

_FEW_PAIRS = 1.5
"""Few pairs understate their error: multiply it by 1 plus this over their number."""

SURE = 2.0
"""Standard errors by which a plan must lead to replace another."""

LIKELY = 1.0
"""The same when a comparison must end undecided."""

_SURE_AT_ONCE = 4.0
_CLEAR_LOG = 0.3
"""A single pair decides if it exceeds this by `_SURE_AT_ONCE` standard errors."""

HOPE = 1.5
"""Standard errors: a plan that would not win with this much luck is dropped."""

MIN_PAIRS = 2
"""Pairs needed before a plan is dropped, unless the caller sets another number."""

_REMEMBERED_STEPS = 60
_REMEMBERED_JUMPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One block between two blocks of the other plan."""

    log_ratio: float
    """Logarithm of the block's median step over its neighbors'."""

    error: float
    """Standard error of ``log_ratio``, as far as one pair shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The combined result of all pairs of two plans: log ratio and its error."""

    log_ratio: float

    error: float

    pairs: int

    @property
    def ratio(self) -> float:
        """The middle plan's step divided by the other's."""
        return math.exp(self.log_ratio)

    def inverse(self) -> Estimate:
        """Return the same comparison with the plans exchanged."""
        return Estimate(log_ratio=-self.log_ratio, error=self.error, pairs=self.pairs)

    def chained(self, after: Estimate) -> Estimate:
        """Return the ratio of the first plan to the third, through the second."""
        return Estimate(
            log_ratio=self.log_ratio + after.log_ratio,
            error=math.hypot(self.error, after.error),
            pairs=min(self.pairs, after.pairs),
        )


@final
class Noise:
    """Variation of one plan's steps within a block and from block to block."""

    def __init__(self) -> None:
        self._residuals: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._jumps: deque[float] = deque(maxlen=_REMEMBERED_JUMPS)

    def add(self, steps_s: Sequence[float]) -> None:
        """Add the steps of one block."""
        if len(steps_s) < 2:
            return
        middle = math.log(statistics.median(steps_s))
        # In blocks of odd length the median's own deviation is 0: leave it out.
        found = sorted(abs(math.log(step_s) - middle) for step_s in steps_s)
        self._residuals.extend(found[len(steps_s) % 2 :])

    def add_jump(self, before_s: Sequence[float], after_s: Sequence[float]) -> None:
        """Add two blocks of the same plan, the second at least one block later."""
        ratio = statistics.median(after_s) / statistics.median(before_s)
        self._jumps.append(abs(math.log(ratio)))

    @property
    def of_a_jump(self) -> float:
        """The usual change of the machine's speed between blocks, as a logarithm."""
        return statistics.median(self._jumps) if self._jumps else 0.0

    @property
    def of_a_step(self) -> float:
        """The standard deviation of a step's logarithm, robust to outliers."""
        if not self._residuals:
            return 0.0
        return _NORMAL * statistics.median(self._residuals)

    def of_a_median(self, steps: int) -> float:
        """Return the standard error of the median of ``steps`` steps, within limits."""
        error = 1.253 * self.of_a_step / math.sqrt(max(1, steps))
        return min(MAX_NOISE, max(MIN_NOISE, error))


def compare(
    before_s: Sequence[float],
    middle_s: Sequence[float],
    after_s: Sequence[float],
    *,
    noise: Noise,
) -> Pair:
    """Return the pair for three blocks of steps."""
    before, middle, after = (
        math.log(statistics.median(steps_s))
        for steps_s in (before_s, middle_s, after_s)
    )
    shortest = min(len(before_s), len(middle_s), len(after_s))
    error = math.sqrt(1.5) * noise.of_a_median(shortest)
    return Pair(
        log_ratio=middle - (before + after) / 2,
        error=math.hypot(
            error, _NEIGHBOR_SHARE * (after - before), _JUMP_SHARE * noise.of_a_jump
        ),
    )


def estimate(pairs: Iterable[Pair]) -> Estimate:
    """Return the combined estimate: a weighted median, robust to one bad pair.

    The error is the larger of the value from the pairs' own errors and the value from
    their disagreement, and larger than both for few pairs. That of one pair is its own.
    """
    found = sorted(pairs, key=lambda pair: pair.log_ratio)
    weights = [pair.error**-2 for pair in found]
    total = sum(weights)
    promised = total**-0.5
    if len(found) < 3:
        middle = sum(w * p.log_ratio for w, p in zip(weights, found, strict=True))
        middle /= total
        spread = found[-1].log_ratio - found[0].log_ratio
        shown = spread / 2
    else:
        middle = _weighted_median(found, weights)
        deviation = _weighted_median(
            sorted(
                (
                    Pair(log_ratio=abs(pair.log_ratio - middle), error=pair.error)
                    for pair in found
                ),
                key=lambda pair: pair.log_ratio,
            ),
        )
        shown = 1.253 * _NORMAL * deviation / math.sqrt(len(found))
    error = max(promised, shown)
    if len(found) > 1:
        error *= 1 + _FEW_PAIRS / len(found)
    return Estimate(log_ratio=middle, error=error, pairs=len(found))


def shown_faster(
    found: Estimate,
    margin: float,
    *,
    is_last: bool,
    gives_up: bool = False,
    hope: float = HOPE,
    min_pairs: int = MIN_PAIRS,
) -> bool | None:
    """Return whether pairs show a plan to be faster, or ``None`` if more are needed.

    Args:
        found: The estimate of the plan's step over the other's.
        margin: The smallest gain that counts, as a logarithm.
        is_last: Whether no more pairs can follow, so that a likely answer is enough.
        gives_up: Whether a plan that has not won by now has lost.
        hope: Standard errors: a plan that would not win with this much luck has lost.
        min_pairs: The number of pairs needed before a plan can have lost.
    """
    if is_surely_below(found, -margin, is_last=is_last):
        return True
    without_hope = found.log_ratio - hope * found.error > -margin
    if found.pairs >= min_pairs and (without_hope or is_last or gives_up):
        return False
    return None


def is_surely_below(found: Estimate, log_ratio: float, *, is_last: bool) -> bool:
    """Return whether a ratio is surely below; likely, if no more pairs can follow."""
    if found.pairs == 1:
        return found.log_ratio + _SURE_AT_ONCE * found.error < min(
            log_ratio, -_CLEAR_LOG
        )
    return found.log_ratio + (LIKELY if is_last else SURE) * found.error < log_ratio


def _weighted_median(
    pairs: Sequence[Pair], weights: Sequence[float] | None = None
) -> float:
    """Return the weighted median of sorted pairs, interpolated between neighbors."""
    shares = weights or [pair.error**-2 for pair in pairs]
    half = sum(shares) / 2
    passed = 0.0
    places = []
    for share in shares:
        places.append(passed + share / 2)
        passed += share
    for i, place in enumerate(places):
        if place >= half:
            if i == 0:
                return pairs[0].log_ratio
            part = (half - places[i - 1]) / (place - places[i - 1])
            low, high = pairs[i - 1].log_ratio, pairs[i].log_ratio
            return low + part * (high - low)
    return pairs[-1].log_ratio
