"""The first look at a job: its steps profiled, its network probed, a plan made."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

from stretto import planners
from stretto.cost.fit import fit_cluster
from stretto.errors import Infeasible, NoisyProfile, SpecError
from stretto.measure import NetworkSamples, count_hosts, probe_network
from stretto.schema import Cluster, CollectiveSample, Plan, Workload, codec
from stretto.tune.profiling import DEFERRED_LANES, DeferredProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.runtime import DistributedDataParallel
    from stretto.tune.board import Board

WARMUP_STEPS = 2
PROFILE_LANES = (4, 4, 4, 2)
"""Lanes on which the profiled steps send their gradients: together they are a probe of
the network with messages as large as the model's. The step after a change has a longer
backward and does not count for the workload, so there are few."""

MORE_LANES = (8, 8)
"""Further steps, on more lanes ..."""

LANES_HELP_RATIO = 1.8
"""... where twice the lanes were at least this much faster: then the link is not full.
Where it is, opening more would cost time and tell nothing."""

MAX_SPREAD_RATIO = 0.35
"""A backward whose quartiles lie further apart, as a share of its median, is profiled
again over twice as many steps ..."""

MATTERS_RATIO = 0.15
"""... if that is more than this share of a step."""

PROBE_STEPS = 1
"""Small messages are probed for at most the time of so many steps."""

WHOLE_PROBE_STEPS = 3
"""Where profiled steps say nothing of the network, it is probed for so many."""

MOST_PROBE_S = 20.0

LEAST_PROBE_S = 0.25
"""Less says nothing; a training of such short steps is over soon or has many."""

PROBE_AGAIN = 3
"""A probe that fits no network, or for which the time did not suffice, is made once
more, so many times as long, then once more."""

CONTENTION_FROM_S = 3.0
"""From this budget on, computation beside communication is measured as well."""

LEAST_BULK_BYTES = 2**21
"""Gradients of less say little of a rate, shapers and socket buffers let them pass ...
"""

LEAST_BULK_S = 0.05
"""... unless they took so long all the same."""

SMALL_POINTS = (
    (2**14, 1),
    (2**18, 1),
    (2**14, 4),
    (2**20, 1),
    (2**16, 1),
)
"""Sizes and lanes, what matters most first: start-ups alone and beside others, and what
one flow reaches. What does not fit into the time is left out."""

PROBE_SIZES_BYTES = (2**14, 2**16, 2**18, 2**20, 2**22)
PROBE_LANES = (1, 2, 4, 8)
PROBE_REPETITIONS = 3

_GROWTH = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a look found; equal on all ranks."""

    workload: Workload

    cluster: Cluster

    plan: Plan
    """The planner's best."""

    ddp: Plan
    """DDP's rule with its default buckets, under the same model."""

    probe_s: float
    """How long training stood still for the probe."""

    deferred_s: float | None = None
    """Median step of the profiled steps, communication after backward included."""


@final
class Look:
    """Profiles training steps, then probes and plans.

    Steps 1 and 2 warm up, 3 to 6 are profiled with communication put off until
    backward has ended, two more where the link was not full by then; every step trains.
    What they send over different numbers of lanes is a probe of the network with large
    messages; small ones are then probed for about the time of one step. Where backward
    was unsteady, twice as many are profiled again.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        board: Board,
        *,
        name: str,
        planner: str,
        wire_dtype: str | None,
    ) -> None:
        self._model = model
        self._board = board
        self._name = name
        self._planner = planner
        self._wire_dtype = wire_dtype
        self._began_s: list[float] = []
        self._wanted = WARMUP_STEPS + len(PROFILE_LANES)
        self._unsteady = self._extended = False
        self._bulk: tuple[CollectiveSample, ...] = ()
        self._profile = DeferredProfile(
            model, lanes=(PROFILE_LANES[0],) * WARMUP_STEPS + PROFILE_LANES
        )

    def start(self) -> None:
        """Begins with the next step; collective.

        Raises:
            PlanMismatch: this model's communication can't be put off.
            SpecError: the same.
        """
        self._profile.start()

    def before_forward(self, *, reduces: bool) -> Seen | None:
        """To be called before every forward; what was found, when the look is over.

        Raises:
            Infeasible: no plan or no model of the network could be made.
            NoisyProfile: the network's times contradict each other.
            SpecError: the same.
        """
        self._profile.before_forward(reduces=reduces)
        if self._profile.steps < self._wanted:
            self._began_s.append(perf_counter())
            return None
        if not self._unsteady:
            self._bulk = self._profile.collectives(warmup=WARMUP_STEPS)
            if not self._extended and more_lanes_help(self._bulk):
                self._extended = True
                self._wanted += len(MORE_LANES)
                self._profile.extend(MORE_LANES)
                self._began_s.append(perf_counter())
                return None
        self._profile.stop()
        workload = self._profile.workload(
            name=self._name, warmup=WARMUP_STEPS, max_spread_ratio=math.inf
        )
        gaps_s = [b - a for a, b in zip(self._began_s, self._began_s[1:], strict=False)]
        (step_s,) = self._board.most(statistics.median(gaps_s))
        spread_s = workload.provenance["backward_spread_s"]
        if not self._unsteady and spread_s > max(
            MAX_SPREAD_RATIO * workload.backward_s, MATTERS_RATIO * step_s
        ):
            # Another, longer look. If it is no steadier it is planned with all the
            # same: the prediction is rough then, the plan's shape rarely wrong.
            self._unsteady = True
            self._wanted *= 2
            self._profile = DeferredProfile(self._model)
            self._profile.start()
            return self.before_forward(reduces=reduces)
        return self._plan(workload, step_s)

    def abandon(self) -> None:
        """Ends the look without a result."""
        self._profile.stop()

    def _plan(self, workload: Workload, step_s: float) -> Seen:
        """``step_s``, a step with its communication, is equal on all ranks."""
        group = self._model.process_group
        bulk = [sample for sample in self._bulk if tells_a_rate(sample)]
        steps = PROBE_STEPS if bulk else WHOLE_PROBE_STEPS
        budget_s = min(max(steps * step_s, LEAST_PROBE_S), MOST_PROBE_S)
        hosts = count_hosts(group)
        begin_s = perf_counter()
        decided: Any = None
        for times in (1, PROBE_AGAIN, PROBE_AGAIN**2):
            # What a short probe finds contradictory a longer one mostly settles.
            try:
                samples = probe_network(
                    group=group,
                    lane_group=self._model.lane,
                    sizes_bytes=PROBE_SIZES_BYTES,
                    lanes=PROBE_LANES,
                    points=SMALL_POINTS if bulk else None,
                    repetitions=PROBE_REPETITIONS,
                    budget_s=times * budget_s,
                    contention=times * budget_s >= CONTENTION_FROM_S,
                )
            except SpecError as exc:  # on all ranks alike: the budget is too short
                decided = exc
                continue
            if self._board.rank == 0:
                decided = self._plan_on_rank_0(workload, samples, bulk, hosts)
            decided = self._board.shared(decided)
            if not isinstance(decided, NoisyProfile | Infeasible):
                break
        probe_s = perf_counter() - begin_s
        if isinstance(decided, Exception):
            raise decided
        assert decided is not None  # noqa: S101 - rank 0 always decides
        cluster, plan, ddp = decided
        return Seen(
            workload=workload,
            cluster=codec.decode(cluster, Cluster),
            plan=codec.decode(plan, Plan),
            ddp=codec.decode(ddp, Plan),
            probe_s=probe_s,
            deferred_s=step_s if self._median_is_of_first_lanes else None,
        )

    @property
    def _median_is_of_first_lanes(self) -> bool:
        """Whether most steps ran on the lanes of a plain deferred plan."""
        return not self._extended and PROFILE_LANES[0] == DEFERRED_LANES

    def _plan_on_rank_0(
        self,
        workload: Workload,
        samples: NetworkSamples,
        bulk: Sequence[CollectiveSample],
        hosts: int,
    ) -> Any:
        """What is broadcast: encoded cluster and plans, or the error for all ranks."""
        try:
            cluster = fit_cluster(
                [*plausible(samples.collectives), *bulk],
                name=self._name,
                hosts=hosts,
                ranks_per_host=self._board.size // hosts,
                contention_samples=samples.contention,
                provenance=samples.provenance,
            )
            plan = planners.plan_with_wire(
                workload, cluster, self._planner, wire_dtype=self._wire_dtype
            )
            ddp = planners.get("ddp").plan(workload, cluster)
        except (Infeasible, NoisyProfile, SpecError) as exc:
            return exc
        return codec.encode(cluster), codec.encode(plan), codec.encode(ddp)


def tells_a_rate(sample: CollectiveSample) -> bool:
    """Whether what a network lets pass at once is little of a sample."""
    size_bytes = sample.size_bytes * sample.lanes
    return size_bytes >= LEAST_BULK_BYTES or sample.duration_s >= LEAST_BULK_S


def more_lanes_help(samples: Sequence[CollectiveSample]) -> bool:
    """Whether the largest number of lanes left the link unfilled.

    Every sample carries the same bytes in all, in equal parts on its lanes.
    """
    time_s = {sample.lanes: sample.duration_s for sample in samples}
    most = max(time_s, default=0)
    half_s = time_s.get(most // 2)
    return half_s is not None and half_s >= LANES_HELP_RATIO * time_s[most]


def plausible(samples: Sequence[CollectiveSample]) -> list[CollectiveSample]:
    """Samples of a short probe without what noise makes impossible.

    A larger message, or the same one on more lanes, never takes less: where it seemed
    to, it was the smaller that something disturbed, or chance.
    """
    found: dict[tuple[int, int], CollectiveSample] = {}
    for sample in sorted(samples, key=lambda s: (s.lanes, s.size_bytes)):
        smaller_s = [
            other.duration_s
            for other in found.values()
            if other.lanes <= sample.lanes and other.size_bytes <= sample.size_bytes
        ]
        least_s = (1 + _GROWTH) * max(smaller_s, default=0.0)
        found[sample.lanes, sample.size_bytes] = replace(
            sample, duration_s=max(sample.duration_s, least_s)
        )
    return list(found.values())
