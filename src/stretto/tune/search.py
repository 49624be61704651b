"""Search inside a run: decide which plan the next steps execute, and when to stop.

Pure: it takes step times and returns plans; it neither runs nor measures anything.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError
from stretto.schema import Plan
from stretto.tune.paired import (
    Estimate,
    Noise,
    Pair,
    compare,
    estimate,
    is_surely_below,
    shown_faster,
)
from stretto.tune.search_space import Point
from stretto.tune.techniques.aiacc import Bandit
from stretto.tune.techniques.base import MIN_STEPS, Proposal
from stretto.tune.trial import (
    MAX_TRIAL_STEPS,
    OUTLIER,
    TRIAL_S,
    Finding,
    SearchLimits,
    Trial,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stretto.tune.techniques.base import AbstractTechnique

START = "start"
"""Technique name of a plan that was known before the search."""

CONTROL = "control"
"""Technique name of a block of the incumbent between two others."""

FINAL = "final"
"""Technique name of a block of DDP's buckets, which a faster plan must beat."""

MIN_GAIN_RATIO = 0.02
"""A plan that saves less than this share of DDP's step is a tie; DDP's buckets stay."""

BETTER_RATIO = 0.005
"""The same threshold between two plans other than DDP's."""

_LITTLE_HOPE = 0.5
"""Standard errors of luck with which a technique's proposal must win, or is dropped:
there are always more of these."""

START_PAIRS = 40
"""Pairs after which a plan known before the search is dropped if it has not won ..."""

PROPOSAL_PAIRS = 5
"""... the same for a technique's proposal ..."""

FINAL_PAIRS = 40
"""... and pairs in which a plan may show that it beats DDP's buckets."""

_HOPELESS_RATIO = 1.15
"""A block ends after `_HOPELESS_STEPS` steps if each is slower than this ..."""

_HOPELESS_STEPS = 2

_MORE_STEPS = 40
"""Comparisons under way end after three times the limit of steps plus this many."""

_MAX_WITHOUT_CONTROL = 2
"""Consecutive hopeless proposals before the incumbent's speed is measured again."""

_VERY_SLOW_RATIO = 1.5
"""... and after one step if that and the step of the change are slower than this."""

NEAR_BOUND_RATIO = 0.02
"""The largest share by which noise may widen the test "as fast as the bound"."""

REFUTED_RATIO = 0.02
"""A step this much shorter than the bound shows that the bound is wrong."""

_CHANGE_STEPS = 0.3
"""The assumed cost of a change of plan, in steps, until one is measured."""

_BEFORE = 2.0
"""Time lost before the search, as a share of the time trained, must fall to this many
times ``lost_ratio`` before a first proposal is tried; plans known before the search,
such as the planner's, are tried at once ..."""

_MAX_BEFORE = 5
"""... but this wait takes at most this many times the limit of steps."""

_LEVEL_STEPS = 16
"""Number of last steps of the incumbent whose median is its step time."""

_CLEAR_ERROR = 0.06
"""A pair with an error up to this is used to learn about a plan."""

_MAX_REPEATS = 12
"""Known proposals that are skipped before another technique is chosen."""


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """A comparison of a plan with the incumbent."""

    technique: str

    key: Point | str

    plan: Plan

    steps: int

    max_pairs: int

    proposal: Proposal | None = None

    pairs: list[Pair] = field(default_factory=list)

    block: Trial | None = None
    """The challenger's last block, until its pair is complete."""


@final
class Search:
    """One search, from the first plans to the final plan.

    The incumbent trains. Other plans run in short blocks between its own, and a block
    is compared only with these neighbors (`stretto.tune.paired`). A plan becomes the
    incumbent when its pairs show that it is faster by more than their error. In the end
    the incumbent must have beaten ``baseline``, DDP's buckets, in pairs, directly or
    through earlier incumbents; otherwise DDP's buckets stay.

    `next_trial` returns the next block. Pass each of its steps to `step`, which returns
    whether the block is over. Between blocks the incumbent trains until it has earned
    what the next block may lose, and before the first proposal until the loss before
    the search is a small share.
    """

    def __init__(
        self,
        *,
        starts: Sequence[tuple[str, Plan]],
        arms: Mapping[str, AbstractTechnique],
        plan_of: Callable[[Point], Plan],
        floor_s: Callable[[Plan], float],
        bound_s: float,
        limits: SearchLimits,
        bandit: Bandit | None = None,
        baseline: Plan | None = None,
        seen_s: Mapping[str, float] | None = None,
        trained_s: float = 0.0,
        lost_before_s: float = 0.0,
    ) -> None:
        """Prepare a search.

        Args:
            starts: Plans to try first, by name, regardless of the bound; the first is
                the incumbent until another wins.
            arms: Techniques by name.
            plan_of: Returns the plan of a point of the space.
            floor_s: Returns the shortest step time of a plan; a plan whose shortest one
                is above the incumbent's is never tried.
            bound_s: Lower bound on any plan's step time.
            limits: What the search may cost.
            bandit: Chooses among the arms; by default one over all of them.
            baseline: The plan that stays unless another is shown to be faster.
            seen_s: Step times measured before the search, by digest. A start that was
                slower than the incumbent is not tried.
            trained_s: Time trained before the search.
            lost_before_s: Time lost while preparing the search.

        Raises:
            SpecError: there is no plan to start from.
        """
        if not starts:
            raise SpecError("a search needs at least one plan to start from")
        self._starts = list(starts)
        self._arms = dict(arms)
        self._bandit = bandit or (Bandit(tuple(self._arms)) if self._arms else None)
        self._plan_of = plan_of
        self._floor_s = floor_s
        self.bound_s = bound_s
        """The current lower bound on any plan's step time."""
        self._limits = limits
        self._baseline = baseline
        self._seen_s = dict(seen_s or {})
        self._trained_s = trained_s
        self._lost_before_s = lost_before_s
        self._steps_before = 0
        self._has_proposed = False
        self._noise = Noise()
        self._comparison: _Comparison | None = None
        self._by_key: dict[Point | str, Trial] = {}
        self._digests: dict[str, Trial] = {}
        self._scores: dict[str, float] = {}
        self._unit_s = 0.0
        self._ahead: float = 0.0
        self._lead: Estimate | None = None
        self._accepted: str | None = None
        self._fruitless = 0
        self._without_control = 0
        self._tail: tuple[float, ...] = ()
        self._changes: list[float] = []
        self._lost_s = 0.0
        self._findings: list[Finding] = []
        self.trials: list[Trial] = []
        """All blocks, oldest first."""
        self.incumbent: Trial | None = None
        """The best plan so far, with the steps of its last blocks."""
        self.steps_used = 0
        """Steps spent, including those of changes."""
        self.ended: str | None = None
        """Why the search is over, or ``None`` while it continues."""
        self._why: str | None = None
        self.paused_s = 0.0
        """Time in which training waited for decisions."""

    @property
    def lost_s(self) -> float:
        """Time lost so far.

        It is the loss of blocks against their neighbors of the incumbent, including
        steps of changes, plus pauses.
        """
        return self.paused_s + max(0.0, self._lost_s)

    @property
    def max_lost_s(self) -> float:
        """Maximum time that may have been lost by now."""
        best = self.incumbent
        if best is None or math.isinf(best.step_s):
            return math.inf
        earned_s = (self._trained_s + self._limits.steps * best.step_s) / 2
        allowed_s = self._limits.lost_ratio * earned_s
        if self.bound_refuted:
            return allowed_s
        # Never more than the same number of steps could save.
        could_win_s = max(0.0, best.step_s - self.bound_s) * self._limits.steps
        return min(allowed_s, could_win_s)

    @property
    def bound_refuted(self) -> bool:
        """Whether the incumbent is faster than the bound allows."""
        best = self.incumbent
        return best is not None and best.step_s < (1 - REFUTED_RATIO) * self.bound_s

    @property
    def noise_s(self) -> float:
        """Standard error of the incumbent's median step."""
        best = self.incumbent
        if best is None or math.isinf(best.step_s):
            return 0.0
        return best.step_s * self._noise.of_a_median(len(best.steps_s))

    @property
    def lead(self) -> Estimate | None:
        """The incumbent's step over the baseline's, from pairs; ``None`` if unknown."""
        return self._lead

    @property
    def credits(self) -> dict[str, float]:
        """The bandit's credit of each technique, 0 to 1."""
        if self._bandit is None:
            return {}
        return {name: self._bandit.credit(name) for name in self._arms}

    def offer(self, name: str, plan: Plan) -> bool:
        """Queue a plan from outside; return whether it is new."""
        waiting = [waits.digest for _, waits in self._starts]
        if self._comparison is not None:
            waiting.append(self._comparison.plan.digest)
        if plan.digest in self._digests or plan.digest in waiting:
            return False
        self._starts.append((f"{name} {len(self.trials)}", plan))
        return True

    def next_trial(self) -> Trial | None:
        """Return the next block, or ``None`` when the search is over (see `ended`)."""
        if self.ended is not None:
            return None
        best = self.incumbent
        if best is None:
            if not self._starts:
                self.ended = "no plan could be run"
                return None
            return self._open(START, *self._starts.pop(0), MIN_STEPS)
        comparison = self._comparison
        if comparison is not None and comparison.block is not None:
            return self._open(CONTROL, best.key, best.plan, comparison.steps)
        if not self._tail:
            return self._open(CONTROL, best.key, best.plan, MIN_STEPS)
        comparison = self._comparison = comparison or self._next_comparison()
        if comparison is None:
            self._finish()
            return None
        if not self._affordable(comparison):
            return self._open(CONTROL, best.key, best.plan, MIN_STEPS)
        self._has_proposed |= comparison.technique != START
        comparison.block = self._open(
            comparison.technique, comparison.key, comparison.plan, comparison.steps
        )
        return comparison.block

    def pause(self, seconds: float) -> None:
        """Count time in which training waited for a decision."""
        self.paused_s += seconds

    def findings(self) -> list[Finding]:
        """Return what was learned about plans since the last call.

        Only undisturbed blocks count: those whose neighbors agree or, for the first
        plan, those not slower than any earlier step.
        """
        found, self._findings = self._findings, []
        return found

    def step(self, step_s: float, *, counts: bool = True) -> bool:
        """Add a step time of the block under way; return whether the block is over.

        ``counts`` is false for the step of a change; the time is infinite if the step
        was disturbed.
        """
        trial = self.trials[-1]
        if self._waits_to_begin(self._comparison):
            self._steps_before += 1
        else:
            self.steps_used += 1
        if math.isfinite(step_s):
            self._trained_s += step_s
        if not counts:
            if math.isfinite(step_s):
                trial.uncounted_s.append(step_s)
            return False
        trial.steps_s.append(step_s)
        if self._is_incumbents(trial):
            return self._incumbent_step(trial)
        if trial.is_long_enough or self._cannot_win(trial):
            self._close(trial)
            return True
        return False

    @property
    def ahead(self) -> int:
        """Number of counted steps of the block that need no decision: at least 1.

        A challenger may prove hopeless after each step. The incumbent's steps need no
        decision until its block is long enough, and then until the next block is
        affordable.
        """
        trial = self.trials[-1]
        if not self._is_incumbents(trial) or not self._tail:
            return 1
        level_s = statistics.median(self._tail)
        wanted = max(trial.wanted_steps, math.ceil(TRIAL_S / max(level_s, 1e-9)))
        steps = min(wanted, MAX_TRIAL_STEPS) - len(trial.steps_s)
        if steps <= 0 and self._comparison is not None:
            missing_s = self.lost_s + self._cost_s(self._comparison) - self.max_lost_s
            earned_s = self._limits.lost_ratio * level_s / 2
            steps = math.ceil(missing_s / max(earned_s, 1e-9))
            steps = min(steps, self._limits.steps - self.steps_used)
            if self._waits_to_begin(self._comparison):
                steps = MAX_TRIAL_STEPS
        return max(1, min(steps, MAX_TRIAL_STEPS))

    def fail(self, reason: str) -> None:
        """Abandon the block under way, for instance for lack of memory."""
        trial = self.trials[-1]
        trial.failed = reason
        if self._is_incumbents(trial):
            self._finish(f"the best plan can't be measured again: {reason}")
            return
        self._close(trial)

    # The incumbent's blocks.

    def _is_incumbents(self, trial: Trial) -> bool:
        return trial.technique == CONTROL

    def _incumbent_step(self, trial: Trial) -> bool:
        """Complete the pair when there are enough steps, then wait for budget."""
        best = self.incumbent
        assert best is not None  # noqa: S101 - a control block follows its first
        best.steps_s = [*best.steps_s, trial.steps_s[-1]][-_LEVEL_STEPS:]
        if not trial.is_long_enough:
            return False
        if self._comparison is not None and self._comparison.block is not None:
            self._complete_pair(self._comparison, trial)
            if self.incumbent is not best:
                self._tail = ()
                return True
        wanted = trial.side_steps
        self._tail = tuple(trial.steps_s[-wanted:])
        if len(trial.steps_s) >= 2 * wanted and len(trial.steps_s) % wanted == 0:
            self._noise.add(self._tail)
            self._noise.add_jump(trial.steps_s[-2 * wanted : -wanted], self._tail)
        if self._comparison is None:
            self._comparison = self._next_comparison()
        return self._comparison is None or self._affordable(self._comparison)

    def _waits_to_begin(self, comparison: _Comparison | None) -> bool:
        """Return whether too much was lost before the search for a first proposal."""
        return (
            comparison is not None
            and comparison.technique != START
            and not self._has_proposed
            and self._steps_before < _MAX_BEFORE * self._limits.steps
            and self._lost_before_s
            > _BEFORE * self._limits.lost_ratio * self._trained_s
        )

    def _affordable(self, comparison: _Comparison) -> bool:
        if self._waits_to_begin(comparison):
            return False
        if self.steps_used >= self._limits.steps:
            return True
        return self.lost_s + self._cost_s(comparison) <= self.max_lost_s

    def _cost_s(self, comparison: _Comparison) -> float:
        """Return the expected loss of one more block of a challenger."""
        level_s = statistics.median(self._tail)
        change = statistics.median(self._changes) if self._changes else _CHANGE_STEPS
        if comparison.pairs:
            ratio = estimate(comparison.pairs).ratio
        else:
            ratio = self._floor_s(comparison.plan) / level_s
        slow_steps = 1 if ratio >= _VERY_SLOW_RATIO else comparison.steps
        excess = (1 + slow_steps) * max(0.0, ratio - 1)
        return level_s * (excess + 2 * change)

    # The challengers' blocks.

    def _cannot_win(self, trial: Trial) -> bool:
        """Return whether a challenger is so slow that more steps change nothing."""
        if self._comparison is None or not self._tail:
            return False
        level_s = statistics.median(self._tail)
        noise = 1 + 2 * self._noise.of_a_median(1)
        min_s = min(trial.steps_s)
        hopeless = len(trial.steps_s) >= _HOPELESS_STEPS and (
            min_s > _HOPELESS_RATIO * noise * level_s
        )
        slow_s = _VERY_SLOW_RATIO * noise * level_s
        very_slow = bool(trial.uncounted_s) and min_s > slow_s
        trial.ended_early = hopeless or (very_slow and min(trial.uncounted_s) > slow_s)
        return trial.ended_early

    def _close(self, trial: Trial) -> None:
        """End a block of the first plan, or of a plan other than the incumbent."""
        self._by_key[trial.key] = trial
        self._digests[trial.plan.digest] = trial
        self._noise.add(trial.steps_s)
        if self.incumbent is None:
            if trial.failed is None:
                self._set_first_incumbent(trial)
            return
        comparison = self._comparison
        if trial.failed is not None:
            self._conclude(won=False, score_s=math.inf)
        elif (
            trial.ended_early
            and comparison is not None
            and comparison.proposal is not None
            and self._without_control < _MAX_WITHOUT_CONTROL
        ):
            # There are always more proposals: do not spend a pair on a hopeless one.
            self._without_control += 1
            level_s = statistics.median(self._tail)
            self._lost_s += trial.lost_s(level_s)
            log_ratio = math.log(trial.step_s / level_s)
            score_s = self._unit_s * math.exp(self._ahead + log_ratio)
            self._conclude(won=False, score_s=score_s)

    def _set_first_incumbent(self, trial: Trial) -> None:
        trial.won = True
        self.incumbent = Trial(
            technique=trial.technique,
            key=trial.key,
            plan=trial.plan,
            wanted_steps=trial.wanted_steps,
            steps_s=list(trial.steps_s),
            won=True,
        )
        self._tail = tuple(trial.steps_s)
        self._unit_s = trial.step_s
        self._lost_s += sum(s - trial.step_s for s in trial.uncounted_s)
        self._scores[trial.plan.digest] = trial.step_s
        if self._is_baseline(trial):
            self._lead = Estimate(log_ratio=0.0, error=0.0, pairs=0)
        if trial.step_s <= min(self._seen_s.values(), default=math.inf):
            self._findings.append(Finding(trial=trial, step_s=trial.step_s))

    def _complete_pair(self, comparison: _Comparison, control: Trial) -> None:
        """Compare the challenger's block with its neighbors, and decide."""
        block, comparison.block = comparison.block, None
        self._without_control = 0
        assert block is not None  # noqa: S101 - the caller has checked it
        wanted = control.side_steps
        before, after = self._tail, control.steps_s[:wanted]
        self._noise.add(after)
        self._noise.add_jump(before, after)
        pair = compare(before, block.steps_s, after, noise=self._noise)
        comparison.pairs.append(pair)
        found = estimate(comparison.pairs)
        level_s = math.sqrt(statistics.median(before) * statistics.median(after))
        for part in (block, control):
            self._lost_s += part.lost_s(level_s)
            if part.uncounted_s:
                at_s = part.step_s if part is block else level_s
                change = (part.uncounted_s[0] - at_s) / level_s
                self._changes.append(min(max(0.0, change), OUTLIER - 1))
        score_s = self._unit_s * math.exp(self._ahead + found.log_ratio)
        if pair.error <= _CLEAR_ERROR:
            seen_s = min(statistics.median(before), statistics.median(after))
            self._findings.append(
                Finding(trial=block, step_s=seen_s * math.exp(pair.log_ratio))
            )
        if comparison.technique == FINAL:
            self._judge_baseline(found, comparison)
            return
        margin = self._margin(comparison.plan)
        is_last = self._is_last(comparison)
        if comparison.proposal is None:
            won = shown_faster(found, margin, is_last=is_last)
        else:
            over = is_last or self.steps_used >= self._limits.steps
            won = shown_faster(
                found,
                margin,
                is_last=False,
                gives_up=over,
                hope=_LITTLE_HOPE,
                min_pairs=1,
            )
        if won:
            if self._is_baseline(self.incumbent):
                self._accepted = comparison.plan.digest
            self._replace_incumbent(comparison, block, found, score_s)
        elif won is False:
            self._conclude(won=False, score_s=score_s)

    def _is_baseline(self, trial: Trial | None) -> bool:
        base = self._baseline
        return (
            base is not None and trial is not None and trial.plan.digest == base.digest
        )

    def _is_last(self, comparison: _Comparison) -> bool:
        """Return whether a comparison must end with the pairs that it has."""
        return len(comparison.pairs) >= comparison.max_pairs or self._exhausted

    def _margin(self, plan: Plan) -> float:
        """Return the margin by which a plan must be faster, as a logarithm."""
        base = self._baseline
        best = self.incumbent
        against = base is not None and (
            best is not None and base.digest in (best.plan.digest, plan.digest)
        )
        return -math.log1p(-(MIN_GAIN_RATIO if against else BETTER_RATIO))

    def _replace_incumbent(
        self, comparison: _Comparison, block: Trial, found: Estimate, score_s: float
    ) -> None:
        block.won = True
        if self._lead is not None:
            self._lead = found.chained(self._lead)
        if self._is_baseline(block):
            self._lead = Estimate(log_ratio=0.0, error=0.0, pairs=0)
        self._ahead += found.log_ratio
        level_s = [s * found.ratio for s in self._tail]
        self.incumbent = Trial(
            technique=block.technique,
            key=block.key,
            plan=block.plan,
            wanted_steps=block.wanted_steps,
            steps_s=level_s,
            won=True,
        )
        self._conclude(won=True, score_s=score_s)

    def _conclude(self, *, won: bool, score_s: float) -> None:
        """End the comparison under way and pass on its result."""
        comparison, self._comparison = self._comparison, None
        assert comparison is not None  # noqa: S101 - there is one where this is called
        self._scores[comparison.plan.digest] = score_s
        if comparison.technique not in (START, FINAL):
            self._fruitless = 0 if won else self._fruitless + 1
        if comparison.proposal is not None:
            if self._bandit is not None:
                self._bandit.tell(comparison.technique, improved=won)
            self._tell(comparison.technique, comparison.proposal, score_s)
        elif not isinstance(comparison.key, str):
            for technique in self._arms.values():
                shown = Proposal(point=comparison.key, steps=comparison.steps)
                technique.tell(shown, score_s, mine=False)

    @property
    def _exhausted(self) -> bool:
        """Whether comparisons under way must end undecided."""
        return self.steps_used >= 3 * self._limits.steps + _MORE_STEPS

    # What comes next.

    def _next_comparison(self) -> _Comparison | None:
        """Return the next challenger, or ``None`` when the search should end."""
        best = self.incumbent
        assert best is not None  # noqa: S101 - a comparison needs an incumbent
        while self._starts and self.steps_used < self._limits.steps:
            name, plan = self._starts.pop(0)
            seen_s = self._seen_s.get(plan.digest, 0.0)
            if plan.digest == best.plan.digest or seen_s > best.step_s:
                continue
            return _Comparison(
                technique=START,
                key=name,
                plan=plan,
                steps=MIN_STEPS,
                max_pairs=START_PAIRS,
            )
        unproven = self._unproven()
        if unproven is not None and self._affordable(unproven):
            return unproven
        self._why = self._why or self._why_end()
        if self._why is None:
            comparison = self._propose()
            if comparison is not None:
                return comparison
            self._why = "every technique is out of proposals"
        return unproven

    def _unproven(self) -> _Comparison | None:
        """Return the comparison with the baseline that the incumbent still needs."""
        best, base = self.incumbent, self._baseline
        if base is None or best is None or best.plan.digest == base.digest:
            return None
        if best.plan.digest == self._accepted or (
            self._lead is not None
            and is_surely_below(
                self._lead, -self._margin(base), is_last=self._exhausted
            )
        ):
            return None
        return _Comparison(
            technique=FINAL,
            key="ddp",
            plan=base,
            steps=MIN_STEPS,
            max_pairs=FINAL_PAIRS,
        )

    def _judge_baseline(self, found: Estimate, comparison: _Comparison) -> None:
        """Decide whether the incumbent has beaten DDP's buckets."""
        mine = found.inverse()
        margin = self._margin(comparison.plan)
        score_s = self._unit_s * math.exp(self._ahead + found.log_ratio)
        holds = shown_faster(mine, margin, is_last=self._is_last(comparison))
        if holds:
            best = self.incumbent
            assert best is not None  # noqa: S101 - it has just been compared
            self._lead, self._accepted = mine, best.plan.digest
            self._conclude(won=False, score_s=score_s)
        elif holds is False:
            block = self._digests[comparison.plan.digest]
            self._replace_incumbent(comparison, block, found, score_s)

    def _why_end(self) -> str | None:
        best = self.incumbent
        assert best is not None  # noqa: S101 - called only with an incumbent
        if self.steps_used >= self._limits.steps:
            return f"{self.steps_used} steps were used"
        patience = self._limits.patience
        if patience is not None and self._fruitless >= patience:
            return f"{patience} consecutive trials were no better"
        if not self.bound_refuted:
            near = min(NEAR_BOUND_RATIO * self.bound_s, self.noise_s)
            if best.step_s - self.bound_s <= near:
                return "the incumbent is as fast as the bound, within the noise"
            could_win_s = (best.step_s - self.bound_s) * self._limits.steps
            if self.lost_s >= could_win_s:
                return "further trials could not save what they cost"
        return None

    def _propose(self) -> _Comparison | None:
        """Return the next proposal worth trying, from the arm the bandit chooses."""
        open_arms = list(self._arms)
        while open_arms and self._bandit is not None:
            name = self._bandit.choose(open_arms)
            for _ in range(_MAX_REPEATS):
                proposal = self._arms[name].ask()
                if proposal is None:
                    open_arms.remove(name)
                    break
                comparison = self._worth_trying(name, proposal)
                if comparison is not None:
                    return comparison
            else:
                open_arms.remove(name)
            self._bandit.tell(name, improved=False)
        return None

    def _worth_trying(self, name: str, proposal: Proposal) -> _Comparison | None:
        """Return a proposal's comparison; answer at once if it cannot win."""
        known = self._by_key.get(proposal.point)
        plan = self._plan_of(proposal.point)
        known = known or self._digests.get(plan.digest)
        best = self.incumbent
        if known is not None and (
            len(known.steps_s) >= proposal.steps
            or known.failed is not None
            or known.ended_early
            or (best is not None and best.plan.digest == plan.digest)
        ):
            score_s = self._scores.get(plan.digest, known.step_s)
            self._tell(name, proposal, score_s)
            return None
        floor_s = self._floor_s(plan)
        if best is not None and floor_s >= best.step_s * math.exp(-self._margin(plan)):
            self._tell(name, proposal, floor_s)
            return None
        return _Comparison(
            technique=name,
            key=proposal.point,
            plan=plan,
            steps=max(proposal.steps, MIN_STEPS),
            max_pairs=PROPOSAL_PAIRS,
            proposal=proposal,
        )

    def _open(self, name: str, key: Point | str, plan: Plan, steps: int) -> Trial:
        trial = Trial(
            technique=name, key=key, plan=plan, wanted_steps=max(steps, MIN_STEPS)
        )
        self.trials.append(trial)
        return trial

    def _finish(self, why: str | None = None) -> None:
        """End the search; without a plan shown to beat DDP's buckets, those stay."""
        unproven = self._unproven()
        if unproven is not None:
            best = self.incumbent
            assert best is not None  # noqa: S101 - the unproven plan is the incumbent
            self.incumbent = Trial(
                technique=FINAL, key="ddp", plan=unproven.plan, wanted_steps=MIN_STEPS
            )
            why = f"{why or self._why}; no plan was shown to beat DDP's buckets"
        self.ended = why or self._why or "every technique is out of proposals"

    def step_s_of(self, digest: str) -> float | None:
        """Return a plan's step time at the machine's current speed."""
        best = self.incumbent
        if best is None or math.isinf(best.step_s):
            return None
        if digest == best.plan.digest:
            return best.step_s
        base = self._baseline
        if base is not None and digest == base.digest and self._lead is not None:
            return best.step_s / self._lead.ratio
        score_s = self._scores.get(digest)
        if score_s is None or math.isinf(score_s):
            return None
        return best.step_s * score_s / (self._unit_s * math.exp(self._ahead))

    def _tell(self, name: str, proposal: Proposal, step_s: float) -> None:
        for other, technique in self._arms.items():
            technique.tell(proposal, step_s, mine=other == name)
