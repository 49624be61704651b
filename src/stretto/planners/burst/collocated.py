"""Burst plans beside a background job: what both get, over amplification limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from stretto.errors import Infeasible
from stretto.planners.burst.plan import same_width
from stretto.planners.burst.simulated import plan_on, simulate
from stretto.schema.burst import BurstPlan
from stretto.sim.burst import BurstStep
from stretto.sim.collocation import CollocatedStep, collocate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.planners.burst.problem import BurstProblem
    from stretto.schema import Cluster, CollocatedPair

LIMITS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0)
"""Amplification limits of a front; the last plan has none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """A plan and its step without a background."""

    limit: float | None
    plan: BurstPlan
    step: BurstStep


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CollocatedPlan:
    """A plan with a background job beside each rank."""

    limit: float | None
    plan: BurstPlan

    alone_s: float
    """Its step without a background."""

    step: CollocatedStep

    foreground: float
    """The foreground's rate over that of the plan without limit and background."""

    @property
    def total(self) -> float:
        """Both jobs' samples a second, each over those of the job alone; their sum."""
        return self.foreground + self.step.background


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The foreground data parallel on some ranks, and background jobs on the others."""

    gpus: int
    """The foreground's."""

    iteration_s: float

    foreground: float
    """The same figure as in `CollocatedPlan`."""

    background: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.foreground + self.background


def alone_s(
    problem: BurstProblem,
    cluster: Cluster,
    plans: Iterable[SimulatedPlan] = (),
    **options: Any,
) -> float:
    """Return the step that rates are relative to: the fastest without background.

    It is that of the plan without limit, or of another one: the planner's own times
    and the simulated ones differ, so a plan with a limit may be faster.

    Args:
        problem: whose plan without limit.
        cluster: on which it is simulated.
        plans: others, on the same cluster.
        options: those of `plan_on`.
    """
    free = replace(problem, amplification_limit=None)
    _, step = plan_on(free, cluster, **options)
    return min([step.iteration_s, *(one.step.iteration_s for one in plans)])


def plans_over_limits(
    problem: BurstProblem, cluster: Cluster, **options: Any
) -> list[SimulatedPlan]:
    """Return a plan for each limit that some plan keeps, without equal plans.

    The problem's own limit is the highest. ``options`` are those of `plan_on`.

    Raises:
        Infeasible: no plan keeps the problem's own limit.
        SpecError: a needed time is not profiled.
    """
    highest = problem.amplification_limit
    lower = (limit for limit in LIMITS if highest is None or limit < highest)
    found: dict[Any, SimulatedPlan] = {}
    for limit in (*lower, highest):
        try:
            plan, step = plan_on(
                replace(problem, amplification_limit=limit), cluster, **options
            )
        except Infeasible:
            if limit == highest:
                raise
            continue
        found.setdefault(plan.layers, SimulatedPlan(limit=limit, plan=plan, step=step))
    return list(found.values())


def beside(
    plans: Iterable[SimulatedPlan], pair: CollocatedPair, alone_s: float
) -> list[CollocatedPlan]:
    """Return the plans with the pair's background beside each rank.

    Args:
        plans: on one cluster.
        pair: what was measured of both jobs.
        alone_s: the foreground's step to which its rates are relative.
    """
    found = []
    for one in plans:
        step = collocate(one.step, pair)
        found.append(
            CollocatedPlan(
                limit=one.limit,
                plan=one.plan,
                alone_s=one.step.iteration_s,
                step=step,
                foreground=alone_s / step.iteration_s,
            )
        )
    return found


def front_of(plans: Sequence[CollocatedPlan]) -> list[CollocatedPlan]:
    """Return the plans that no other beats in time and background, fastest first."""
    front: list[CollocatedPlan] = []
    for plan in sorted(plans, key=lambda p: (p.step.iteration_s, -p.step.background)):
        if not front or plan.step.background > front[-1].step.background + 1e-9:
            front.append(plan)
    return front


def partitions(
    problem: BurstProblem, cluster: Cluster, alone_s: float, **options: Any
) -> list[Partition]:
    """Return static partitions: each width for the foreground, the rest for others.

    A background has its rate alone on a rank of its own.
    """
    found = []
    for width in problem.widths:
        plan = replace(same_width(problem, width), gpus=width)
        step = simulate(problem.profile, plan, cluster, **options)
        found.append(
            Partition(
                gpus=width,
                iteration_s=step.iteration_s,
                foreground=alone_s / step.iteration_s,
                background=(problem.gpus - width) / problem.gpus,
            )
        )
    return found
