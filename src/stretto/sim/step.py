"""One training step under a plan, as the model of flows has it.

Time 0 is the start of forward; backward follows. A bucket is ready when backward has
done the work up to its last gradient, and not before the buckets ahead of it in the
plan are, for buckets launch in list order. Each of its slices is a flow on its lane: a
start-up, then its bytes on the bottleneck link. The step ends when backward and the
last flow have ended.

How the figures of a cluster become rates and start-ups: `stretto.cost.flow_rates`,
`stretto.cost.collective_cost`. With `contention`, a flow of resource $r$ also reaches
no more than the curve ``overlapped`` gives at $r$ while computation runs, and
``exclusive`` after it; computation runs at `stretto.cost.compute_rate` of the sum of
$r$ over the flows under way. A bucket without a resource has the first of
``contention.resources``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING, final

from stretto.cost import (
    FlowRates,
    collective_cost,
    compute_rate,
    curve_bytes_per_s,
    flow_rates,
)
from stretto.errors import PlanMismatch, SpecError
from stretto.schema import Span, Timeline, slice_bounds
from stretto.schema._rules import DTYPE_BYTES
from stretto.schema.plan import WIRE_DTYPES
from stretto.sim.engine import Flow, SharedLink, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Bucket, Cluster, Contention, Plan, TensorSpec, Workload
    from stretto.sim.engine import Outcome

_INF = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step would do."""

    iteration_s: float

    backward_s: float
    """From the start of backward to the end of the last collective or of backward."""

    exposed_communication_s: float
    """The part of ``backward_s`` in which no computation runs."""

    timeline: Timeline


@dataclass(frozen=True, slots=True)
class _Slice:
    """What the timeline says of a flow beside its times."""

    name: str
    bucket: int
    slice: int
    bytes: int
    tensors: int


def simulate_step(workload: Workload, cluster: Cluster, plan: Plan) -> StepResult:
    """One step of a workload on a cluster under a plan.

    Raises:
        PlanMismatch: the plan is for another workload or another number of ranks.
        SpecError: the plan asks for what the model can't say: overlap ``forward``, or a
            resource that the cluster does not list.
    """
    plan.check_matches(workload)
    if plan.ranks != cluster.ranks:
        raise PlanMismatch(
            f"the plan is for {plan.ranks} ranks, cluster {cluster.name!r} has "
            f"{cluster.ranks}: plan again for this cluster"
        )
    if plan.overlap == "forward":
        raise SpecError(
            "overlap 'forward' can't be simulated yet: use none or backward",
            place=".overlap",
        )
    flows, slices = _flows(workload, cluster, plan)
    rates = flow_rates(cluster)
    link = SharedLink(
        capacity_bytes_per_s=rates.link_bytes_per_s,
        limits_bytes_per_s=rates.limits_bytes_per_s,
    )
    contention = cluster.contention
    outcome = run(
        flows,
        [link],
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


def _flows(
    workload: Workload, cluster: Cluster, plan: Plan
) -> tuple[list[Flow], list[_Slice]]:
    flows: list[Flow] = []
    slices: list[_Slice] = []
    if cluster.ranks == 1:
        return flows, slices
    rates = flow_rates(cluster)
    tensors = {tensor.name: tensor for tensor in workload.tensors}
    ready_work_s = 0.0
    for i, bucket in enumerate(plan.buckets):
        held = [tensors[name] for name in bucket.tensors]
        after_s = max(tensor.ready_s for tensor in held)
        if plan.overlap == "none":
            after_s = workload.backward_s
        ready_work_s = max(ready_work_s, workload.forward_s + after_s)
        cost = collective_cost(cluster, bucket.algorithm)
        load = 0
        caps = (rates.alone_bytes_per_s, rates.alone_bytes_per_s)
        if cluster.contention is not None:
            load = _resource(bucket, i, cluster.contention)
            caps = _curve_caps(cluster.contention, load, rates)
        elements = sum(tensor.bytes // DTYPE_BYTES[tensor.dtype] for tensor in held)
        on_wire = sum(_sent_bytes(tensor, bucket.wire_dtype) for tensor in held)
        bounds = slice_bounds(elements, bucket.slices)
        for j, (begin, end) in enumerate(bounds):
            size_bytes = on_wire * (end - begin) / elements
            part = f" slice {j + 1}/{len(bounds)}" if len(bounds) > 1 else ""
            slices.append(
                _Slice(f"bucket {i}{part}", i, j, round(size_bytes), len(held))
            )
            flows.append(
                Flow(
                    lane=(bucket.lane + j) % plan.lanes,
                    ready_work_s=ready_work_s,
                    startup_s=cost.startup_s + cost.startup_s_per_byte * size_bytes,
                    wire_bytes=cost.wire_factor * size_bytes,
                    cap_bytes_per_s=caps[0],
                    idle_cap_bytes_per_s=caps[1],
                    load=load,
                )
            )
    return flows, slices


def _sent_bytes(tensor: TensorSpec, wire_dtype: str) -> int:
    """Bytes of a gradient on the wire; types that nothing converts keep their own."""
    if tensor.dtype not in WIRE_DTYPES:
        return tensor.bytes
    return tensor.bytes // DTYPE_BYTES[tensor.dtype] * DTYPE_BYTES[wire_dtype]


def _resource(bucket: Bucket, index: int, contention: Contention) -> int:
    if bucket.resource is None:
        return contention.resources[0]
    if bucket.resource not in contention.resources:
        levels = ", ".join(map(str, contention.resources))
        raise SpecError(
            f"resource must be one of the cluster's levels ({levels}), "
            f"got {bucket.resource}",
            place=f".buckets[{index}].resource",
        )
    return bucket.resource


def _curve_caps(
    contention: Contention, resource: int, rates: FlowRates
) -> tuple[float, float]:
    """What a flow reaches at most while computation runs, and after."""
    return (
        min(
            rates.alone_bytes_per_s, curve_bytes_per_s(contention.overlapped, resource)
        ),
        min(rates.alone_bytes_per_s, curve_bytes_per_s(contention.exclusive, resource)),
    )


def _timeline(
    workload: Workload,
    plan: Plan,
    flows: list[Flow],
    slices: list[_Slice],
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
    for i, (flow, part) in enumerate(zip(flows, slices, strict=True)):
        args = {
            "bucket": part.bucket,
            "slice": part.slice,
            "bytes": part.bytes,
            "tensors": part.tensors,
        }
        track = f"lane{flow.lane}"
        ready_s, start_s = outcome.ready_s[i], outcome.start_s[i]
        if start_s > ready_s:
            spans.append(
                Span(
                    track=track,
                    name=f"wait {part.name}",
                    start_s=ready_s,
                    end_s=start_s,
                    args={"kind": "wait", **args},
                )
            )
        spans.append(
            Span(
                track=track,
                name=part.name,
                start_s=start_s,
                end_s=outcome.end_s[i],
                args={"kind": "send", **args},
            )
        )
    return Timeline(
        name=f"{workload.name} under {plan.planner}, predicted", spans=tuple(spans)
    )


@final
class StepModel:
    """The model of `simulate_step`, prepared for searches.

    It knows buckets of neighbouring tensors in the order of readiness, sent as rings in
    the gradients' own type with the default resource, under backward. There all flows
    have one rate at any time, so that it counts, instead of each flow's bytes, those
    that any flow has been served since the beginning; a flow ends when that count has
    grown by its size. Lanes whose queues are equal stay equal and are taken as one.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        rates = flow_rates(cluster)
        cost = collective_cost(cluster)
        tensors = workload.tensors
        self._num_tensors = len(tensors)
        self._silent = cluster.ranks == 1
        self._work_s = workload.forward_s + workload.backward_s
        self._startup_s = cost.startup_s
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
            self._caps = _curve_caps(cluster.contention, self._load, rates)
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
        """`simulate_step`'s ``iteration_s`` for these buckets.

        Bucket ``i`` holds the tensors from ``ends[i - 1]`` (0 for the first) up to, but
        not with, ``ends[i]`` of the workload; ``ends`` ascends to the number of
        tensors. Its first slice is on lane ``bucket_lanes[i]`` of ``lanes``.

        Raises:
            SpecError: the buckets leave out tensors.
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
        if self._contention is not None:
            return self._beside_contention(queues)
        if len(queues) == 1:
            return self._in_turn(*queues[0])
        return self._at_once(queues)

    def _queues(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
    ) -> list[tuple[tuple[tuple[float, float], ...], int]]:
        """Each lane's flows as (ready, bytes), equal lanes once with their number."""
        elements, wire_bytes, ready_s = self._elements, self._wire_bytes, self._ready_s
        queues: list[list[tuple[float, float]]] = [[] for _ in range(lanes)]
        first = 0
        for end, lane, parts in zip(ends, bucket_lanes, slices, strict=True):
            count = elements[end] - elements[first]
            size = wire_bytes[end] - wire_bytes[first]
            first = end
            if not count:
                continue
            at = ready_s[end - 1]
            if parts == 1:
                queues[lane].append((at, size))
                continue
            each, extra = divmod(count, parts)
            flow = (at, size * (each + 1) / count)
            for j in range(lane, lane + extra):
                queues[j % lanes].append(flow)
            if each:
                flow = (at, size * each / count)
                for j in range(lane + extra, lane + parts):
                    queues[j % lanes].append(flow)
        return [
            (queue, number)
            for queue, number in Counter(map(tuple, queues)).items()
            if queue
        ]

    def _extend(self, lanes: int) -> None:
        """Rates and speed for up to ``lanes`` flows at once."""
        contention = self._contention
        while len(self._rate) <= lanes:
            num = len(self._rate)
            rate = self._rates.per_flow_bytes_per_s(num)
            self._rate.append(min(rate, self._caps[0]))
            self._idle_rate.append(min(rate, self._caps[1]))
            self._speed.append(
                compute_rate(contention.compute, num * self._load)
                if contention
                else 1.0
            )

    def _in_turn(self, queue: tuple[tuple[float, float], ...], number: int) -> float:
        """One lane, or several that do the same: flows run one after another."""
        startup_s, rate = self._startup_s, self._rate[number]
        end = 0.0
        for ready_s, size in queue:
            end = (ready_s if ready_s > end else end) + startup_s + size / rate
        return end if end > self._work_s else self._work_s

    def _at_once(
        self, queues: list[tuple[tuple[tuple[float, float], ...], int]]
    ) -> float:
        """Several lanes, computation undisturbed: gradients' times are known."""
        startup_s, rates = self._startup_s, self._rate
        position = [0] * len(queues)
        # When start-ups end, and at which count of served bytes flows do.
        starts = sorted(
            (queue[0][0] + startup_s, c) for c, (queue, _) in enumerate(queues)
        )
        ends: list[tuple[float, int]] = []
        now = served = 0.0
        sending = 0
        while True:
            if ends:
                goal = ends[0][0]
                rate = rates[sending]
                end_at = now + (goal - served) / rate
                if starts and starts[0][0] < end_at:
                    start_at = starts[0][0]
                    served += (start_at - now) * rate
                    now = start_at
                else:
                    served = goal
                    now = end_at
                    c = heappop(ends)[1]
                    queue, number = queues[c]
                    sending -= number
                    if not sending:
                        served = 0.0  # keeps the count exact over a long step
                    position[c] += 1
                    if position[c] < len(queue):
                        ready_s = queue[position[c]][0]
                        if ready_s < now:
                            ready_s = now
                        heappush(starts, (ready_s + startup_s, c))
                    continue
            elif starts:
                now = starts[0][0]
            else:
                break
            c = heappop(starts)[1]
            queue, number = queues[c]
            heappush(ends, (served + queue[position[c]][1], c))
            sending += number
        return now if now > self._work_s else self._work_s

    def _beside_contention(
        self, queues: list[tuple[tuple[tuple[float, float], ...], int]]
    ) -> float:
        """Several lanes, and computation that slows while flows are under way."""
        startup_s, work_s, speeds = self._startup_s, self._work_s, self._speed
        rates = self._rate
        position = [0] * len(queues)
        # Work for which lanes wait, when start-ups end, at which count flows end.
        waiting = sorted((queue[0][0], c) for c, (queue, _) in enumerate(queues))
        starts: list[tuple[float, int]] = []
        ends: list[tuple[float, int]] = []
        now = served = done = 0.0
        sending = active = 0
        working = True
        while working or starts or ends:
            next_at, event = _INF, 0
            if ends:
                next_at, event = now + (ends[0][0] - served) / rates[sending], 1
            if starts and starts[0][0] < next_at:
                next_at, event = starts[0][0], 2
            if working:
                speed = speeds[active]
                target = waiting[0][0] if waiting else work_s
                if target > work_s:
                    target = work_s
                work_at = now + (target - done) / speed
                if work_at < next_at:
                    next_at, event = work_at, 3
                    done = target
                else:
                    done += (next_at - now) * speed
            if sending:
                served += (next_at - now) * rates[sending]
            now = next_at
            if event == 1:
                served, c = heappop(ends)
                queue, number = queues[c]
                sending -= number
                active -= number
                if not sending:
                    served = 0.0
                position[c] += 1
                if position[c] < len(queue):
                    heappush(waiting, (queue[position[c]][0], c))
            elif event == 2:
                c = heappop(starts)[1]
                queue, number = queues[c]
                heappush(ends, (served + queue[position[c]][1], c))
                sending += number
            elif done >= work_s:
                working = False
                rates = self._idle_rate
            while waiting and (not working or waiting[0][0] <= done):
                c = heappop(waiting)[1]
                active += queues[c][1]
                heappush(starts, (now + startup_s, c))
        return now
