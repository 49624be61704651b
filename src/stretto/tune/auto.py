"""``plan="auto"``: measure in the first steps, plan, apply, and say so in one line."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from stretto import planners
from stretto.cost.fit import fit_cluster
from stretto.errors import Infeasible, NoisyProfile, PlanMismatch, SpecError
from stretto.measure import count_hosts, probe_network
from stretto.schema import Cluster, Plan, Workload, codec
from stretto.tune.profiling import DeferredProfile
from stretto.units import format_s

if TYPE_CHECKING:
    from stretto.runtime import DistributedDataParallel

_log = logging.getLogger(__name__)

WARMUP_STEPS = 2
PROFILE_STEPS = 6
MAX_SPREAD_RATIO = 0.35
"""A backward whose quartiles lie further apart, as a share of its median, is profiled
again over twice as many steps."""

PROBE_STEPS = 20
"""The network is probed for at most the time of so many steps."""

MOST_PROBE_S = 30.0

CONTENTION_FROM_S = 3.0
"""From this budget on, computation beside communication is measured as well."""

LEAST_GAIN_RATIO = 0.02
"""A plan predicted to save less than this leaves DDP as it is."""

PROBE_SIZES_BYTES = (2**14, 2**17, 2**20, 2**22)
PROBE_LANES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What was measured and decided; equal on all ranks."""

    workload: Workload

    cluster: Cluster

    plan: Plan
    """The best plan found, carried out where ``applied``."""

    ddp: Plan
    """DDP's rule with its default buckets, predicted under the same model."""

    @property
    def applied(self) -> bool:
        """Whether the plan saves enough to be carried out instead of DDP's rule."""
        return self.saved_ratio >= LEAST_GAIN_RATIO

    @property
    def carried_out(self) -> Plan:
        """What the steps that follow do: the plan, or DDP's buckets on one lane.

        These go through the runtime too, so that a rank that is lost is named.
        """
        return self.plan if self.applied else self.ddp

    @property
    def saved_ratio(self) -> float:
        """Share of DDP's predicted step that the plan saves."""
        ours, theirs = self.plan.predicted, self.ddp.predicted
        if ours is None or theirs is None or theirs.iteration_s == 0:
            return 0.0
        return 1 - ours.iteration_s / theirs.iteration_s


OnSettled = Callable[[Settled], None]


@final
class AutoPlan:
    """Drives one model from its first step to a plan.

    Steps 1 and 2 warm up, 3 to 8 are profiled with communication put off until
    backward has ended; then the network is probed, for at most the time of 20 steps,
    and the plan is applied. Where these steps were unsteady, 16 more are profiled
    first. Every step trains. Where measuring fails, training goes on as DDP does it
    and one warning says why.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        name: str = "model",
        planner: str = "joint",
        wire_dtype: str | None = None,
        on_settled: OnSettled | None = None,
    ) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._name = name
        self._planner = planner
        self._on_settled = on_settled
        self._profile: DeferredProfile | None = None
        self._began_s: list[float] = []
        self._wanted = WARMUP_STEPS + PROFILE_STEPS
        self._unsteady = False
        self.settled = False
        """Whether there is nothing left to do."""

    def before_forward(self, *, reduces: bool) -> None:
        """To be called before every forward of the training, on every rank alike.

        ``reduces`` is whether the backward that follows communicates.
        """
        profile = self._profile or self._start()
        if profile is None:
            return
        profile.before_forward(reduces=reduces)
        if profile.steps < self._wanted:
            self._began_s.append(perf_counter())
            return
        self._settle(profile)

    def _start(self) -> DeferredProfile | None:
        profile = DeferredProfile(self._model)
        try:
            profile.start()
        except (PlanMismatch, SpecError) as exc:
            self._give_up(exc)
            return None
        self._profile = profile
        return profile

    def _settle(self, profile: DeferredProfile) -> None:
        profile.stop()
        try:
            settled = self._decide(profile)
        except NoisyProfile as exc:
            if not self._unsteady:
                # Another, longer look. If it is no steadier it is planned with all the
                # same: the prediction is rough then, the plan's shape rarely wrong.
                self._unsteady = True
                self._wanted *= 2
                self._profile = None
                self.before_forward(reduces=True)
                return
            self._give_up(exc)
        except (Infeasible, SpecError) as exc:
            self._give_up(exc)
        else:
            self._apply(settled)

    def _give_up(self, reason: Exception) -> None:
        self.settled = True
        self._model.apply_plan(None)
        if self._rank == 0:
            _log.warning("no plan could be made, DDP's own rule stays: %s", reason)

    def _apply(self, settled: Settled) -> None:
        self.settled = True
        self._model.apply_plan(settled.carried_out)
        if self._rank == 0:
            _log.info("%s", summary(settled))
        if self._on_settled is not None:
            self._on_settled(settled)

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._model.process_group)

    def _decide(self, profile: DeferredProfile) -> Settled:
        workload = profile.workload(
            name=self._name,
            warmup=WARMUP_STEPS,
            max_spread_ratio=math.inf if self._unsteady else MAX_SPREAD_RATIO,
        )
        group = self._model.process_group
        gaps_s = [b - a for a, b in zip(self._began_s, self._began_s[1:], strict=False)]
        budget_s = min(PROBE_STEPS * statistics.median(gaps_s), MOST_PROBE_S)
        # Rank 0's budget decides the shape of the probe, so all ranks must have it.
        shared: list[Any] = [budget_s]
        dist.broadcast_object_list(shared, group=group, group_src=0)
        budget_s = shared[0]
        hosts = count_hosts(group)
        samples = probe_network(
            group=group,
            lane_group=self._model.lane,
            sizes_bytes=PROBE_SIZES_BYTES,
            lanes=PROBE_LANES,
            budget_s=budget_s,
            contention=budget_s >= CONTENTION_FROM_S,
        )
        decided: list[Any] = [None]
        if self._rank == 0:
            decided = [self._plan_on_rank_0(workload, samples, hosts)]
        dist.broadcast_object_list(decided, group=group, group_src=0)
        if isinstance(decided[0], Exception):
            raise decided[0]
        cluster, plan, ddp = decided[0]
        return Settled(
            workload=workload,
            cluster=codec.decode(cluster, Cluster),
            plan=codec.decode(plan, Plan),
            ddp=codec.decode(ddp, Plan),
        )

    def _plan_on_rank_0(self, workload: Workload, samples: Any, hosts: int) -> Any:
        """What is broadcast: encoded cluster and plans, or the error for all ranks."""
        ranks = dist.get_world_size(self._model.process_group)
        try:
            cluster = fit_cluster(
                samples.collectives,
                name=self._name,
                hosts=hosts,
                ranks_per_host=ranks // hosts,
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


def summary(settled: Settled) -> str:
    """One line: what was chosen and what it is predicted to save."""
    ours, theirs = settled.plan.predicted, settled.ddp.predicted
    if ours is None or theirs is None:
        return "planned without a prediction"
    against = (
        f"predicted step {format_s(ours.iteration_s)} against "
        f"{format_s(theirs.iteration_s)} with DDP's buckets "
        f"({100 * settled.saved_ratio:.0f} % saved), no plan can be faster than "
        f"{format_s(ours.lower_bound_s)}"
    )
    if not settled.applied:
        return f"left as DDP does it: {against}"
    plan = settled.plan
    slices = sorted({bucket.slices for bucket in plan.buckets})
    parts = "-".join(str(s) for s in (slices[0], slices[-1])[: len(slices)])
    return (
        f"planned: {_count(len(plan.buckets), 'bucket')} in {parts} "
        f"slice{'s' if slices[-1] > 1 else ''} on {_count(plan.lanes, 'lane')}; "
        f"{against}"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
