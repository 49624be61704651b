"""The last comparison of a search: the plans that noise left apart, in turns."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.tune.search import Trial

FINAL_RATIO = 0.10
"""Plans slower than the best by more than this are not compared again."""

MOST_FINALISTS = 3

LEAST_ROUNDS = 2
"""One in each order: what drifts meanwhile touches all alike."""

ROUNDS = 3
"""Turns that each finalist takes at most."""

STEPS = 4
"""Counted steps in each turn; shorter steps, more of them."""

SAME_RATIO = 0.015
"""Whoever is within this of the fastest after `LEAST_ROUNDS` is as good: a further
round would cost more than it can win."""

SURE = 2.0
"""Standard errors of the difference of two medians that decide before all rounds."""

NOISE = 1.0
"""Standard errors by which another must be ahead of the incumbent."""


@final
class Finals:
    """Finalists carried out in turns, so that a slow moment touches all alike.

    The order is reversed every round, so that none always follows the same other. The
    finalist with the shortest median stays, unless chance explains its lead over the
    incumbent. It ends early when one is clearly ahead of every other.
    """

    def __init__(self, finalists: Sequence[Trial]) -> None:
        """Compares ``finalists``, the incumbent first."""
        self.finalists = tuple(finalists)
        self._steps_s: dict[str, list[float]] = {
            trial.plan.digest: [] for trial in finalists
        }
        self._failed: set[str] = set()
        self._rounds = 0
        self._waiting: list[Trial] = []

    @property
    def rounds_done(self) -> int:
        """Rounds in which every finalist had its turn; 0 within one."""
        return 0 if self._waiting else self._rounds

    def next(self) -> Trial | None:
        """Whose turn it is; ``None``: it is decided."""
        while not self._waiting:
            if self._rounds == ROUNDS or (
                self._rounds >= LEAST_ROUNDS and self._decided
            ):
                return None
            order = self.finalists if self._rounds % 2 == 0 else self.finalists[::-1]
            self._waiting = [t for t in order if t.plan.digest not in self._failed]
            self._rounds += 1
            if len(self._waiting) < 2:
                return None
        return self._waiting.pop(0)

    def add(self, digest: str, steps_s: Sequence[float], *, failed: bool) -> None:
        """The steps of a turn."""
        if failed:
            self._failed.add(digest)
        self._steps_s[digest] += steps_s

    def times_s(self, digest: str) -> list[float] | None:
        """Steps of a finalist; ``None`` where it took no part or failed."""
        if digest in self._failed:
            return None
        return self._steps_s.get(digest) or None

    @property
    def best(self) -> Trial:
        """Who stays; the incumbent where nobody beats it by more than the noise."""
        first = self.finalists[0]
        best = self._fastest
        if self.times_s(first.plan.digest) is None:
            return best
        lead = self._ahead(best.plan.digest, first.plan.digest)
        return best if lead > NOISE else first

    @property
    def _fastest(self) -> Trial:
        return min(self.finalists, key=lambda trial: self._median_s(trial.plan.digest))

    @property
    def _decided(self) -> bool:
        best = self._fastest.plan.digest
        return all(
            self._ahead(best, other) > SURE
            or self._median_s(other) <= (1 + SAME_RATIO) * self._median_s(best)
            for other in self._steps_s
            if other != best and other not in self._failed
        )

    def _median_s(self, digest: str) -> float:
        times_s = self.times_s(digest)
        return math.inf if times_s is None else statistics.median(times_s)

    def _ahead(self, best: str, other: str) -> float:
        """By how many standard errors one median is below another."""
        errors_s = math.hypot(self._error_s(best), self._error_s(other))
        ahead_s = self._median_s(other) - self._median_s(best)
        if errors_s == 0:
            return math.inf if ahead_s > 0 else 0.0
        return ahead_s / errors_s

    def _error_s(self, digest: str) -> float:
        """Standard error of a median, from the median absolute deviation.

        For normal errors the deviation is 0.674 and the error of the median
        1.253 / sqrt(n) standard deviations.
        """
        times_s = self.times_s(digest) or [0.0]
        middle_s = statistics.median(times_s)
        spread_s = statistics.median(abs(s - middle_s) for s in times_s)
        return 1.253 * spread_s / 0.674 / math.sqrt(len(times_s))
