"""Distinguish steps that a validation has lengthened from usual ones."""

from __future__ import annotations

from collections import deque
from typing import Final, final

RECENT_STEPS: Final = 4
"""A program that evaluates in one of this many steps does so as part of training."""


@final
class Evaluations:
    """Counts a model's forwards without gradients.

    Some programs run such forwards in every step, for instance to make samples for a
    critic or targets for a student: they belong to its time. A validation after some
    hundred steps does not.
    """

    def __init__(self) -> None:
        self._now = 0
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)

    def add(self) -> None:
        """Count an evaluation in the current step."""
        self._now += 1

    def end_step(self) -> bool:
        """End the step; return whether it had more than each of the last few steps."""
        now, self._now = self._now, 0
        unusual = now > max(self._recent, default=0)
        self._recent.append(now)
        return unusual
