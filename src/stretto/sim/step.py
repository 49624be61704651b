"""Simulate one training step under a plan, by the event engine, with its timeline.

Time 0 is the start of forward; backward follows. A bucket is ready when backward has
done the work up to its last gradient, and not before the buckets ahead of it in the
plan, because buckets launch in list order. Each of its slices is a flow on its lane: a
start-up, then its bytes on the bottleneck link. The step ends when backward and the
last flow have ended.

`stretto.cost.flow_rates` and `stretto.cost.collective_cost` turn the figures of a
cluster into rates and start-ups. With `contention`, the curves also limit a flow of
resource $r$: ``overlapped`` at $r$ while computation runs, and ``exclusive`` after it.
Computation runs at `stretto.cost.compute_rate` of the sum of $r$ over the flows under
way. A bucket without a resource has the first of ``contention.resources``.

Called for predictions and timelines; searches use `stretto.sim.step_model` instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from stretto.cost import compute_rate
from stretto.errors import PlanMismatch
from stretto.schema import Span, Timeline
from stretto.sim.engine import run
from stretto.sim.flows import bottleneck_link, flow_spans, plan_flows
from stretto.sim.forward import simulate_halves, simulate_period

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim.engine import Flow, Outcome
    from stretto.sim.flows import FlowSlice

_PERIODS = {"forward": simulate_period, "halves": simulate_halves}
"""The simulators of overlaps that extend beyond backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Predicted times of one step."""

    iteration_s: float

    backward_s: float
    """From the start of backward to the end of the last collective or of backward."""

    exposed_communication_s: float
    """Part of ``backward_s`` in which no computation runs."""

    timeline: Timeline


def simulate_step(
    workload: Workload, cluster: Cluster, plan: Plan, *, startup: str = "phase"
) -> StepResult:
    """Simulate one step of a workload on a cluster under a plan.

    With overlap ``forward`` or ``halves``, the result is one of many such steps, with
    its timeline from the start of backward: `stretto.sim.forward`.

    ``startup`` says how a start-up counts: ``phase``, a time in which nothing is sent,
    or ``mixed``, LIBRA's reading (Eq. 9-11): spread evenly over the message, so that
    the part left after computation counts in proportion. ``mixed`` is meant for one
    flow at a time, as in LIBRA.

    Raises:
        PlanMismatch: the plan is for another workload or another number of ranks.
        SpecError: the plan requests a resource that the cluster does not list.
    """
    plan.check_matches(workload)
    if plan.ranks != cluster.ranks:
        raise PlanMismatch(
            f"the plan needs {plan.ranks} ranks, but cluster {cluster.name!r} has "
            f"{cluster.ranks}: plan again for this cluster"
        )
    if plan.overlap in _PERIODS:
        period = _PERIODS[plan.overlap](workload, cluster, plan, startup=startup)
        return StepResult(
            iteration_s=period.period_s,
            backward_s=period.period_s - workload.forward_s,
            exposed_communication_s=period.stall_s,
            timeline=period.timeline,
        )
    flows, slices = plan_flows(
        workload, cluster, plan, origin_s=workload.forward_s, startup=startup
    )
    contention = cluster.contention
    outcome = run(
        flows,
        [bottleneck_link(cluster)],
        work_s=workload.forward_s + workload.backward_s,
        work_rate=partial(compute_rate, contention.compute) if contention else None,
    )
    iteration_s = outcome.makespan_s
    return StepResult(
        iteration_s=iteration_s,
        backward_s=iteration_s - workload.forward_s,
        exposed_communication_s=iteration_s - outcome.work_end_s,
        timeline=_timeline(workload, plan, flows, slices, outcome),
    )


def _timeline(
    workload: Workload,
    plan: Plan,
    flows: list[Flow],
    slices: list[FlowSlice],
    outcome: Outcome,
) -> Timeline:
    spans: list[Span] = []
    for kind, start_s, end_s in (
        ("forward", 0.0, workload.forward_s),
        ("backward", workload.forward_s, outcome.work_end_s),
    ):
        if end_s > start_s:
            spans.append(
                Span(
                    track="compute",
                    name=kind,
                    start_s=start_s,
                    end_s=end_s,
                    args={"kind": kind},
                )
            )
    spans.extend(flow_spans(flows, slices, outcome))
    return Timeline(
        name=f"{workload.name} under {plan.planner}, predicted", spans=tuple(spans)
    )
