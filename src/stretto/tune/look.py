"""The first look at a job: its steps profiled, its network probed, a plan made."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

from stretto import planners
from stretto.cost.fit import fit_cluster
from stretto.errors import Infeasible, NoisyProfile, SpecError
from stretto.measure import count_hosts, probe_network
from stretto.schema import Cluster, Plan, Workload, codec
from stretto.tune.profiling import DeferredProfile

if TYPE_CHECKING:
    from stretto.runtime import DistributedDataParallel
    from stretto.tune.board import Board

WARMUP_STEPS = 2
PROFILE_STEPS = 6
MAX_SPREAD_RATIO = 0.35
"""A backward whose quartiles lie further apart, as a share of its median, is profiled
again over twice as many steps."""

PROBE_STEPS = 2
"""The network is probed for at most the time of so many steps. More made no better
plans: what a short probe gets wrong, trials correct."""

MOST_PROBE_S = 20.0

LEAST_PROBE_S = 0.2
"""Less says nothing; a training of such short steps is over soon or has many."""

PROBE_AGAIN = 3
"""A probe that fits no network, or for which the time did not suffice, is made once
more, so many times as long, then once more."""

CONTENTION_FROM_S = 3.0
"""From this budget on, computation beside communication is measured as well."""

PROBE_SIZES_BYTES = (2**14, 2**16, 2**18, 2**20, 2**22)
PROBE_LANES = (1, 2, 4, 8)


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


@final
class Look:
    """Profiles training steps, then probes and plans.

    Steps 1 and 2 warm up, 3 to 8 are profiled with communication put off until
    backward has ended; every step trains. Where these were unsteady, 16 more are
    profiled. Then the network is probed, for about the time of 2 steps.
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
        self._wanted = WARMUP_STEPS + PROFILE_STEPS
        self._unsteady = False
        self._profile = DeferredProfile(model)

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
        self._profile.stop()
        try:
            workload = self._profile.workload(
                name=self._name,
                warmup=WARMUP_STEPS,
                max_spread_ratio=math.inf if self._unsteady else MAX_SPREAD_RATIO,
            )
        except NoisyProfile:
            if self._unsteady:
                raise
            # Another, longer look. If it is no steadier it is planned with all the
            # same: the prediction is rough then, the plan's shape rarely wrong.
            self._unsteady = True
            self._wanted *= 2
            self._profile = DeferredProfile(self._model)
            self._profile.start()
            return self.before_forward(reduces=reduces)
        return self._plan(workload)

    def abandon(self) -> None:
        """Ends the look without a result."""
        self._profile.stop()

    def _plan(self, workload: Workload) -> Seen:
        group = self._model.process_group
        gaps_s = [b - a for a, b in zip(self._began_s, self._began_s[1:], strict=False)]
        budget_s = PROBE_STEPS * statistics.median(gaps_s)
        budget_s = min(max(budget_s, LEAST_PROBE_S), MOST_PROBE_S)
        # Rank 0's budget decides the shape of the probe, so all ranks must have it.
        budget_s = self._board.shared(budget_s)
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
                    budget_s=times * budget_s,
                    contention=times * budget_s >= CONTENTION_FROM_S,
                )
            except SpecError as exc:  # on all ranks alike: the budget is too short
                decided = exc
                continue
            if self._board.rank == 0:
                decided = self._plan_on_rank_0(workload, samples, hosts)
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
        )

    def _plan_on_rank_0(self, workload: Workload, samples: Any, hosts: int) -> Any:
        """What is broadcast: encoded cluster and plans, or the error for all ranks."""
        try:
            cluster = fit_cluster(
                samples.collectives,
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
