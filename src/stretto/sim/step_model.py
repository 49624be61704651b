"""The step of `simulate_step` for searches: one fast model of all that they vary.

Planners evaluate thousands of drafts with one `StepModel`; the tuner replays plans
under many networks. The event engine (`stretto.sim.engine`) is the reference: tests
compare each with the other. A draft's buckets become queues of flows here, a cluster's
figures become tables in `stretto.sim.network`, and `stretto.sim.lanes` runs the queues.
"""

from __future__ import annotations

from itertools import accumulate, repeat
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError
from stretto.schema.rules import DTYPE_BYTES
from stretto.sim.gated_lanes import GatedQueue, period_s
from stretto.sim.lanes import run_lanes
from stretto.sim.network import Network
from stretto.sim.replay import BackwardTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.cost import CollectiveCost
    from stretto.schema import Cluster, Workload
    from stretto.sim.lanes import LaneFlow, Queue
    from stretto.sim.replay import PreparedPlan

SEARCHED = ("none", "backward", "forward")
"""The overlaps that drafts may have."""


@final
class _Kind(dict[tuple[int, int, int], tuple[int, ...]]):
    """Numbers of the flows of buckets with one cost and level, by their tensors.

    A key is (first tensor, end, slices); a value has one number per slice.
    """

    __slots__ = ("cost", "level")

    def __init__(self, cost: CollectiveCost, level: int) -> None:
        super().__init__()
        self.cost = cost
        self.level = level


@final
class StepModel:
    """The model of `simulate_step`, prepared for one workload and cluster.

    It supports buckets of neighboring tensors in the order of readiness, in the
    gradients' own type, each with its own lane, slices, resource and algorithm, after
    backward, during it, or into the next forward in any launch order.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        tensors = workload.tensors
        self._num_tensors = len(tensors)
        self._forward_s = workload.forward_s
        self._backward_s = workload.backward_s
        self._ready_s = [tensor.ready_s for tensor in tensors]
        self._needed_s = [tensor.needed_s for tensor in tensors]
        self._bytes = list(accumulate((t.bytes for t in tensors), initial=0))
        self._elements = list(
            accumulate((t.bytes // DTYPE_BYTES[t.dtype] for t in tensors), initial=0)
        )
        self._connect(cluster, 1.0)

    def on(self, cluster: Cluster, *, pace: float = 1.0) -> StepModel:
        """Return the model of the same workload on another cluster.

        Its backward takes ``pace`` times as long as the workload's.
        """
        # fast: a correction does this for every network; copy() takes far longer.
        other = StepModel.__new__(StepModel)
        other.__dict__.update(self.__dict__)
        other._connect(cluster, pace)  # noqa: SLF001
        return other

    def _connect(self, cluster: Cluster, pace: float) -> None:
        self._network = Network(cluster)
        self._silent = cluster.ranks == 1
        self._pace = pace
        self._work_s = self._forward_s + self._backward_s * pace
        # Every flow so far, and its number.
        self._flows: list[LaneFlow] = []
        self._number_of: dict[LaneFlow, int] = {}
        self._kinds: dict[tuple[int | None, str, int], _Kind] = {}
        self._kind_of_cost: dict[tuple[str, int, float], _Kind] = {}

    # drafts

    def iteration_s(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
        resources: Sequence[int | None] = (),
        algorithms: Sequence[str] = (),
        overlap: str = "backward",
        launch: Sequence[int] = (),
    ) -> float:
        """Return `simulate_step`'s ``iteration_s`` for these buckets.

        Args:
            ends: bucket ``i`` holds the tensors from ``ends[i - 1]`` (0 for the first)
                up to, but excluding, ``ends[i]``; they ascend to the number of tensors.
            lanes: their number.
            bucket_lanes: the lane of each bucket's first slice.
            slices: each bucket's number of slices.
            resources: of each bucket; empty: the default for all.
            algorithms: of each bucket; empty: rings.
            overlap: ``none``, ``backward`` or ``forward``.
            launch: with overlap ``forward``, the order in which buckets launch; empty:
                as listed.

        Raises:
            SpecError: the buckets omit tensors, the cluster lacks a resource, or the
                overlap is another one.
        """
        if overlap not in SEARCHED:
            raise SpecError(
                f"overlap must be one of {', '.join(SEARCHED)}, got {overlap!r}",
                place=".overlap",
            )
        if not ends or ends[-1] != self._num_tensors:
            raise SpecError(
                f"ends must end with the number of tensors ({self._num_tensors}), got "
                f"{list(ends)[-1:]}",
                place=".ends",
            )
        if self._silent:
            return self._work_s
        kinds = self._chosen(len(ends), lanes, resources, algorithms)
        if overlap == "forward":
            return self._period_s(ends, lanes, bucket_lanes, slices, kinds, launch)
        queues = self._queues(ends, lanes, bucket_lanes, slices, kinds)
        if overlap == "none":
            work_s = self._work_s
            queues = [
                ([(work_s, start, size, at) for _, start, size, at in flows], number)
                for flows, number in queues
            ]
        levels = {kind.level for kind in kinds} if resources else {0}
        level = levels.pop() if len(levels) == 1 else None
        return run_lanes(queues, self._network, self._work_s, lanes=lanes, level=level)[
            0
        ]

    def caps(self, resource: int | None) -> tuple[float, float]:
        """Return a lone flow's highest rate with a resource, during work and after."""
        return self._network.caps[self._network.level_of(resource)]

    def linear_cost(
        self, num_flows: int, resource: int | None, algorithm: str, *, working: bool
    ) -> tuple[float, float]:
        """Return start-up and seconds per byte of a bucket in equal slices.

        Each slice has its own lane; computation runs all the time or not at all.
        """
        if self._silent:
            return 0.0, 0.0
        network = self._network
        cost, level = network.cost(algorithm, num_flows), network.level_of(resource)
        figures = network.at(level, num_flows)
        rate = (figures.rates if working else figures.idle_rates)[num_flows]
        s_per_byte = cost.startup_s_per_byte + cost.wire_factor / (num_flows * rate)
        return cost.startup_s, s_per_byte

    def _chosen(
        self,
        buckets: int,
        lanes: int,
        resources: Sequence[int | None],
        algorithms: Sequence[str],
    ) -> list[_Kind]:
        """Return each bucket's kind."""
        if not resources and not algorithms:
            return [self._kind(None, "ring", lanes)] * buckets
        return [
            self._kind(resource, algorithm, lanes)
            for resource, algorithm in zip(
                resources or repeat(None, buckets),
                algorithms or repeat("ring", buckets),
                strict=True,
            )
        ]

    def _kind(self, resource: int | None, algorithm: str, lanes: int) -> _Kind:
        kind = self._kinds.get((resource, algorithm, lanes))
        if kind is None:
            cost = self._network.cost(algorithm, lanes)
            level = self._network.level_of(resource)
            # Numbers of lanes with one start-up share flows.
            key = (algorithm, level, cost.startup_s)
            kind = self._kind_of_cost.setdefault(key, _Kind(cost, level))
            self._kinds[resource, algorithm, lanes] = kind
        return kind

    def _queues(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
        kinds: Sequence[_Kind],
    ) -> list[Queue]:
        """Return each lane's flows, equal lanes once with their number."""
        queues: list[list[int]] = [[] for _ in range(lanes)]
        first = 0
        for end, lane, parts, kind in zip(
            ends, bucket_lanes, slices, kinds, strict=True
        ):
            numbers = kind.get((first, end, parts))
            if numbers is None:
                numbers = self._numbered(kind, first, end, parts)
            first = end
            for number in numbers:
                if lane >= lanes:
                    lane %= lanes
                queues[lane].append(number)
                lane += 1
        # fast: numbers of flows are hashed in half of the time that their floats take.
        same: dict[tuple[int, ...], int] = {}
        for queue in queues:
            if queue:
                key = tuple(queue)
                same[key] = same.get(key, 0) + 1
        flows = self._flows
        return [([flows[i] for i in key], number) for key, number in same.items()]

    def _numbered(
        self, kind: _Kind, first: int, end: int, parts: int
    ) -> tuple[int, ...]:
        """Return the numbers of a bucket's flows by slice; equal flows share one."""
        cost = kind.cost
        count = self._elements[end] - self._elements[first]
        factor = cost.wire_factor
        size = factor * self._bytes[end] - factor * self._bytes[first]
        numbers: list[int] = []
        if count:
            ready_s = self._forward_s + self._pace * self._ready_s[end - 1]
            each, extra = divmod(count, parts)
            for share, times in ((each + 1, extra), (each, parts - extra)):
                if share and times:
                    part = size * share / count
                    startup_s = cost.startup_of(part / factor)
                    flow = (ready_s, startup_s, part, kind.level)
                    number = self._number_of.setdefault(flow, len(self._flows))
                    if number == len(self._flows):
                        self._flows.append(flow)
                    numbers += [number] * times
        found = kind[first, end, parts] = tuple(numbers)
        return found

    def _period_s(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
        kinds: Sequence[_Kind],
        launch: Sequence[int],
    ) -> float:
        """Return the step with overlap ``forward``, as `stretto.sim.forward` does."""
        flows, needed_s = self._flows, self._needed_s
        # What each lane sends: numbers of flows and their buckets.
        queues: list[list[tuple[int, int]]] = [[] for _ in range(lanes)]
        ready_s = 0.0
        launched_s = [0.0] * len(ends)
        for bucket in launch or range(len(ends)):
            first = ends[bucket - 1] if bucket else 0
            end, parts, kind = ends[bucket], slices[bucket], kinds[bucket]
            numbers = kind.get((first, end, parts))
            if numbers is None:
                numbers = self._numbered(kind, first, end, parts)
            ready_s = max(ready_s, self._pace * self._ready_s[end - 1])
            launched_s[bucket] = ready_s
            for lane, number in enumerate(numbers, start=bucket_lanes[bucket]):
                queues[lane % lanes].append((number, bucket))
        same: dict[tuple[tuple[int, int], ...], int] = {}
        for queue in queues:
            if queue:
                key = tuple(queue)
                same[key] = same.get(key, 0) + 1
        bucket_needed_s = [
            min(needed_s[first:end], default=0.0)
            for first, end in zip((0, *ends), ends, strict=False)
        ]
        return period_s(
            [
                GatedQueue(
                    [(launched_s[bucket], *flows[k][1:]) for k, bucket in key],
                    [bucket_needed_s[bucket] for _, bucket in key],
                    number,
                )
                for key, number in same.items()
            ],
            self._network,
            lanes=lanes,
            backward_s=self._backward_s * self._pace,
            forward_s=self._forward_s,
        )

    # plans

    def times(self, plan: PreparedPlan) -> BackwardTimes:
        """Return the times of a backward under a plan of `stretto.sim.replay.prepared`.

        The plan may have the workload's tensors in any order and in narrower types.

        Raises:
            SpecError: the cluster lacks the plan's resource.
        """
        work_s = self._backward_s * self._pace
        network, pace = self._network, self._pace
        if not plan.contents:
            return BackwardTimes(end_s=work_s, computed_s=work_s, bucket_ends_s=())
        cost, level = network.cost("ring", plan.lanes), network.level_of(plan.resource)
        startup_s, factor = cost.startup_s, cost.wire_factor
        queues: list[Queue] = []
        for content in plan.contents:
            flows = [
                (pace * at_s, startup_s, size, level) for at_s, size in content.flows
            ]
            if cost.extra:
                flows = [
                    (at_s, cost.startup_of(size / factor), size, level)
                    for at_s, _, size, level in flows
                ]
            queues.append((flows, content.number))
        ended: list[list[float]] = [[] for _ in queues]
        end_s, computed_s = run_lanes(
            queues, network, work_s, lanes=plan.lanes, level=level, ended_s=ended
        )
        ends = [0.0] * plan.num_buckets
        for times, content in zip(ended, plan.contents, strict=True):
            for at_s, buckets in zip(times, content.buckets, strict=True):
                for bucket in buckets:
                    if at_s > ends[bucket]:
                        ends[bucket] = at_s
        return BackwardTimes(
            end_s=end_s,
            computed_s=computed_s,
            bucket_ends_s=tuple(ends) if plan.all_sent else (),
        )
