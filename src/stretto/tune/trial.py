"""The blocks of steps that a search runs, its limits, and what it finds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from stretto.errors import SpecError
from stretto.schema import Plan
from stretto.tune.search_space import Point

TRIAL_S = 0.25
"""A block lasts at least this long, because short steps vary more ..."""

MAX_TRIAL_STEPS = 8
"""... but at most this many steps."""

OUTLIER = 3.0
"""A step longer than this multiple of the incumbent's is not attributed to the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits on the cost of a search."""

    steps: int = 100
    """Steps in which plans may be proposed. The deciding comparison with DDP's buckets
    may follow."""

    lost_ratio: float = 0.015
    """Time that trials may lose against the incumbent, as a share of the time trained,
    including changes of plan and pauses. Half of the budget for ``steps`` steps may be
    spent at once; the other half is earned step by step."""

    patience: int | None = None
    """Consecutive trials without a better plan before the techniques stop."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SpecError(f"steps must be >= 1, got {self.steps}", place=".steps")
        if not (math.isfinite(self.lost_ratio) and self.lost_ratio >= 0):
            raise SpecError(
                f"lost_ratio must be >= 0, got {self.lost_ratio}", place=".lost_ratio"
            )
        if self.patience is not None and self.patience < 1:
            raise SpecError(
                f"patience must be >= 1, got {self.patience}", place=".patience"
            )


@dataclass(slots=True, kw_only=True)
class Trial:
    """A block of consecutive steps with one plan."""

    technique: str

    key: Point | str
    """A point of the space, or the name of a plan known before the search."""

    plan: Plan

    wanted_steps: int

    steps_s: list[float] = field(default_factory=list)
    """Step times that count, of the slowest rank, without the step of the change."""

    uncounted_s: list[float] = field(default_factory=list)
    """The other step times: a step of a change, or a recorded step."""

    failed: str | None = None
    """Why the plan could not be run."""

    ended_early: bool = False
    """Whether it was stopped as hopeless before all its steps had run."""

    won: bool = False
    """Whether it became the incumbent."""

    @property
    def step_s(self) -> float:
        """The median step; infinite if the plan could not be run."""
        if self.failed is not None or not self.steps_s:
            return math.inf
        return statistics.median(self.steps_s)

    @property
    def is_long_enough(self) -> bool:
        """Whether its steps can form one side of a pair."""
        steps = len(self.steps_s)
        return steps >= self.wanted_steps and (
            sum(self.steps_s) >= TRIAL_S or steps >= MAX_TRIAL_STEPS
        )

    @property
    def side_steps(self) -> int:
        """How many of a long block's steps form one side of a pair."""
        total_s = 0.0
        for number, step_s in enumerate(self.steps_s, start=1):
            total_s += step_s
            if number >= self.wanted_steps and (
                total_s >= TRIAL_S or number >= MAX_TRIAL_STEPS
            ):
                return number
        return len(self.steps_s)

    def lost_s(self, reference_s: float) -> float:
        """Return the time of its steps beyond the same number of reference steps."""
        steps_s = (*self.steps_s, *self.uncounted_s)
        return sum(min(s, OUTLIER * reference_s) - reference_s for s in steps_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A plan's step time, corrected for changes of the machine's speed."""

    trial: Trial

    step_s: float
