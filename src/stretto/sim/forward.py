"""Overlap with the next forward: each all-reduce in two halves, as in DeAR.

A bucket's gradients are reduced and scattered during backward, and gathered during the
next forward, which waits at a tensor's first use (``needed_s``) until its bucket is
complete. Reduce-scatters launch as buckets become ready, in the plan's order;
all-gathers launch after all of them, in the order of need. Each bucket takes the same
lanes both times. All-gathers do not use gaps in which lanes wait for gradients, so a
job whose communication backward hides anyway may be slower than with overlap
``backward``.

Every all-gather has ended when forward ends, because no tensor is needed later. So each
backward starts with idle links, steps repeat exactly from the first backward on, and
one backward with the forward after it is a steady period, without a transient.

`simulate_step` calls `simulate_period`; the step model calls `run_halves` and
`single_lane_period_s` for one draft after another.

Source: Zhang et al., DeAR, ICDCS 2023, section III.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from stretto.cost import collective_cost, compute_rate, flow_rates
from stretto.schema import Span, Timeline
from stretto.sim.engine import Flow, Gate, Outcome, run
from stretto.sim.flows import bottleneck_link, flow_spans, plan_flows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim.lanes import LaneFlow


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """One steady period: backward, then the next forward."""

    period_s: float

    stall_s: float
    """Part of the period in which forward waits for all-gathers."""

    timeline: Timeline
    """Time 0 is the start of backward."""


@dataclass(frozen=True, slots=True)
class Halves:
    """One run of the engine: all reduce-scatters, then all all-gathers."""

    flows: list[Flow]

    order: list[int]
    """The reduce-scatter whose bytes each all-gather sends back."""

    gates: list[Gate]

    outcome: Outcome


def simulate_period(
    workload: Workload, cluster: Cluster, plan: Plan, *, startup: str = "phase"
) -> Period:
    """Return the steady period of steps whose all-gathers run beside the next forward.

    The plan's ranks and tensors must have been checked.

    Raises:
        SpecError: the plan requests a resource that the cluster does not list.
    """
    scatters, sent = plan_flows(
        workload, cluster, plan, origin_s=0.0, part="reduce_scatter", startup=startup
    )
    halves = run_halves(
        scatters,
        [part.bucket for part in sent],
        _needed_s(workload, plan),
        cluster,
        backward_s=workload.backward_s,
        forward_s=workload.forward_s,
    )
    slices = [replace(part, name=f"{part.name} reduce-scatter") for part in sent]
    slices += [
        replace(sent[i], name=f"{sent[i].name} all-gather") for i in halves.order
    ]
    outcome = halves.outcome
    spans = [
        *_compute_spans(halves.gates, outcome),
        *flow_spans(halves.flows, slices, outcome),
    ]
    stalls = zip(outcome.reached_s, outcome.passed_s, strict=True)
    return Period(
        period_s=outcome.work_end_s,
        stall_s=sum(passed_s - reached_s for reached_s, passed_s in stalls),
        timeline=Timeline(
            name=f"{workload.name} under {plan.planner}, predicted", spans=tuple(spans)
        ),
    )


def run_halves(
    scatters: list[Flow],
    buckets: Sequence[int],
    needed_s: Sequence[float],
    cluster: Cluster,
    *,
    backward_s: float,
    forward_s: float,
) -> Halves:
    """Run reduce-scatters, then all-gathers for which forward waits.

    Args:
        scatters: reduce-scatters in launch order; time 0 is the start of backward.
        buckets: of each of these.
        needed_s: by bucket, when forward first needs it.
        cluster: gives the link and the contention.
        backward_s: its computation.
        forward_s: its computation.
    """
    order = sorted(
        range(len(scatters)), key=lambda i: (needed_s[buckets[i]], -buckets[i])
    )
    launched_s = max((flow.ready_work_s for flow in scatters), default=0.0)
    # An all-gather sends back the bytes of its reduce-scatter.
    flows = scatters + [replace(scatters[i], ready_work_s=launched_s) for i in order]
    awaited: dict[int, list[int]] = {}
    for number, i in enumerate(order, start=len(scatters)):
        awaited.setdefault(buckets[i], []).append(number)
    gates = [Gate(work_s=backward_s)]  # records when backward ends
    gates += [
        Gate(work_s=backward_s + needed_s[bucket], flows=tuple(numbers))
        for bucket, numbers in awaited.items()
    ]
    contention = cluster.contention
    outcome = run(
        flows,
        [bottleneck_link(cluster)],
        work_s=backward_s + forward_s,
        work_rate=partial(compute_rate, contention.compute) if contention else None,
        gates=gates,
    )
    return Halves(flows, order, gates, outcome)


def single_lane_period_s(
    queue: Sequence[LaneFlow],
    needed_s: Sequence[float],
    rate_bytes_per_s: float,
    *,
    backward_s: float,
    forward_s: float,
) -> float:
    """Return the period where all lanes have one queue and nothing slows computation.

    Args:
        queue: whole all-reduces in launch order, one per bucket; each is done in two
            halves, ready after ``forward_s`` and their part of backward.
        needed_s: by flow, when forward first needs its bucket.
        rate_bytes_per_s: of each flow.
        backward_s: its computation.
        forward_s: its computation.
    """
    now = ready_s = 0.0
    for at_s, startup_s, size, _ in queue:
        ready_s = at_s - forward_s
        half_s = (startup_s + size / rate_bytes_per_s) / 2
        now = (ready_s if ready_s > now else now) + half_s
    now = max(now, ready_s)
    late_s = 0.0
    # Forward waits for each all-gather in turn, and its delays add up.
    for i in sorted(range(len(queue)), key=lambda i: (needed_s[i], -i)):
        _, startup_s, size, _ = queue[i]
        now += (startup_s + size / rate_bytes_per_s) / 2
        late_s = max(late_s, now - backward_s - needed_s[i])
    return backward_s + forward_s + late_s


def forward_bound_s(
    workload: Workload, cluster: Cluster, *, algorithms: Sequence[str] = ("ring",)
) -> float:
    r"""Return a period that no plan with overlap ``forward`` can beat.

    $\max(t_f + t_b,\; M\rho/X,\;
    \max_l t_f - n_l + \tau_l + a/2 + \max(a/2, \rho m_l/X))$

    with tensor $l$ of $m_l$ bytes ready at $\tau_l$ of backward and needed at $n_l$ of
    forward, $M$ all bytes, $X$ the highest total rate of any number of flows. The last
    term is the cycle through one tensor: from its first use forward and backward reach
    its gradient, which must be reduced and gathered before the next first use. Only one
    of the two start-ups is sure to send nothing: slices may send during each other's.

    $\max(t_f + t_b, M\rho/B) + a$, sometimes given as the bound, holds for whole
    buckets on one lane where the last gradient is needed first, but not always.
    """
    forward_s, backward_s = workload.forward_s, workload.backward_s
    if cluster.ranks == 1:
        return forward_s + backward_s
    costs = [collective_cost(cluster, algorithm) for algorithm in algorithms]
    startup_s = min(cost.least_startup_s for cost in costs)
    factor = min(cost.wire_factor for cost in costs)
    best_bytes_per_s = flow_rates(cluster).best_total_bytes_per_s()
    circle_s = max(
        (
            forward_s
            - tensor.needed_s
            + tensor.ready_s
            + startup_s / 2
            + max(startup_s / 2, factor * tensor.bytes / best_bytes_per_s)
            for tensor in workload.tensors
            if tensor.bytes
        ),
        default=0.0,
    )
    return max(
        forward_s + backward_s,
        factor * workload.total_bytes / best_bytes_per_s,
        circle_s,
    )


def _needed_s(workload: Workload, plan: Plan) -> list[float]:
    """Return when forward first needs each bucket."""
    needed_s = {tensor.name: tensor.needed_s for tensor in workload.tensors}
    return [min(needed_s[name] for name in b.tensors) for b in plan.buckets]


def _compute_spans(gates: Sequence[Gate], outcome: Outcome) -> list[Span]:
    """Return backward, and forward in the pieces between its waits."""
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
