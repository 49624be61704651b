"""The state of tuning, for a run that ends before it has settled.

It is saved when the process or the model ends. Other ranks may be gone by then, so
nothing here waits for them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, final

from stretto.logs import get_logger
from stretto.runtime.time_limit import call_within
from stretto.schema.tuning import Tuning, TuningEvent
from stretto.tune.cached_plans import ddp_step_s_at, settled_of
from stretto.tune.initial_profile import ProfileResult
from stretto.tune.plan_cache import CachedPlan, TunedJob
from stretto.tune.result import TuningResult, summary
from stretto.tune.search import Search
from stretto.tune.techniques.base import MIN_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.tune.plan_cache import PlanCache
    from stretto.tune.trial import Trial

    OnUnfinished = Callable[[TuningResult | None], str]
    """Takes what is known when a run ends, and returns a short text on its action."""

_T = TypeVar("_T")

_log = get_logger(__name__)

MIN_STEPS_LEFT = 24
"""Smallest number of steps of a search after earlier runs have used its steps: enough
for the starting plans and the last comparison, so that short runs settle eventually."""


@final
@dataclass(slots=True, kw_only=True)
class TuningState:
    """The state of one model's tuning on one rank.

    It holds no reference to the model, so it can be saved after the model is gone.
    """

    name: str

    steps: int = 0
    """Training steps that have ended."""

    job: TunedJob | None = None

    checked: CachedPlan | None = None
    """A plan of an earlier run that is or was executed in this one; rank 0 only."""

    stale: bool = False
    """Whether the step time of ``checked`` has changed."""

    profile: ProfileResult | None = None

    search: Search | None = None
    """Rank 0 only."""

    events: list[TuningEvent] = field(default_factory=list)

    pid: int = field(default_factory=os.getpid)

    @property
    def steps_before(self) -> int:
        """Steps of earlier unfinished runs whose search continues here."""
        if self.checked is None or self.stale:
            return 0
        return self.checked.unfinished_steps or 0

    def steps_left(self, steps: int) -> int:
        """Return how many of a search's ``steps`` remain after earlier runs."""
        return max(min(steps, MIN_STEPS_LEFT), steps - self.steps_before)

    @property
    def so_far(self) -> TuningResult | None:
        """The result if tuning had to settle now; ``None`` if nothing is known.

        Its ``step_s`` is ``None`` if no plan had enough steps, and it is ``from_cache``
        if the step time is known only from an earlier run.
        """
        record = Tuning(name=self.name, events=tuple(self.events))
        best = None if self.search is None else best_so_far(self.search)
        if best is None and self.checked is not None and not self.stale:
            found = settled_of(self.checked, self.checked.step_s)
            return replace(found, record=record)
        if self.profile is None:
            return None
        found = TuningResult(
            workload=self.profile.workload,
            cluster=self.profile.cluster,
            plan=self.profile.plan,
            ddp=self.profile.ddp,
            record=record,
        )
        if best is None or self.search is None:
            return found
        return replace(
            found,
            plan=best.plan,
            step_s=best.step_s,
            ddp_step_s=self.ddp_step_s,
            bound_s=self.search.bound_s or None,
        )

    @property
    def ddp_step_s(self) -> float | None:
        """DDP's step at the best plan's speed, measured now or in an earlier run."""
        best = None
        if self.search is not None and self.profile is not None:
            step_s = self.search.step_s_of(self.profile.ddp.digest)
            if step_s is not None:
                return step_s
            best = best_so_far(self.search)
        if self.checked is None or self.stale or best is None:
            return None
        if best.plan.digest != self.checked.plan.digest:
            return None
        return ddp_step_s_at(self.checked, best.step_s)


def best_so_far(search: Search) -> Trial | None:
    """Return the incumbent, or the first trial if it is still under way.

    Return ``None`` if no plan had enough steps for a median.
    """
    best = search.incumbent
    if best is None and search.trials:
        best = search.trials[-1]
    if best is None or len(best.steps_s) < MIN_STEPS or math.isinf(best.step_s):
        return None
    return best


def save_unfinished(
    known: TuningState, cache: PlanCache, on_unfinished: OnUnfinished | None = None
) -> None:
    """Save what is known and log it; must be called once, on rank 0 only."""
    if os.getpid() != known.pid:
        return  # a forked child exits, not the run
    try:
        line = _save(known, cache, on_unfinished)
    except Exception as exc:  # noqa: BLE001 - must not change how the run ends
        _log.warning("cannot save the unfinished tuning: %s", exc)
        return
    if line:
        _log.warning("%s", line)


def _save(
    known: TuningState, cache: PlanCache, on_unfinished: OnUnfinished | None
) -> str:
    so_far = known.so_far
    kept = False
    if so_far is not None and so_far.step_s is not None and not so_far.from_cache:
        assert known.job is not None  # noqa: S101 - steps were measured
        kept = cache.store(
            CachedPlan(
                job=known.job,
                plan=so_far.executed,
                workload=so_far.workload,
                cluster=so_far.cluster,
                step_s=so_far.step_s,
                ddp_step_s=so_far.ddp_step_s,
                unfinished_steps=known.steps_before + known.steps,
            ),
            refuted=known.checked.number if known.checked and known.stale else None,
        )
    files = "" if on_unfinished is None else on_unfinished(so_far)
    if not kept and not files:
        return ""
    parts = [f"tuning had not settled after {known.steps} steps"]
    if so_far is not None:
        parts.append(f"best so far, {summary(so_far)}")
    if kept:
        parts.append("an equal job continues from there")
    if files:
        parts.append(files)
    return "; ".join(parts)


def within(seconds: float, do: Callable[[], _T], *, what: str) -> _T | None:
    """Return the result of ``do``, or ``None`` if it takes too long or fails.

    After the time limit it continues in its thread, and one line is logged: a slow disk
    must not stop the ranks that wait for this one.
    """
    done = call_within(
        seconds,
        do,
        thread_name="stretto-cache",
        on_error=lambda error: _log.warning(
            "%s failed, training continues without it: %s", what, error
        ),
    )
    if not done.ended:
        _log.warning(
            "%s takes longer than %g s, training continues without it", what, seconds
        )
    return done.values[0] if done.values else None
