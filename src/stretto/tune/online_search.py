"""Run a search in a training run: try plans on its real steps."""

from __future__ import annotations

import math
import random
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypedDict, final

from stretto.planners.base import predicted_s
from stretto.runtime import Recorder
from stretto.schema import Plan, codec
from stretto.tune.calibration import TRUSTED_RATIO
from stretto.tune.search import CONTROL, START, Search
from stretto.tune.techniques import AbstractTechnique, SearchContext, technique_of
from stretto.tune.techniques.aiacc import Bandit
from stretto.tune.tuning_meeting import Refused
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stretto.runtime import DistributedDataParallel
    from stretto.schema import Timeline
    from stretto.tune.calibration import CalibratedModel
    from stretto.tune.options import TuneOptions
    from stretto.tune.trial import Finding, Trial
    from stretto.tune.tuning_meeting import TuningMeeting

_GAIN_RATIO = 0.01
"""A plan made after a correction is tried if it is predicted this much faster."""

_LEARN_RATIO = 0.01
"""Share of the search's steps that corrections may take: training waits for them."""

_MAX_UNCOUNTED = 6
"""Consecutive steps that do not count (evaluations in between) before a trial ends."""


def techniques(
    calibrated: CalibratedModel, options: TuneOptions
) -> dict[str, AbstractTechnique]:
    """Return the options' techniques by name, over the model's space.

    With a model, the search begins with the model's plan.
    """
    space, uses_model = calibrated.space, options.model
    context = SearchContext(
        space=space,
        seed=options.seed,
        rng=random.Random(options.seed),
        start=None if uses_model else space.middle,
        predict_s=calibrated.point_s if uses_model else None,
        doubt_ratio=lambda: calibrated.doubt_ratio,
    )
    chosen = map(technique_of, options.techniques)
    return {kind.name: kind.of(context) for kind in chosen}


class Judgment(TypedDict):
    """Rank 0's answer about the steps since the last meeting."""

    over: bool
    """Whether the trial is over."""

    ahead: int
    """Steps until the next meeting."""


@final
class OnlineSearch:
    """Try plans on training steps until the search is over.

    Rank 0 decides. All ranks agree on each step's time (the slowest rank's) and change
    plans before the same step.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        sync: TuningMeeting,
        *,
        calibrated: CalibratedModel | None,
        starts: Sequence[tuple[str, Plan]],
        options: TuneOptions,
        record: Callable[..., None],
        baseline: Plan | None = None,
        seen_s: Mapping[str, float] | None = None,
        trained_s: float = 0.0,
        lost_before_s: float = 0.0,
        change: Callable[[Plan], None],
    ) -> None:
        """Prepare trials of ``starts``, then of proposals from the options' techniques.

        Only rank 0 has a ``calibrated`` model. ``record(what, why, **values)`` records
        an event. ``change`` applies a plan on all ranks, or raises `Refused` on all.
        The other arguments are passed to `Search`.
        """
        self._model = model
        self._sync = sync
        self._calibrated = calibrated
        self._options = options
        self._record = record
        self._change = change
        self._skip = 1
        self._taken: list[tuple[float | None, bool]] = []
        self.ahead = 1
        """Steps until the next meeting, equal on all ranks."""
        self._uncounted = 0
        self._recorder: Recorder | None = None
        self._watching = False
        self._timelines: dict[str, Timeline] = {}
        self.search: Search | None = None
        if sync.rank == 0 and calibrated is not None:
            arms = techniques(calibrated, options)
            bandit = None
            if arms:
                bandit = Bandit(
                    tuple(arms), window=options.window, exploration=options.exploration
                )
            self.search = Search(
                starts=starts,
                arms=arms,
                plan_of=calibrated.plan_of,
                floor_s=calibrated.floor_s if options.model else _no_floor,
                bound_s=calibrated.bound_s if options.model else 0.0,
                limits=options.limits,
                bandit=bandit,
                baseline=baseline,
                seen_s=seen_s,
                trained_s=trained_s,
                lost_before_s=lost_before_s,
            )

    def begin(self) -> bool:
        """Apply the first plan; return whether there is one. Collective."""
        return self._next()

    def note(self, step_s: float) -> None:
        """Record a step of this rank; infinite if it does not count."""
        skipped = self._skip > 0
        self._skip -= skipped
        if not self._skip:
            self._unwatch()
        self._taken.append((step_s if math.isfinite(step_s) else None, skipped))

    def message(self) -> list[float | None]:
        """Return this rank's steps since the last meeting, for rank 0's `judge`."""
        return [step_s for step_s, _ in self._taken]

    def judge(self, rows: Sequence[Sequence[float | None]]) -> Judgment:
        """Judge the steps since the last meeting, on rank 0.

        ``rows`` has one row per rank. A step counts if it counts on every rank; rank
        0's times are used for all.
        """
        search = self.search
        assert search is not None  # noqa: S101 - rank 0 searches
        over = False
        for (_, skipped), values in zip(
            self._taken, zip(*rows, strict=True), strict=True
        ):
            step_s = math.inf if None in values else float(values[0] or 0.0)
            counts = not skipped and math.isfinite(step_s)
            self._uncounted = 0 if counts or skipped else self._uncounted + 1
            over = search.step(step_s, counts=counts)
            if self._uncounted >= _MAX_UNCOUNTED:
                search.fail("no step of it could be counted")
                over = True
            if over:
                break
        return {"over": over, "ahead": search.ahead}

    def advance(self, found: Judgment) -> bool:
        """Apply a meeting's `judge`; return whether trials continue. Collective."""
        self._taken.clear()
        if not found["over"]:
            self.ahead = found["ahead"]
            return True
        self.ahead = 1
        if self.search is not None:
            self._learn(self.search.trials[-1])
        return self._next()

    def abandon(self) -> None:
        """Stop observing the trials."""
        self._unwatch()

    # One trial after another.

    def _next(self) -> bool:
        while True:
            offer: Any = None
            if self.search is not None:
                trial = self.search.next_trial()
                if trial is not None:
                    forward = trial.plan.overlap == "forward"
                    recorded = trial.technique == START and not forward
                    offer = codec.encode(trial.plan), recorded, self.search.ahead
            offer = self._sync.broadcast_object(offer)
            if offer is None:
                return False
            encoded, recorded, self.ahead = offer
            plan = codec.decode(encoded, Plan)
            now = self._model._own_plan  # noqa: SLF001
            changes = now is None or now.digest != plan.digest
            trouble = self._apply(plan)
            if trouble is None:
                # Neither the step of a change nor a recorded step counts, so the cost
                # of recording never enters a score.
                # A forward plan's first step waits in backward, and nothing waits in
                # the forward of its second.
                self._skip = changes + recorded
                self._skip += changes and plan.overlap == "forward"
                self.ahead += self._skip
                self._uncounted = 0
                if recorded:
                    self._watch()
                return True
            if self.search is not None:
                self.search.fail(trouble)
                self._learn(self.search.trials[-1])

    def _apply(self, plan: Plan) -> str | None:
        """Apply a plan on all ranks or on none; return why it was refused, or None."""
        try:
            self._change(plan)
        except Refused as exc:
            return str(exc)
        return None

    def _watch(self) -> None:
        if self._model._observer is not None:  # noqa: SLF001
            return
        device = next((p.device for p in self._model.parameters()), None)
        self._recorder = Recorder(keep=1, device=device)
        self._watching = True
        self._model._observe(self._recorder)  # noqa: SLF001

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._model._observe(None)  # noqa: SLF001

    def _learn(self, trial: Trial) -> None:
        """Report a block, and correct the model by what it showed."""
        search, calibrated = self.search, self._calibrated
        if search is None or calibrated is None:
            return
        timeline = None if self._recorder is None else self._recorder.timeline
        self._recorder = None
        if timeline is not None:
            self._timelines[trial.plan.digest] = timeline
        if trial.technique != CONTROL:
            self._report(search, calibrated, trial)
        elif trial.failed is not None:
            self._record("tried", f"cannot be measured: {trial.failed}")
        for finding in search.findings():
            if self._options.model:
                self._learn_from(search, calibrated, finding)

    def _report(
        self, search: Search, calibrated: CalibratedModel, trial: Trial
    ) -> None:
        best = search.incumbent
        values: dict[str, Any] = {
            "technique": trial.technique,
            "key": str(trial.key),
            "plan": trial.plan.digest,
            "lanes": trial.plan.lanes,
            "buckets": len(trial.plan.buckets),
            "step_s": None if math.isinf(trial.step_s) else trial.step_s,
            "steps": len(trial.steps_s),
            "won": trial.won,
            "incumbent_s": None
            if best is None or math.isinf(best.step_s)
            else best.step_s,
            "lost_s": search.lost_s,
            "credits": search.credits,
        }
        if trial.failed is not None or not trial.steps_s:
            self._record("tried", f"cannot be run: {trial.failed}", **values)
            return
        predicted = calibrated.plan_s(trial.plan)
        why = f"{format_s(trial.step_s)} against {format_s(predicted)} predicted"
        if best is not None and best.plan.digest != trial.plan.digest:
            why += f", {format_s(best.step_s)} with the best plan"
        self._record("tried", why, predicted_s=predicted, **values)

    def _learn_from(
        self, search: Search, calibrated: CalibratedModel, finding: Finding
    ) -> None:
        """Correct the model by one finding, within the time limit for corrections."""
        plan, step_s = finding.trial.plan, finding.step_s
        error = calibrated.compare(plan, step_s)
        if search.paused_s > _LEARN_RATIO * self._options.steps * step_s:
            return
        # A recorded step describes the plan only if the machine ran at that speed.
        near = abs(finding.trial.step_s / step_s - 1) <= TRUSTED_RATIO
        timeline = self._timelines.pop(plan.digest, None) if near else None
        begin_s = perf_counter()
        self._correct(search, calibrated, finding, timeline, error)
        search.pause(perf_counter() - begin_s)

    def _correct(
        self,
        search: Search,
        calibrated: CalibratedModel,
        finding: Finding,
        timeline: Timeline | None,
        error: float,
    ) -> None:
        """Correct the model, and offer the plan that the planner then prefers."""
        best = search.incumbent
        before = dict(calibrated.factors)
        calibrated.learn(finding.trial.plan, finding.step_s, timeline)
        if calibrated.factors == before:
            return
        search.bound_s = calibrated.bound_s
        self._record(
            "corrected",
            f"the prediction was {100 * error:+.1f} % off",
            error_ratio=error,
            **calibrated.factors,
        )
        if best is None:
            return
        worth_s = (1 - _GAIN_RATIO) * calibrated.plan_s(best.plan)
        plan = calibrated.replan(below_s=worth_s)
        if plan is None or predicted_s(plan) >= worth_s:
            return
        if search.offer("replanned", plan):
            self._record(
                "planned",
                "the corrected model has a faster plan",
                plan=plan.digest,
                predicted_s=predicted_s(plan),
            )


def _no_floor(_plan: Plan) -> float:
    return 0.0
