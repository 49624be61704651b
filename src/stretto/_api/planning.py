"""Plan, compare and simulate, for `stretto.plan` and its like and for the commands."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from stretto import planners
from stretto.planners.base import certified
from stretto.planners.joint import DIMS
from stretto.sim.step import simulate_step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.planners import AbstractPlanner
    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim.step import StepResult


def plan(
    workload: Workload,
    cluster: Cluster,
    planner: str | AbstractPlanner = "joint",
    *,
    wire_dtype: str | None = None,
    **options: Any,
) -> Plan:
    """Return a plan for a workload on a cluster, with its prediction.

    Args:
        workload: The measurements of the model.
        cluster: The measured or specified hardware.
        planner: The name of one of stretto's planners (``stretto.planners.NAMES``) or
            of an installed package's, or a planner object.
        wire_dtype: The type in which gradients may travel, narrower than their own:
            ``"float16"`` or ``"bfloat16"`` for float32, ``"float32"`` for float64.
        options: The planner's own, for instance ``max_lanes`` of ``joint``.

    Raises:
        SpecError: there is no such planner or option, or no gradient can travel in
            ``wire_dtype``.
        Infeasible: no plan meets the limits.
    """
    return timed_plan(workload, cluster, planner, wire_dtype=wire_dtype, **options)[0]


def timed_plan(
    workload: Workload,
    cluster: Cluster,
    planner: str | AbstractPlanner = "joint",
    *,
    wire_dtype: str | None = None,
    **options: Any,
) -> tuple[Plan, float]:
    """Return what `plan` returns, and the seconds that its planner took.

    The proof of the bound is not part of them: it may load SciPy and solve a program.
    """
    made = planners.get(planner, **options)
    begin_s = perf_counter()
    chosen = planners.plan_with_wire(workload, cluster, made, wire_dtype=wire_dtype)
    search_s = perf_counter() - begin_s
    return certified(chosen, workload, cluster, made.scope(cluster)), search_s


def simulate(workload: Workload, cluster: Cluster, plan: Plan) -> StepResult:
    """Predict one step under a plan: its times and its timeline.

    Raises:
        PlanMismatch: the plan was made for another model or number of ranks.
    """
    return simulate_step(workload, cluster, plan)


def compare(
    workload: Workload,
    cluster: Cluster,
    names: Iterable[str | AbstractPlanner] = planners.NAMES,
) -> dict[str, Plan]:
    """Return the plan of every planner, by name.

    ``names`` are as `plan` accepts them: names or planner objects.
    """
    made = map(planners.get, names)
    return {each.name: plan(workload, cluster, each) for each in made}


def contributions(workload: Workload, cluster: Cluster) -> list[tuple[str, float]]:
    """Return the predicted step as one dimension after another is opened.

    The first row is fusion alone. Each further row adds its dimension to those above,
    as `joint` chooses them with ``robust=False``. A dimension that this cluster lacks,
    such as a resource without contention, leaves the time unchanged.
    """
    rows: list[tuple[str, float]] = []
    best_s = float("inf")
    for number, name in enumerate(DIMS, start=1):
        chosen = planners.get("joint", dims=DIMS[:number], robust=False)
        prediction = chosen.plan(workload, cluster).predicted
        if prediction is not None:
            best_s = min(best_s, prediction.iteration_s)
        rows.append((name, best_s))
    return rows
