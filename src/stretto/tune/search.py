"""The search inside a run: which plan the next steps try, and when to stop.

Pure: it is told step times and names plans; it neither runs nor measures anything.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError
from stretto.schema import Plan
from stretto.tune.bandit import Bandit
from stretto.tune.finals import FINAL_RATIO, MOST_FINALISTS, STEPS, Finals
from stretto.tune.space import Point
from stretto.tune.techniques.base import LEAST_STEPS, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stretto.tune.techniques.base import AbstractTechnique

START = "start"
"""What a trial of a plan that was there before the search names as its technique."""

FINAL = "final"
"""What a turn of the last comparison names as its technique."""

TRIAL_S = 0.25
"""A trial lasts at least so long, for short steps differ more from each other ..."""

MOST_TRIAL_STEPS = 8
"""... but not longer than so many steps for that."""

_SURE = 4.5
"""Spreads (median absolute deviations over the root of the number of steps) between
two medians that count as a difference: nearly two standard errors of it."""

_HOPELESS_RATIO = 1.15
"""A trial ends after its first counted steps when each is slower than this times the
incumbent: its median can't win any more."""

_HOPELESS_STEPS = 2

_OUTLIER = 3.0
"""What a step longer than so many times the incumbent's takes beyond that is not a
search's doing."""

_FINALS_SHARE = 0.3
"""Share of the time that may be lost which is kept for the last comparison."""

_MOST_REPEATS = 12
"""Proposals already measured that are passed over before a technique's turn ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a search may cost."""

    steps: int = 100
    """Steps in which plans may be tried; the last of them compare the best few."""

    lost_ratio: float = 0.05
    """Time that trials may lose against the incumbent, changes of plan and the pauses
    for thought between them included, as a share of ``steps`` times the incumbent's
    step: the bound on what a search costs."""

    patience: int | None = None
    """Trials in a row that bring nothing before techniques are asked no more."""

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
    """A plan that was tried for some steps."""

    technique: str

    key: Point | str
    """A point of the space, or the name of a plan that was there before."""

    plan: Plan

    wanted_steps: int

    steps_s: list[float] = field(default_factory=list)
    """Step times that count, the slowest rank's; the step of the change is left out."""

    uncounted_s: list[float] = field(default_factory=list)
    """The others: a step of a change, or one that was recorded."""

    failed: str | None = None
    """Why the plan could not be run."""

    ended_early: bool = False
    """Whether it was given up as hopeless before all its steps."""

    won: bool = False
    """Whether it became the incumbent."""

    @property
    def step_s(self) -> float:
        """The score: the median; infinite where the plan could not be run."""
        if self.failed is not None or not self.steps_s:
            return math.inf
        return statistics.median(self.steps_s)

    def lost_s(self, best_s: float) -> float:
        """What all its steps took beyond as many of ``best_s``.

        Summed before it is compared with 0, so that noise cancels.
        """
        steps_s = (*self.steps_s, *self.uncounted_s)
        return max(0.0, sum(min(s, _OUTLIER * best_s) - best_s for s in steps_s))

    @property
    def spread_s(self) -> float:
        """Median absolute deviation of the steps: an outlier does not move it."""
        if not self.steps_s:
            return 0.0
        middle_s = statistics.median(self.steps_s)
        return statistics.median(abs(s - middle_s) for s in self.steps_s)


@final
class Search:
    """One search: from the first plans to the plan that stays.

    `next_trial` names what to try; every counted step of it goes to `step`, which says
    whether the trial is over. The incumbent is the best plan so far: it is replaced
    only by one whose median of at least three steps is faster by more than the noise.
    At the end the plans that noise left apart are compared once more, in turns.
    """

    def __init__(
        self,
        *,
        starts: Sequence[tuple[str, Plan]],
        arms: Mapping[str, AbstractTechnique],
        plan_of: Callable[[Point], Plan],
        floor_s: Callable[[Plan], float],
        bound_s: float,
        limits: Limits,
        bandit: Bandit | None = None,
    ) -> None:
        """A search.

        Args:
            starts: Plans that are tried first, by name, whatever the bound says; the
                first is the incumbent until another wins.
            arms: Techniques by name.
            plan_of: The plan a point of the space means.
            floor_s: What a plan's step takes at least; one above the incumbent is
                never tried.
            bound_s: What no plan's step can be shorter than.
            limits: What the search may cost.
            bandit: Chooses among the arms; by default one over all of them.

        Raises:
            SpecError: there is no plan to start from.
        """
        if not starts:
            raise SpecError("a search needs at least one plan to start from")
        self._starts = list(starts)
        self._must = len(self._starts)
        self._arms = dict(arms)
        self._bandit = bandit or (Bandit(tuple(self._arms)) if self._arms else None)
        self._plan_of = plan_of
        self._floor_s = floor_s
        self.bound_s = bound_s
        """What no plan's step can be shorter than, as it is believed now."""
        self._limits = limits
        self._proposal: Proposal | None = None
        self._by_key: dict[Point | str, Trial] = {}
        self._digests: dict[str, Trial] = {}
        self.trials: list[Trial] = []
        """All trials, oldest first."""
        self.incumbent: Trial | None = None
        self.steps_used = 0
        """Steps spent, those of changes included."""
        self.ended: str | None = None
        """Why the search is over; ``None``: it is not."""
        self._finals: Finals | None = None
        self._why: str | None = None
        self.paused_s = 0.0
        """Time in which training waited for decisions."""

    @property
    def lost_s(self) -> float:
        """Time lost so far: trials' steps against the incumbent's as it is now, those
        of changes included, and pauses.
        """
        if self.incumbent is None or math.isinf(self.incumbent.step_s):
            return self.paused_s
        best_s = self.incumbent.step_s
        return self.paused_s + sum(trial.lost_s(best_s) for trial in self.trials)

    @property
    def most_lost_s(self) -> float:
        """What may be lost: the limit as it is read with the present incumbent."""
        if self.incumbent is None or math.isinf(self.incumbent.step_s):
            return math.inf
        step_s = self.incumbent.step_s
        # Never more than could be won in as many steps again.
        could_win_s = max(0.0, step_s - self.bound_s) * self._limits.steps
        return min(self._limits.lost_ratio * self._limits.steps * step_s, could_win_s)

    @property
    def noise_s(self) -> float:
        """A difference of medians below this may be chance."""
        if self.incumbent is None or len(self.incumbent.steps_s) < LEAST_STEPS:
            return 0.0
        return _noise_s(self.incumbent)

    @property
    def credits(self) -> dict[str, float]:
        """What the bandit credits each technique with, 0 to 1."""
        if self._bandit is None:
            return {}
        return {name: self._bandit.credit(name) for name in self._arms}

    def offer(self, name: str, plan: Plan) -> bool:
        """Puts a plan from elsewhere next in line; whether it was new."""
        waiting = [waits.digest for _, waits in self._starts]
        if plan.digest in self._digests or plan.digest in waiting:
            return False
        self._starts.append((f"{name} {len(self.trials)}", plan))
        return True

    def next_trial(self) -> Trial | None:
        """What to try next; ``None``: the search is over and `ended` says why."""
        if self.ended is not None:
            return None
        if self._finals is None:
            trial = self._next_trial()
            if trial is not None:
                return trial
            self._finals = Finals(self._finalists())
        turn = None
        if self.steps_used < self._limits.steps and not self._too_dear(self._finals):
            turn = self._finals.next()
        if turn is None:
            self._crown(self._finals)
            self.ended = self._why
            return None
        return self._open(FINAL, turn.key, turn.plan, STEPS)

    def _next_trial(self) -> Trial | None:
        """The next trial before the last comparison; ``None``: it is time for that."""
        if self.trials:
            self._why = self._why_end()
            if self._why is not None:
                return None
        if self._starts:
            return self._open(START, *self._starts.pop(0), LEAST_STEPS)
        trial = self._propose()
        if trial is None:
            self._why = "every technique is out of proposals"
        return trial

    def pause(self, seconds: float) -> None:
        """Counts time in which training waited for a decision."""
        self.paused_s += seconds

    def step(self, step_s: float, *, counts: bool = True) -> bool:
        """Takes a step time of the trial under way; whether the trial is over.

        ``counts`` is false for the step of the change; it is infinite where something
        else happened in it.
        """
        trial = self.trials[-1]
        self.steps_used += 1
        if not counts:
            if math.isfinite(step_s):
                trial.uncounted_s.append(step_s)
            return False
        trial.steps_s.append(step_s)
        steps = len(trial.steps_s)
        if steps >= trial.wanted_steps and (
            sum(trial.steps_s) >= TRIAL_S or steps >= MOST_TRIAL_STEPS
        ):
            self._close(trial)
            return True
        best = self.incumbent
        if (
            best is not None
            and trial.technique != FINAL
            and len(trial.steps_s) >= _HOPELESS_STEPS
            and min(trial.steps_s) > _HOPELESS_RATIO * best.step_s + _noise_s(best)
        ):
            trial.ended_early = True
            self._close(trial)
            return True
        return False

    def fail(self, reason: str) -> None:
        """The trial under way can't be run, for instance for lack of memory."""
        trial = self.trials[-1]
        trial.failed = reason
        self._close(trial)

    # Deciding.

    def _why_end(self) -> str | None:
        best = self.incumbent
        if best is None or math.isinf(best.step_s):
            return None if self._starts else "no plan could be run"
        if self.steps_used >= self._limits.steps - self._reserved:
            return f"{self.steps_used} steps were used"
        if len(self.trials) < self._must:
            return None
        if self._limits.patience is not None and self._fruitless():
            return f"{self._limits.patience} trials in a row were no better"
        if best.step_s - self.bound_s <= _noise_s(best):
            return "the incumbent is as fast as the bound, within the noise"
        if self.lost_s >= (1 - _FINALS_SHARE) * self.most_lost_s:
            return "trials have lost as much time as they may"
        return None

    def _fruitless(self) -> bool:
        """Whether the last trials, as many as patience allows, brought nothing."""
        last = self.trials[self._must :][-(self._limits.patience or 0) :]
        return len(last) == self._limits.patience and not any(t.won for t in last)

    @property
    def _reserved(self) -> int:
        """Steps kept for the last comparison: two turns of two plans, at most half."""
        return min(4 * (STEPS + 1), self._limits.steps // 2)

    def _propose(self) -> Trial | None:
        """The next proposal that is worth trying, by whoever the bandit chooses."""
        open_arms = list(self._arms)
        while open_arms and self._bandit is not None:
            name = self._bandit.choose(open_arms)
            for _ in range(_MOST_REPEATS):
                proposal = self._arms[name].ask()
                if proposal is None:
                    open_arms.remove(name)
                    break
                trial = self._worth_trying(name, proposal)
                if trial is not None:
                    return trial
            else:
                open_arms.remove(name)
            self._bandit.tell(name, improved=False)
        return None

    def _worth_trying(self, name: str, proposal: Proposal) -> Trial | None:
        """The trial of a proposal; a known or hopeless one is answered at once."""
        known = self._by_key.get(proposal.point)
        plan = self._plan_of(proposal.point)
        known = known or self._digests.get(plan.digest)
        if known is not None and (
            len(known.steps_s) >= proposal.steps
            or known.failed is not None
            or known.ended_early
        ):
            self._tell(name, proposal, known.step_s)
            return None
        floor_s = self._floor_s(plan)
        best = self.incumbent
        if best is not None and floor_s >= best.step_s - _noise_s(best):
            self._tell(name, proposal, floor_s)
            return None
        self._proposal = proposal
        return self._open(name, proposal.point, plan, proposal.steps)

    def _open(self, name: str, key: Point | str, plan: Plan, steps: int) -> Trial:
        trial = Trial(
            technique=name, key=key, plan=plan, wanted_steps=max(steps, LEAST_STEPS)
        )
        self.trials.append(trial)
        return trial

    def _close(self, trial: Trial) -> None:
        if trial.technique == FINAL:
            assert self._finals is not None  # noqa: S101 - it opened the trial
            self._finals.add(
                trial.plan.digest, trial.steps_s, failed=trial.failed is not None
            )
            return
        self._by_key[trial.key] = trial
        self._digests[trial.plan.digest] = trial
        best = self.incumbent
        enough = len(trial.steps_s) >= LEAST_STEPS and trial.failed is None
        if best is None or math.isinf(best.step_s):
            trial.won = enough
        else:
            margin_s = max(_noise_s(best), _noise_s(trial))
            trial.won = enough and trial.step_s < best.step_s - margin_s
        if trial.won or best is None:
            self.incumbent = trial
        proposal, self._proposal = self._proposal, None
        if proposal is None:
            for technique in self._arms.values():
                if not isinstance(trial.key, str):
                    told = Proposal(point=trial.key, steps=trial.wanted_steps)
                    technique.tell(told, trial.step_s, mine=False)
            return
        if self._bandit is not None:
            self._bandit.tell(trial.technique, improved=trial.won)
        self._tell(trial.technique, proposal, trial.step_s)

    # The last comparison.

    def _too_dear(self, finals: Finals) -> bool:
        """Whether the comparison ends for what has been lost; one round is allowed."""
        return finals.rounds_done >= 1 and self.lost_s >= self.most_lost_s

    def _finalists(self) -> list[Trial]:
        """The incumbent and what may be as fast."""
        best = self.incumbent
        if best is None or math.isinf(best.step_s):
            return []
        near = [
            trial
            for trial in self._digests.values()
            if trial.plan.digest != best.plan.digest
            and not trial.ended_early
            and trial.step_s <= (1 + FINAL_RATIO) * best.step_s
        ]
        near.sort(key=lambda trial: trial.step_s)
        return [best, *near[: MOST_FINALISTS - 1]]

    def _crown(self, finals: Finals) -> None:
        """Makes the winner the incumbent, with the steps of its turns."""
        if not finals.finalists:
            return
        best = finals.best
        steps_s = finals.times_s(best.plan.digest)
        if steps_s is None:
            return
        self.incumbent = Trial(
            technique=best.technique,
            key=best.key,
            plan=best.plan,
            wanted_steps=len(steps_s),
            steps_s=steps_s,
            won=True,
        )

    def step_s_of(self, digest: str) -> float | None:
        """A plan's median step, from the last comparison where it took part."""
        steps_s = None if self._finals is None else self._finals.times_s(digest)
        if steps_s is not None:
            return statistics.median(steps_s)
        trial = self._digests.get(digest)
        return None if trial is None or math.isinf(trial.step_s) else trial.step_s

    def _tell(self, name: str, proposal: Proposal, step_s: float) -> None:
        for other, technique in self._arms.items():
            technique.tell(proposal, step_s, mine=other == name)


def _noise_s(trial: Trial) -> float:
    if len(trial.steps_s) < LEAST_STEPS:
        return 0.0
    return _SURE * trial.spread_s / math.sqrt(len(trial.steps_s))
