"""Plans that a search tries first, whatever the model predicts for others."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.errors import Infeasible, SpecError
from stretto.planners.base import predicted_s, with_prediction
from stretto.tune.plan_cache import topology_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.schema import Cluster, Plan, Workload
    from stretto.tune.calibration import CalibratedModel
    from stretto.tune.plan_cache import CachedPlan, PlanCache, TunedJob

PROFILED = "profiled"
"""Name of the plan of the profiled steps."""

SIMILAR_DISTANCE = 0.25
"""Jobs that are further apart share no experience."""

DDP_FIRST_RATIO = 1.1
"""If DDP's buckets are predicted within this ratio of the plan, they come first: with a
near tie the plan must show that it is better. Otherwise they come last."""


def starts_of(
    *,
    planned: Plan,
    ddp: Plan,
    forward: Plan | None = None,
    model: bool = True,
    before: Plan | None = None,
    stale: bool = False,
    nearest: Plan | None = None,
    profiled: Plan | None = None,
) -> list[tuple[str, Plan]]:
    """Return the plans to start with, by name; the first is the first incumbent.

    Args:
        planned: The planner's plan under the fitted model.
        ddp: DDP's buckets; the search compares the best plan with them in any case.
        forward: The planner's plan that overlaps with the next forward, if it is
            predicted to be faster.
        model: Whether to use predictions; if false, a search starts from DDP's buckets.
        before: The plan that training has executed so far: an earlier search's result,
            or a cached plan.
        stale: Whether the step time of that plan has changed.
        nearest: The choice of the most similar earlier job.
        profiled: The plan of the profiled steps.
    """
    if not model or planned.digest == ddp.digest:
        starts = [("ddp", ddp)]
    elif predicted_s(ddp) < DDP_FIRST_RATIO * predicted_s(planned):
        starts = [("ddp", ddp), ("planner", planned)]
    else:
        starts = [("planner", planned)]
    if forward is not None and model:
        starts.append(("forward", forward))
    if before is not None:
        # Compare others first with the plan that has trained so far. A stale plan is no
        # better a guess than the new one.
        starts.insert(1 if stale else 0, ("before", before))
    if nearest is not None:
        starts.append(("nearest", nearest))
    if profiled is not None and model:
        starts.append((PROFILED, profiled))
    known: set[str] = set()
    found = []
    for name, plan in starts:
        if plan.digest not in known:
            known.add(plan.digest)
            found.append((name, plan))
    return found


def retargeted(plan: Plan, workload: Workload, cluster: Cluster) -> Plan | None:
    """Return a plan with its prediction for a workload, or None if infeasible."""
    try:
        return with_prediction(
            replace(plan, workload_digest=workload.digest), workload, cluster
        )
    except (Infeasible, SpecError):
        return None


def nearest_plan(
    cache: PlanCache,
    job: TunedJob,
    calibrated: CalibratedModel,
    record: Callable[..., None],
) -> Plan | None:
    """Return the most similar earlier job's plan, adapted to this job's tensors.

    ``record`` adds an event to the record of tuning.
    """
    topology = topology_of(calibrated.cluster)
    found = cache.nearest(calibrated.workload, topology, job.environment)
    if found is None or found[1] > SIMILAR_DISTANCE:
        return None
    earlier, distance = found
    plan = calibrated.plan_of(_nearest_point(earlier.plan, earlier, calibrated))
    record(
        "remembered",
        f"job {earlier.job.name!r} is similar: distance {distance:.2f}",
        distance=distance,
        plan=plan.digest,
    )
    return plan


def _nearest_point(
    plan: Plan, earlier: CachedPlan, calibrated: CalibratedModel
) -> tuple[int, ...]:
    """Return the calibrated model's point that is nearest to another job's plan."""
    sizes = {tensor.name: tensor.bytes for tensor in earlier.workload.tensors}
    largest = max(
        sum(sizes.get(name, 0) for name in bucket.tensors) for bucket in plan.buckets
    )
    slices = statistics.median(bucket.slices for bucket in plan.buckets)

    def miss(point: tuple[int, ...]) -> tuple[float, ...]:
        at: dict[str, Any] = calibrated.space.describe(point)
        return (
            float(at["family"] != "slices"),
            abs(math.log2(at["lanes"] / plan.lanes)),
            abs(math.log2(max(1, at["slices"]) / max(1, slices))),
            abs(math.log2(at["unit_bytes"] / max(1, largest))),
        )

    return min(calibrated.space.points, key=miss)
