"""Burst plans chosen by the simulated step on a measured cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.planners.burst import plan as planning
from stretto.sim.burst import BUCKET_BYTES, BurstStep, simulate_burst
from stretto.sim.sample_layout import Layouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.planners.burst.problem import BurstProblem
    from stretto.schema import Cluster
    from stretto.schema.burst import BurstPlan, LayerProfile

_EXPOSED = (1.0, 0.5, 0.25, 0.1, 0.0)
"""Parts of synchronization that candidate plans are searched for."""

NEAR_RATIO = 0.02
"""Profiles cannot rank plans whose simulated steps are this close to the shortest. The
plan that computes least is chosen among them.
"""


def simulate(
    profile: LayerProfile,
    plan: BurstPlan,
    cluster: Cluster,
    *,
    shares: Sequence[int] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    lanes: int = 1,
    cores: float | None = None,
) -> BurstStep:
    """Simulate a plan's step on a cluster, event by event; see `simulate_burst`.

    ``shares`` are the samples that each rank starts with; by default they are equal.
    """
    given = even_shares(plan.batch, plan.gpus) if shares is None else shares
    return simulate_burst(
        profile,
        plan,
        cluster,
        Layouts(given),
        bucket_bytes=bucket_bytes,
        lanes=lanes,
        cores=cores,
    )


def even_shares(batch: int, gpus: int) -> tuple[int, ...]:
    """Return nearly equal numbers of samples by rank, larger on the first ranks."""
    return tuple(-(-(batch - i) // gpus) for i in range(gpus))


def plan_on(
    problem: BurstProblem, cluster: Cluster, **options: Any
) -> tuple[BurstPlan, BurstStep]:
    """Return the plan with about the shortest simulated step, and that step.

    The search counts a layer's synchronization as if it came after its backward. In
    fact some of it overlaps other layers' backward. So the function searches a plan for
    each of several parts of the synchronization, adds the plans of one width, and
    simulates each. It returns the fastest plan, or one that computes less and is
    equally fast within `NEAR_RATIO`. With a limit it considers only plans that keep the
    limit with the full synchronization counted. The prediction is the simulation's.

    Args:
        problem: The layers and limits, for this cluster.
        cluster: Where the plan runs.
        options: Options of `simulate`: ``bucket_bytes``, ``lanes``, ``cores``.

    Raises:
        Infeasible: no plan keeps the limit; the error names the nearest feasible limit.
        SpecError: a needed time is not profiled.
    """
    limit = problem.amplification_limit
    found = [planning.plan(problem)]
    for ratio in _EXPOSED[1:] if limit is None else ():
        network = replace(problem.network, exposed_ratio=ratio)
        found.append(planning.plan(replace(problem, network=network)))
    alone = {gpus: planning.same_width(problem, gpus) for gpus in problem.widths}
    steps = {
        width: simulate(problem.profile, each, cluster, **options)
        for width, each in alone.items()
    }
    tried = list(steps.values()) if limit is None else []
    plans = list(alone.values()) if limit is None else []
    for each in found:
        plans.append(each)
        tried.append(simulate(problem.profile, each, cluster, **options))
    near_s = min(each.iteration_s for each in tried) * (1 + NEAR_RATIO)
    best = min(
        (i for i, each in enumerate(tried) if each.iteration_s <= near_s),
        key=lambda i: (sum(tried[i].computing_s), tried[i].iteration_s, i),
    )
    width = min(steps, key=lambda gpus: (steps[gpus].iteration_s, gpus))
    step = tried[best]
    gpu_s, single_s = sum(step.computing_s), sum(problem.single_s)
    predicted = plans[best].predicted
    if predicted is None:
        raise AssertionError("a planner's plan has no prediction")
    return replace(
        plans[best],
        predicted=replace(
            predicted,
            iteration_s=step.iteration_s,
            gpu_s=gpu_s,
            amplification=gpu_s / single_s if single_s > 0 else 0.0,
            data_parallel_s=steps[problem.widths[-1]].iteration_s,
            single_width=width,
            single_width_s=steps[width].iteration_s,
            idle_gpu_s=sum(step.idle_s),
        ),
    ), step
