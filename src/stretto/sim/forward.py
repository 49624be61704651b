"""Overlap with the next forward: whole all-reduces, some of which forward waits for.

Buckets launch in the plan's launch order: a bucket may start when the gradients of all
buckets up to it in that order are ready, and its lanes are free. Forward waits at a
bucket's first use (``needed_s``) until the bucket has arrived. So a bucket that forward
needs early may launch before others that became ready earlier, which then travel while
forward computes.

No tensor is needed after forward, so all communication has ended when forward ends, and
each backward starts with idle links. So steps repeat exactly from the first backward
on, and one backward with the forward after it is a steady period, without a transient.

The optimizer's time is part of the workload's ``forward_s``. A bucket's parameters are
updated just before their first use, which moves the work but does not add to it. The
model counts everything outside of the model's own forward after the last first use: it
does not hide communication behind the optimizer and the input, so it predicts no less
than what happens.

`simulate_step` calls `simulate_period` and `simulate_halves`. The step model has a
faster evaluation of the first (`stretto.sim.gated_lanes`), and tests compare the two.

# Note [Halves of all-reduces]
DeAR, which is simulated to compare with, reduces and scatters a bucket's gradients
during backward and gathers them during the next forward. Reduce-scatters launch as
buckets become ready, in the plan's order; all-gathers launch after all of them, in the
order of need. Each bucket takes the same lanes both times. All-gathers do not use gaps
in which lanes wait for gradients, so a job whose communication backward hides anyway
may be slower than with overlap ``backward``. Source: Zhang et al., DeAR, ICDCS 2023,
section III. Clipping by parts sends halves, too, of the buckets of a forward plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from stretto.cost import compute_rate
from stretto.schema import Span, Timeline
from stretto.sim.engine import FlowGate, run
from stretto.sim.flows import bottleneck_link, flow_spans, plan_flows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim.engine import Flow, Outcome
    from stretto.sim.flows import FlowSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """One steady period: backward, then the next forward."""

    period_s: float

    stall_s: float
    """Part of the period in which forward waits for communication."""

    timeline: Timeline
    """Time 0 is the start of backward."""


def simulate_period(
    workload: Workload, cluster: Cluster, plan: Plan, *, startup: str = "phase"
) -> Period:
    """Return the steady period of steps with overlap ``forward``.

    The plan's ranks and tensors must have been checked.

    Raises:
        SpecError: the plan requests a resource that the cluster does not list.
    """
    flows, slices = plan_flows(workload, cluster, plan, origin_s=0.0, startup=startup)
    backward_s = workload.backward_s
    needed_s = needs_of(workload, plan)
    awaited: dict[int, list[int]] = {}
    for number, part in enumerate(slices):
        awaited.setdefault(part.bucket, []).append(number)
    gates = [
        FlowGate(work_s=backward_s + needed_s[bucket], flows=tuple(numbers))
        for bucket, numbers in awaited.items()
    ]
    return run_period(workload, cluster, plan, flows=flows, slices=slices, gates=gates)


def simulate_halves(
    workload: Workload, cluster: Cluster, plan: Plan, *, startup: str = "phase"
) -> Period:
    """Return the steady period of steps whose all-gathers run beside the next forward.

    See Note [Halves of all-reduces]. The plan's ranks and tensors must have been
    checked.

    Raises:
        SpecError: the plan requests a resource that the cluster does not list.
    """
    scatters, sent = plan_flows(
        workload, cluster, plan, origin_s=0.0, part="reduce_scatter", startup=startup
    )
    needed_s = needs_of(workload, plan)
    order = sorted(
        range(len(scatters)), key=lambda i: (needed_s[sent[i].bucket], -sent[i].bucket)
    )
    launched_s = max((flow.ready_work_s for flow in scatters), default=0.0)
    # An all-gather sends back the bytes of its reduce-scatter.
    gathers = [replace(scatters[i], ready_work_s=launched_s) for i in order]
    awaited: dict[int, list[int]] = {}
    for number, i in enumerate(order, start=len(scatters)):
        awaited.setdefault(sent[i].bucket, []).append(number)
    slices = [replace(part, name=f"{part.name} reduce-scatter") for part in sent]
    slices += [replace(sent[i], name=f"{sent[i].name} all-gather") for i in order]
    return run_period(
        workload,
        cluster,
        plan,
        flows=scatters + gathers,
        slices=slices,
        gates=[
            FlowGate(
                work_s=workload.backward_s + needed_s[bucket], flows=tuple(numbers)
            )
            for bucket, numbers in awaited.items()
        ],
    )


def run_period(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    *,
    flows: Sequence[Flow],
    slices: Sequence[FlowSlice],
    gates: Sequence[FlowGate],
) -> Period:
    """Run a backward and the next forward, which waits at gates, on the event engine.

    Args:
        workload: gives the computation; time 0 is the start of backward.
        cluster: gives the link and the contention.
        plan: names the timeline.
        flows: in launch order.
        slices: timeline data of each flow.
        gates: where forward waits.
    """
    contention = cluster.contention
    gates = [FlowGate(work_s=workload.backward_s), *gates]  # records backward's end
    outcome = run(
        flows,
        [bottleneck_link(cluster)],
        work_s=workload.backward_s + workload.forward_s,
        work_rate=partial(compute_rate, contention.compute) if contention else None,
        gates=gates,
    )
    stalls = zip(outcome.reached_s, outcome.passed_s, strict=True)
    spans = [*_compute_spans(gates, outcome), *flow_spans(flows, slices, outcome)]
    return Period(
        period_s=outcome.work_end_s,
        stall_s=sum(passed_s - reached_s for reached_s, passed_s in stalls),
        timeline=Timeline(
            name=f"{workload.name} under {plan.planner}, predicted", spans=tuple(spans)
        ),
    )


def needs_of(workload: Workload, plan: Plan) -> list[float]:
    """Return when forward first needs each bucket."""
    needed_s = {tensor.name: tensor.needed_s for tensor in workload.tensors}
    return [min(needed_s[name] for name in b.tensors) for b in plan.buckets]


def _compute_spans(gates: Sequence[FlowGate], outcome: Outcome) -> list[Span]:
    """Return backward, and forward in the pieces between its waits.

    The first gate is backward's end.
    """
    spans: list[Span] = []

    def add(kind: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            span = Span(
                track="compute",
                name=kind,
                start_s=start_s,
                end_s=end_s,
                args={"kind": kind},
            )
            spans.append(span)

    now = outcome.passed_s[0]
    add("backward", 0.0, now)
    for g in sorted(range(1, len(gates)), key=lambda g: (gates[g].work_s, g)):
        if outcome.passed_s[g] > outcome.reached_s[g]:
            add("forward", now, outcome.reached_s[g])
            now = outcome.passed_s[g]
    add("forward", now, outcome.work_end_s)
    return spans
