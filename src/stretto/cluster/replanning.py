"""When a running job's plan is measured, made again and changed: pure decisions.

`plan_changes` executes them for `supervisor`.

# Note [When a plan changes]
A job is measured once its steps are steady, and again when their time has changed by
`Rules.drift_ratio` for several reports in a row. From the measured layers the planner
predicts a step of the present plan and of the best one. The best one is used only if it
gains `Rules.min_gain_ratio`, and what it gains in as many steps as the job has taken
repays the change `Rules.repays` times; until then it waits. After a change the steps
are compared with those before: a plan that is not faster is taken back, and nothing is
tried again before the steps change once more. So a job whose speed swings between two
values is measured at each swing at most, and its plan changes only for a gain.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import final

WATCHING, MEASURING, PLANNING = "watching", "measuring", "planning"
CHANGING, CHECKING, OFF = "changing", "checking", "off"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When a change is worth it."""

    reports: int = 3
    """Reports of steps in a row that a decision rests on."""

    drift_ratio: float = 0.1
    """Change of the step time after which a job is measured again."""

    min_gain_ratio: float = 0.05

    repays: float = 10.0

    first_change_steps: float = 10.0
    """The assumed cost of a change before one was made."""

    min_pause_reports: int = 10
    """Reports between two measurements."""

    patience_reports: int = 30
    """Reports without an answer, after which a job counts as one that reads no
    requests."""

    measured_steps: int = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrediction:
    """The planner's prediction from measured layers."""

    now_s: float
    """A step by the present plan."""

    new_s: float
    """A step by the best plan."""

    plan: str
    """The best plan, as the text of its file."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Measure the layers in some steps."""

    steps: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Follow another plan."""

    plan: str

    step_s: float
    """The time of the steps before."""

    predicted_s: float
    """The predicted time of a step with the plan."""

    why: str


@final
class Replanning:
    """Decides for one attempt. Methods return what to do now, or ``None``."""

    def __init__(self, plan: str, rules: Rules | None = None) -> None:
        """Begin with a plan, as the text of its file."""
        self.plan = plan
        self.state = WATCHING
        self.rules = Rules() if rules is None else rules
        self._recent: deque[float] = deque(maxlen=self.rules.reports)
        self._base_s: float | None = None
        """The base of comparison of step times; ``None``: nothing was measured yet."""
        self._steps = 0
        self._since_measured = self.rules.min_pause_reports
        self._waited = 0
        self._candidate: PlanPrediction | None = None
        self._change: Change | None = None
        self._before: tuple[str, float] | None = None
        """The plan before the last change, and its step time."""
        self._change_s: float | None = None
        """The time of the last change."""

    def step(self, steps: int, step_s: float) -> Measure | Change | None:
        """Take in a report: the steps so far, and the time of each since the last."""
        self._steps = steps
        self._since_measured += 1
        if self.state in (MEASURING, CHANGING):
            self._waited += 1
            if self._waited > self.rules.patience_reports:
                self.state = OFF
            return None
        if self.state not in (WATCHING, CHECKING):
            return None
        self._recent.append(step_s)
        if len(self._recent) < self.rules.reports:
            return None
        if self.state == CHECKING:
            return self._check()
        if self._base_s is None or self._has_drifted(self._base_s):
            return self._measure()
        return self._repaid()

    def measured(self) -> bool:
        """Take in that the layers' times have arrived; return whether to plan."""
        if self.state != MEASURING:
            return False
        self.state = PLANNING
        return True

    def planned(self, found: PlanPrediction | None) -> Change | None:
        """Take in what the planner found; ``None``: it found no plan."""
        if self.state != PLANNING:
            return None
        self.state = WATCHING
        self._candidate = None
        if found is None or found.plan == self.plan or found.now_s <= 0.0:
            return None
        if 1.0 - found.new_s / found.now_s >= self.rules.min_gain_ratio:
            self._candidate = found
        return self._repaid()

    def changed(self, took_s: float) -> Change | None:
        """Take in that the job follows the requested plan; return the change."""
        if self.state != CHANGING or self._change is None:
            return None
        change, before = self._change, self.plan
        self._change_s = max(took_s, 0.0)
        self.plan = change.plan
        self._recent.clear()
        if self._before is not None:  # it was taken back
            self._before = None
            self._base_s = change.predicted_s
            self.state = WATCHING
        else:
            self._before = before, change.step_s
            self.state = CHECKING
        return change

    def refused(self) -> None:
        """Take in that the job keeps its plan."""
        if self.state in (MEASURING, CHANGING):
            self.state, self._before = WATCHING, None
            self._recent.clear()

    def _median_s(self) -> float:
        return statistics.median(self._recent)

    def _has_drifted(self, base_s: float) -> bool:
        if self._since_measured < self.rules.min_pause_reports:
            return False
        ratio = self.rules.drift_ratio
        slower = all(each > base_s * (1 + ratio) for each in self._recent)
        return slower or all(each < base_s / (1 + ratio) for each in self._recent)

    def _measure(self) -> Measure:
        self.state, self._waited = MEASURING, 0
        self._base_s, self._since_measured = self._median_s(), 0
        self._candidate = None
        return Measure(steps=self.rules.measured_steps)

    def _repaid(self) -> Change | None:
        """Return the change to the plan that waits, once it repays itself."""
        found, rules = self._candidate, self.rules
        if found is None or len(self._recent) < rules.reports:
            return None
        step_s = self._median_s()
        gain_s = step_s * (1.0 - found.new_s / found.now_s)
        change_s = self._change_s
        if change_s is None:
            change_s = rules.first_change_steps * step_s
        if gain_s * self._steps < rules.repays * change_s:
            return None
        self._candidate = None
        why = f"a step of {step_s:.4g} s is predicted {gain_s:.4g} s shorter"
        predicted_s = step_s - gain_s
        return self._request(found.plan, step_s, predicted_s, why)

    def _request(
        self, plan: str, step_s: float, predicted_s: float, why: str
    ) -> Change:
        self.state, self._waited = CHANGING, 0
        self._change = Change(
            plan=plan, step_s=step_s, predicted_s=predicted_s, why=why
        )
        return self._change

    def _check(self) -> Change | None:
        """Compare the steps after a change with those before."""
        if self._before is None:
            raise AssertionError("there was no change")
        plan, before_s = self._before
        now_s = self._median_s()
        if now_s < before_s:
            self.state, self._before, self._base_s = WATCHING, None, now_s
            return None
        why = f"steps took {now_s:.4g} s after the last change, {before_s:.4g} before"
        return self._request(plan, now_s, before_s, why)
