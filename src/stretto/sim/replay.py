"""Simulate one plan's step under many models of the network and of computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.cost import collective_cost, compute_rate, flow_rates
from stretto.errors import SpecError
from stretto.sim._queues import at_once, beside_contention, in_turn
from stretto.sim.flows import curve_caps, plan_flows, resource_of

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim._queues import Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTimes:
    """Times of `stretto.sim.simulate_step` for a backward, from its start."""

    end_s: float
    """When computation and communication have ended."""

    computed_s: float
    """When computation has ended."""

    bucket_ends_s: tuple[float, ...]
    """When each bucket's last slice has ended; empty if a bucket sends nothing."""


@final
class PlanModel:
    """The model of `stretto.sim.simulate_step` for one plan on varying networks.

    It is prepared for searches and builds no timelines or values. The plan's buckets
    are rings, all with one resource, and it overlaps backward at most (`knows`).
    """

    def __init__(self, workload: Workload, cluster: Cluster, plan: Plan) -> None:
        """Prepare a plan for this workload and for the ranks of ``cluster``.

        Raises:
            SpecError: `knows` does not support the plan, or a resource is unknown.
        """
        if not self.knows(plan):
            raise SpecError(
                "a plan whose buckets differ in algorithm or resource, or that "
                f"overlaps forward, cannot be replayed: simulate it ({plan.planner})"
            )
        self._resource = next((b.resource for b in plan.buckets), None)
        self._lanes = plan.lanes
        self._work_s = workload.backward_s
        self._buckets = len(plan.buckets)
        flows, slices = plan_flows(workload, cluster, plan, origin_s=0.0)
        lanes: list[list[tuple[float, float, float]]] = [[] for _ in range(plan.lanes)]
        holds: list[list[int]] = [[] for _ in range(plan.lanes)]
        for flow, part in zip(flows, slices, strict=True):
            lanes[flow.lane].append((flow.ready_work_s, flow.wire_bytes, 0.0))
            holds[flow.lane].append(part.bucket)
        alike: dict[tuple[tuple[float, float, float], ...], list[int]] = {}
        for lane, queue in enumerate(lanes):
            if queue:
                alike.setdefault(tuple(queue), []).append(lane)
        # Lanes whose queues are equal stay equal and are taken as one.
        self._queues: list[Queue] = [(q, len(same)) for q, same in alike.items()]
        # Buckets whose slices a queue's flows are, flow by flow.
        self._held = [
            [tuple({holds[lane][i] for lane in same}) for i in range(len(queue))]
            for queue, same in alike.items()
        ]
        sent = {bucket for queue in holds for bucket in queue}
        self._all_sent = len(sent) == self._buckets

    @staticmethod
    def knows(plan: Plan) -> bool:
        """Return whether a plan is supported."""
        return (
            plan.overlap != "forward"
            and all(bucket.algorithm == "ring" for bucket in plan.buckets)
            and len({bucket.resource for bucket in plan.buckets}) <= 1
        )

    def times(self, cluster: Cluster, *, pace: float = 1.0) -> BackwardTimes:
        """Return the times of a backward on another cluster of as many ranks.

        Its computation takes ``pace`` times as long.

        Raises:
            SpecError: that cluster does not list the plan's resource.
        """
        queues = self._queues
        if not queues:
            end_s = self._work_s * pace
            return BackwardTimes(end_s=end_s, computed_s=end_s, bucket_ends_s=())
        flow, contention = flow_rates(cluster), cluster.contention
        # In units of backward's pace, so that the prepared times still hold.
        cost = collective_cost(cluster, lanes=self._lanes)
        startup = cost.startup_s / pace
        if cost.extra:
            factor = cost.wire_factor
            queues = [
                (
                    [
                        (at, size, cost.extra_s(size / factor) / pace)
                        for at, size, _ in queue
                    ],
                    number,
                )
                for queue, number in queues
            ]
        numbers = range(1, self._lanes + 1)
        rates = [0.0, *(flow.per_flow_bytes_per_s(k) * pace for k in numbers)]
        ended: list[list[float]] = [[] for _ in queues]
        computed = self._work_s
        if contention is not None:
            load = resource_of(self._resource, contention)
            cap, idle_cap = curve_caps(contention, load, flow)
            speeds = [compute_rate(contention.compute, k * load) for k in numbers]
            _, computed = beside_contention(
                queues,
                startup,
                [min(rate, cap * pace) for rate in rates],
                [min(rate, idle_cap * pace) for rate in rates],
                [1.0, *speeds],
                computed,
                ended,
            )
        elif len(queues) == 1:
            in_turn(queues[0], startup, rates, ended[0])
        else:
            at_once(queues, startup, rates, ended)
        ends = [0.0] * self._buckets
        for times, held in zip(ended, self._held, strict=True):
            for at, buckets in zip(times, held, strict=True):
                for bucket in buckets:
                    if at > ends[bucket]:
                        ends[bucket] = at
        return BackwardTimes(
            end_s=pace * max(computed, *ends),
            computed_s=pace * computed,
            bucket_ends_s=tuple(pace * at for at in ends) if self._all_sent else (),
        )
