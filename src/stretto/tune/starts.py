"""Plans that a search tries first, whatever the model says of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.planners.base import predicted_s

if TYPE_CHECKING:
    from stretto.schema import Plan

PROFILED = "profiled"
"""Name of the plan that the profiled steps ran with."""

DDP_FIRST_RATIO = 1.1
"""Where DDP's buckets are predicted within this of the plan, they come first: so near a
tie the plan has to show that it is better. Elsewhere they come last."""


def starts_of(
    *,
    planned: Plan,
    ddp: Plan,
    model: bool = True,
    before: Plan | None = None,
    stale: bool = False,
    nearest: Plan | None = None,
    profiled: Plan | None = None,
) -> list[tuple[str, Plan]]:
    """Return the plans to begin with, by name; the first is the first incumbent.

    Args:
        planned: The planner's plan under the fitted model.
        ddp: DDP's buckets, which the search compares the best plan with in any case.
        model: Whether predictions count; without, a search begins from DDP's buckets.
        before: What the training executed until now: an earlier search's result, or a
            remembered plan.
        stale: Whether that plan's steps no longer take what they took.
        nearest: What the most similar earlier job chose.
        profiled: The plan of the profiled steps.
    """
    if not model or planned.digest == ddp.digest:
        starts = [("ddp", ddp)]
    elif predicted_s(ddp) < DDP_FIRST_RATIO * predicted_s(planned):
        starts = [("ddp", ddp), ("planner", planned)]
    else:
        starts = [("planner", planned)]
    if before is not None:
        # What trained until now is the first that others are compared with. A stale
        # plan is no better a guess than the new one.
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
