"""Simulate one training step under a plan, with the flow model.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, final

from stretto.cost import collective_cost, compute_rate, flow_rates
from stretto.errors import PlanMismatch, SpecError
from stretto.schema import Span, Timeline
from stretto.schema._rules import DTYPE_BYTES
from stretto.sim._queues import at_once, beside_contention, in_turn
from stretto.sim.engine import run
from stretto.sim.flows import bottleneck_link, curve_caps, flow_spans, plan_flows
from stretto.sim.forward import simulate_period

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim._queues import Queue
    from stretto.sim.engine import Flow, Outcome
    from stretto.sim.flows import Slice

_INF = float("inf")


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

    With overlap ``forward``, the result is one of many such steps, with its timeline
    from the start of backward: `stretto.sim.forward`.

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
    if plan.overlap == "forward":
        period = simulate_period(workload, cluster, plan, startup=startup)
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
    slices: list[Slice],
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


@final
class StepModel:
    """The model of `simulate_step`, prepared for searches.

    It supports buckets of neighboring tensors in the order of readiness, sent as rings
    in the gradients' own type with the default resource, under backward. All flows then
    have one rate at any time (`stretto.sim._queues`). Lanes whose queues are equal stay
    equal and are taken as one.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        rates = flow_rates(cluster)
        cost = self._cost = collective_cost(cluster)
        tensors = workload.tensors
        self._num_tensors = len(tensors)
        self._silent = cluster.ranks == 1
        self._work_s = workload.forward_s + workload.backward_s
        self._cluster = cluster
        # Per number of lanes; index 0 is never read.
        self._startup_s = [0.0]
        self._ready_s = [workload.forward_s + tensor.ready_s for tensor in tensors]
        self._elements = [
            0,
            *accumulate(t.bytes // DTYPE_BYTES[t.dtype] for t in tensors),
        ]
        self._wire_bytes = [
            cost.wire_factor * size
            for size in accumulate((t.bytes for t in tensors), initial=0)
        ]
        self._rates = rates
        self._contention = cluster.contention
        self._load = 0
        self._caps = (_INF, _INF)
        if cluster.contention is not None:
            self._load = cluster.contention.resources[0]
            self._caps = curve_caps(cluster.contention, self._load, rates)
        # Every flow so far, and its number; by bucket, the numbers of its slices.
        self._flows: list[tuple[float, float, float]] = []
        self._number_of: dict[tuple[float, float, float], int] = {}
        self._numbers: dict[tuple[int, int, int], tuple[int, ...]] = {}
        # Per number of flows; index 0 is never read.
        self._rate = [0.0]
        self._idle_rate = [0.0]
        self._speed = [1.0]

    def iteration_s(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
    ) -> float:
        """Return `simulate_step`'s ``iteration_s`` for these buckets.

        Bucket ``i`` holds the tensors from ``ends[i - 1]`` (0 for the first) up to, but
        excluding, ``ends[i]`` of the workload; ``ends`` ascends to the number of
        tensors. Its first slice is on lane ``bucket_lanes[i]`` of ``lanes``.

        Raises:
            SpecError: the buckets omit tensors.
        """
        if not ends or ends[-1] != self._num_tensors:
            raise SpecError(
                f"ends must end with the number of tensors ({self._num_tensors}), got "
                f"{list(ends)[-1:]}",
                place=".ends",
            )
        if self._silent:
            return self._work_s
        queues = self._queues(ends, lanes, bucket_lanes, slices)
        self._extend(lanes)
        startup_s, work_s, rates = self._startup_s[lanes], self._work_s, self._rate
        if self._contention is not None:
            return beside_contention(
                queues, startup_s, rates, self._idle_rate, self._speed, work_s
            )[0]
        if len(queues) == 1:
            end_s = in_turn(queues[0], startup_s, rates)
        else:
            end_s = at_once(queues, startup_s, rates)
        return end_s if end_s > work_s else work_s

    def _queues(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
    ) -> list[Queue]:
        """Return each lane's flows, equal lanes once with their number."""
        known = self._numbers
        queues: list[list[int]] = [[] for _ in range(lanes)]
        first = 0
        for bucket in zip(ends, bucket_lanes, slices, strict=True):
            end, lane, parts = bucket
            numbers = known.get((first, end, parts))
            if numbers is None:
                numbers = self._numbered(first, end, parts)
            first = end
            for number in numbers:
                if lane >= lanes:
                    lane %= lanes
                queues[lane].append(number)
                lane += 1
        # fast: numbers of flows are hashed in half of the time that their floats take.
        alike: dict[tuple[int, ...], int] = {}
        for queue in queues:
            if queue:
                key = tuple(queue)
                alike[key] = alike.get(key, 0) + 1
        flows = self._flows
        return [([flows[i] for i in key], number) for key, number in alike.items()]

    def _numbered(self, first: int, end: int, parts: int) -> tuple[int, ...]:
        """Return the numbers of a bucket's flows by slice; equal flows share one."""
        count = self._elements[end] - self._elements[first]
        size = self._wire_bytes[end] - self._wire_bytes[first]
        numbers: list[int] = []
        if count:
            each, extra = divmod(count, parts)
            for share, times in ((each + 1, extra), (each, parts - extra)):
                if share and times:
                    part = size * share / count
                    extra_s = self._cost.extra_s(part / self._cost.wire_factor)
                    flow = (self._ready_s[end - 1], part, extra_s)
                    number = self._number_of.setdefault(flow, len(self._flows))
                    if number == len(self._flows):
                        self._flows.append(flow)
                    numbers += [number] * times
        self._numbers[first, end, parts] = tuple(numbers)
        return self._numbers[first, end, parts]

    def _extend(self, lanes: int) -> None:
        """Compute rates and speed for up to ``lanes`` flows at once."""
        contention = self._contention
        while len(self._rate) <= lanes:
            num = len(self._rate)
            cost = collective_cost(self._cluster, lanes=num)
            self._startup_s.append(cost.startup_s)
            rate = self._rates.per_flow_bytes_per_s(num)
            self._rate.append(min(rate, self._caps[0]))
            self._idle_rate.append(min(rate, self._caps[1]))
            self._speed.append(
                compute_rate(contention.compute, num * self._load)
                if contention
                else 1.0
            )
