"""Use a plan in this run that `plan_cache` kept from an earlier one."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any, final

from stretto import planners
from stretto.schema import Cluster, Plan, Workload, codec
from stretto.tune.initial_profile import ProfileResult
from stretto.tune.result import TuningResult

if TYPE_CHECKING:
    from stretto.tune.plan_cache import CachedPlan


CHECK_WARMUP_STEPS = 2
CHECK_STEPS = 5
"""A cached plan runs for this many steps before it is accepted, and for as
many again before it is dropped."""

AGREES_RATIO = 0.10
"""A cached plan is dropped if its step is slower than before by more than this."""


@final
class PlanCheck:
    """Compares the steps of a cached plan with its step time in the earlier run."""

    def __init__(self, then_s: float) -> None:
        self._then_s = then_s
        self._steps_s: list[float] = []

    def add(self, step_s: float) -> float | None:
        """Add a step, infinite if it does not count.

        Returns:
            The median step once it decides; infinite if no step counted.
        """
        self._steps_s.append(step_s)
        steps_s = self._steps_s[CHECK_WARMUP_STEPS:]
        if len(steps_s) not in (CHECK_STEPS, 2 * CHECK_STEPS):
            return None
        counted_s = [s for s in steps_s if math.isfinite(s)]
        now_s = statistics.median(counted_s) if counted_s else math.inf
        # Slower at first may be a busy moment: look at as many steps again.
        if self.is_slower(now_s) and len(steps_s) == CHECK_STEPS:
            return None
        return now_s

    def is_slower(self, now_s: float) -> bool:
        """Return whether the step takes longer than in the earlier run."""
        return now_s > (1 + AGREES_RATIO) * self._then_s

    def is_faster(self, now_s: float) -> bool:
        """Return whether the step is shorter than in the earlier run."""
        return now_s < (1 - AGREES_RATIO) * self._then_s


PackedPlan = tuple[bytes, float, float | None, int | None]
"""A cached plan for a broadcast: plan, its and DDP's step times, unfinished steps."""


def packed(found: CachedPlan) -> PackedPlan:
    """Return what every rank needs to apply a cached plan, for a broadcast."""
    plan = codec.encode(found.plan)
    return plan, found.step_s, found.ddp_step_s, found.unfinished_steps


def settled_of(found: CachedPlan, now_s: float) -> TuningResult:
    """Return a cached plan as settled, with a step time of ``now_s``.

    Raises:
        Infeasible: DDP's rule has no plan for its workload.
    """
    return TuningResult(
        workload=found.workload,
        cluster=found.cluster,
        plan=found.plan,
        ddp=planners.get("ddp").plan(found.workload, found.cluster),
        step_s=now_s,
        ddp_step_s=ddp_step_s_at(found, now_s),
        from_cache=True,
    )


def ddp_step_s_at(found: CachedPlan, now_s: float) -> float | None:
    """Return DDP's step time at the speed at which the plan's step takes ``now_s``.

    Only the ratio of the two, measured in alternation, carries over: comparing an old
    step with a new one would show how busy the machine was.
    """
    if found.ddp_step_s is None:
        return None
    return found.ddp_step_s * now_s / found.step_s


def profile_again(
    found: CachedPlan, *, planner: str, wire_dtype: str | None
) -> ProfileResult:
    """Plan again from an earlier run's measurements.

    Raises:
        Infeasible: the planner finds no plan.
        SpecError: the planner refuses its options.
    """
    return ProfileResult(
        workload=found.workload,
        cluster=found.cluster,
        plan=planners.plan_with_wire(
            found.workload, found.cluster, planner, wire_dtype=wire_dtype
        ),
        ddp=planners.get("ddp").plan(found.workload, found.cluster),
        probe_s=0.0,
    )


def encoded(found: TuningResult | ProfileResult) -> dict[str, Any]:
    """Return measurements and plans encoded for a broadcast."""
    return {
        "workload": codec.encode(found.workload),
        "cluster": codec.encode(found.cluster),
        "plan": codec.encode(found.plan),
        "ddp": codec.encode(found.ddp),
    }


def decoded(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the decoded parts by field name."""
    return {
        "workload": codec.decode(parts["workload"], Workload),
        "cluster": codec.decode(parts["cluster"], Cluster),
        "plan": codec.decode(parts["plan"], Plan),
        "ddp": codec.decode(parts["ddp"], Plan),
    }
