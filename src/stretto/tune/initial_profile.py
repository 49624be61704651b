"""Profile a job's first steps, probe its network, and make a plan.

Steps are profiled while training continues: their communication waits until backward
has ended.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypedDict, final

from stretto import planners
from stretto.cost.fit import fit_cluster
from stretto.errors import Infeasible, NoisyProfile, SpecError
from stretto.measure import NetworkSamples, StepObserver, probe_network
from stretto.runtime import AbstractStepObserver
from stretto.runtime.backends.base import LaneFailure
from stretto.runtime.presence import is_communication_error
from stretto.schema import Cluster, CollectiveSample, Plan, Workload, codec
from stretto.tune.forward_plans import (
    ProfiledReads,
    forward_or_why,
    needed_early,
    verdict_of,
)
from stretto.tune.tuning_meeting import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stretto.runtime import DistributedDataParallel
    from stretto.runtime.forward.reads import ReadsReport
    from stretto.runtime.recording.step import BucketRow
    from stretto.tune.forward_plans import ForwardVerdict
    from stretto.tune.tuning_meeting import TuningMeeting

PROFILE_PLANNER = "profile"
"""The planner's name in the plan of a deferred step."""


DEFERRED_LANES = 4
"""Lanes of a deferred step: if one flow can't fill the link, this shortens the wait."""


def deferred_plan(model: DistributedDataParallel, lanes: int = DEFERRED_LANES) -> Plan:
    """Return a plan that sends everything after backward, before any measurement."""
    return model.deferred_plan(lanes, planner=PROFILE_PLANNER)


@final
class DeferredProfile:
    """Observe training steps whose communication waits until backward has ended.

    The steps are real: every gradient is reduced and every step counts. Backward runs
    without concurrent communication, which is what a workload describes, and the wait
    for communication is subtracted from the step's time. DDP's own work outside
    backward, such as sending buffers before forward, is included.

    The caller applies a `deferred_plan`. No method communicates, except `workload`
    without rows.
    """

    def __init__(self, model: DistributedDataParallel, *, aside: bool = False) -> None:
        """Prepare; ``aside`` is as for `StepObserver`."""
        self._model = model
        self.observer = StepObserver(
            model.module,
            aside=aside,
            parameters=model.trained_parameters(),
            unused=True,
        )
        self._waits = _Waits(self.observer)

    @property
    def error(self) -> Exception | None:
        """The error that ended the observation, if it is ``aside``."""
        return self.observer.error

    def start(self) -> None:
        """Start with the next step."""
        self._model._observe(self._waits)  # noqa: SLF001
        self.observer.__enter__()

    def begin_step(self) -> None:
        """Begin a step now rather than at the next forward."""
        self.observer.begin_step()

    def end_step(self) -> None:
        """End the step now rather than at the next forward."""
        self.observer.end_step()

    def reduced(self, step_s: float) -> tuple[list[float], float] | None:
        """End a step of ``step_s`` at the end of its reduced backward.

        Returns:
            Its row for `merged_workload` and its wait for communication, or ``None`` if
            the step was not observed completely.
        """
        waited_s = self._waits.take()
        self.observer.steps.clear()  # micro-steps without reduction
        self.observer.end_step(step_s)
        if waited_s is None or len(self.observer.steps) != 1:
            return None
        return self.observer.row_of(self.observer.steps[0]), waited_s

    def stop(self) -> None:
        """Stop observing. The deferred plan stays in use until another is applied."""
        self.observer.close()
        self._model._observe(None)  # noqa: SLF001

    def workload(
        self, *, name: str, warmup: int, max_spread_ratio: float = 0.35
    ) -> Workload:
        """Return the workload of the observed steps; collective.

        Raises:
            NoisyProfile: the steps differ too much.
        """
        return self.observer.workload(
            name=name,
            warmup=warmup,
            group=self._model.process_group,
            max_spread_ratio=max_spread_ratio,
        )

    def merged_workload(
        self, *, name: str, rows: Sequence[Sequence[float]], ranks: int
    ) -> Workload:
        """Return the workload for rows that were merged over ranks.

        Raises:
            SpecError: there are too few rows.
        """
        found = self.observer.workload(
            name=name, warmup=0, rows=rows, max_spread_ratio=math.inf
        )
        return replace(found, provenance={**found.provenance, "ranks": ranks})


def bulk_samples(
    waits: Sequence[tuple[int, float]], *, size_bytes: int, ranks: int
) -> tuple[CollectiveSample, ...]:
    """Return all-reduces after backward as samples of the network.

    ``waits`` contains, for each step, the number of lanes and the wait of the last
    rank, which is the collective's own time. All lanes transfer equal parts of all
    gradients at once.
    """
    by_lanes: dict[int, list[float]] = {}
    for lanes, wait_s in waits:
        if wait_s > 0:
            by_lanes.setdefault(lanes, []).append(wait_s)
    return tuple(
        CollectiveSample(
            size_bytes=max(1, size_bytes // lanes),
            lanes=lanes,
            ranks=ranks,
            duration_s=statistics.median(times_s),
            spread_s=max(times_s) - min(times_s),
            repetitions=len(times_s),
        )
        for lanes, times_s in sorted(by_lanes.items())
    )


@final
class _Waits(AbstractStepObserver):
    """Report each step's wait for communication to the step's observer.

    The wait ends with the last collective. DDP's later work, copying buckets back into
    gradients, is also part of a step without communication.
    """

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._computed_s = 0.0
        self._finished_s = 0.0
        self._waited_s: float | None = None

    def take(self) -> float | None:
        """Return the last step's wait, once; ``None`` if it did not communicate."""
        waited_s, self._waited_s = self._waited_s, None
        return waited_s

    def attached(self, tensors: Sequence[str], buckets: Sequence[BucketRow]) -> None:
        pass

    def forward_started(self, now_s: float) -> None:
        pass

    def forward_ended(self, now_s: float) -> None:
        pass

    def backward_started(self, now_s: float) -> None:
        pass

    def gradient_ready(self, tensor: int, now_s: float) -> None:
        pass

    def bucket_launched(self, bucket: int, now_s: float) -> None:
        pass

    def slice_finished(
        self, bucket: int, lane: int, elements: int, now_s: float
    ) -> None:
        self._finished_s = now_s  # lanes end in any order, but close together

    def backward_computed(self, now_s: float) -> None:
        self._computed_s = now_s
        self._finished_s = 0.0

    def backward_ended(self, now_s: float) -> None:
        waited_until_s = min(self._finished_s, now_s)
        self._waited_s = max(0.0, waited_until_s - self._computed_s)
        self._observer.exclude(self._waited_s)


WARMUP_STEPS = 1
MIN_ROWS = 3
"""Number of steps that a profile needs."""

PROFILE_LANES = (4, 4, 4, 2)
"""Lanes on which the profiled steps send their gradients. Together the steps probe the
network with messages as large as the model's. The step after a change has a longer
backward and does not count for the workload, so there are few changes."""

MORE_LANES = (8, 8)
"""Further steps on more lanes ..."""

LANES_HELP_RATIO = 1.8
"""... if twice the lanes were at least this much faster: then the link is not full.
If it is full, opening more lanes would cost time and show nothing."""

MAX_SPREAD_RATIO = 0.35
"""A backward whose interquartile range exceeds this share of its median is profiled
again over twice as many steps ..."""

MATTERS_RATIO = 0.15
"""... if that is more than this share of a step."""

PROBE_STEPS = 0.5
"""Small messages are probed for at most the time of this many steps."""

WHOLE_PROBE_STEPS = 3
"""If profiled steps show nothing about the network, the probe takes this many steps."""

MAX_PROBE_S = 20.0

MIN_PROBE_S = 0.06
"""A shorter probe measures nothing; training with such short steps ends soon or has
many.
"""

PROBE_AGAIN = 3
"""A probe that fits no network, or that ran out of time, is repeated with this many
times the budget, at most twice."""

CONTENTION_FROM_S = 3.0
"""From this budget on, computation alongside communication is measured as well."""

MIN_BULK_BYTES = 2**21
"""Smaller gradients do not show a rate, because shapers and socket buffers absorb them
..."""

MIN_BULK_S = 0.05
"""... unless the transfer took at least this long."""

SMALL_POINTS = (
    (2**14, 1),
    (2**18, 1),
    (2**14, 4),
    (2**20, 1),
    (2**16, 1),
)
"""Sizes and lanes, most important first: start-ups alone and alongside others, and the
rate of one flow. Points that do not fit into the time are left out."""

PROBE_SIZES_BYTES = (2**14, 2**16, 2**18, 2**20, 2**22)
PROBE_LANES = (1, 2, 4, 8)
PROBE_REPETITIONS = 3

_GROWTH = 1e-3


class UnclearNetwork(NoisyProfile):
    """No probe could be explained; raised on all ranks together."""

    def __init__(self, why: str, *, probe_s: float) -> None:
        """Prepare; ``probe_s`` is how long the probes paused training."""
        super().__init__(why)
        self.probe_s = probe_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """The result of a profile; equal on all ranks."""

    workload: Workload

    cluster: Cluster

    plan: Plan
    """The planner's best."""

    ddp: Plan
    """DDP's rule with its default buckets, under the same model."""

    probe_s: float
    """How long the probe paused training."""

    deferred_s: float | None = None
    """Median step of the profiled steps, including communication after backward."""

    forward: Plan | None = None
    """The best plan with overlap with the next forward, if it may be the fastest."""

    no_forward: str | None = None
    """Why there is no such plan, where it was asked for."""

    may_forward: bool = False
    """Whether plans may overlap with forward."""


class ProfileReport(TypedDict):
    """Each rank's message about the profiled steps, by number."""

    rows: dict[str, list[float]]

    waits: dict[str, float]

    reads: ReadsReport | None
    """The program's reads, where overlap with forward is asked for."""


@final
class InitialProfiler:
    """Profile training steps, then probe and plan.

    The first step with deferred communication warms up, the next four are profiled, and
    two more if the link was not full by then; every step trains. Their transfers over
    different numbers of lanes probe the network with large messages; small messages are
    then probed for about the time of one step. If backward was unsteady, or too few
    steps counted, twice as many steps are profiled again.

    All ranks call every method at the end of the same reduced backward.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        sync: TuningMeeting,
        *,
        name: str,
        planner: str,
        wire_dtype: str | None,
        hosts: int,
        change: Callable[[Plan], None],
        forward: bool = False,
    ) -> None:
        """Prepare; ``change`` applies a plan on all ranks or raises on all.

        With ``forward`` the profiled steps also show whether communication may overlap
        with the next forward.
        """
        self._model = model
        self._reads = ProfiledReads(model) if forward else None
        self._sync = sync
        self._name = name
        self._planner = planner
        self._wire_dtype = wire_dtype
        self._hosts = hosts
        self._change = change
        self._lanes: list[int] = []
        self._again = self._extended = False
        self._bulk: tuple[CollectiveSample, ...] = ()
        self._profile = DeferredProfile(model, aside=True)
        self._rows: dict[str, list[float]] = {}
        self._waits: dict[str, float] = {}
        self._steps_s: list[float] = []
        self._number = 0

    def start(self) -> None:
        """Start with the next step.

        Raises:
            Refused: this model's communication can't be deferred.
        """
        self._begin((PROFILE_LANES[0],) * WARMUP_STEPS + PROFILE_LANES)
        self._profile.start()
        if self._reads is not None:
            self._reads.start()

    def _begin(self, lanes: Sequence[int]) -> None:
        self._lanes = list(lanes)
        self._number = 0
        self._rows.clear()
        self._waits.clear()
        self._apply(None)

    def _apply(self, before: int | None) -> None:
        lanes = self._lanes[self._number]
        if lanes != before:
            self._change(deferred_plan(self._model, lanes))

    def watch_reads(self) -> None:
        """Watch what the program reads from here to the end of the next forward."""
        if self._reads is not None:
            self._reads.watch()

    def step_ended(self, step_s: float, *, counts: bool) -> None:
        """Record a step of this rank, as soon as it has ended.

        Raises:
            Exception: the error that ended the profile on this rank.
        """
        found = self._profile.reduced(step_s)
        if self._profile.error is not None:
            raise self._profile.error
        number, self._number = self._number, self._number + 1
        if found is None or number < WARMUP_STEPS:
            return
        row, wait_s = found
        self._waits[str(number)] = wait_s
        self._steps_s.append(step_s)
        # A step after a change touches the new buckets for the first time.
        if counts and self._lanes[number] == self._lanes[number - 1]:
            self._rows[str(number)] = row

    def advance(self) -> ProfileResult | None:
        """Continue after a step; return the result once the profile is complete.

        Raises:
            NoisyProfile: too few steps could be profiled.
            SpecError: the same.
            Stopped: another rank can't continue.
            UnclearNetwork: no plan or no model of the network exists.
        """
        if self._number < len(self._lanes):
            self._apply(self._lanes[self._number - 1])
            return None
        message = ProfileReport(
            rows=self._rows,
            waits=self._waits,
            reads=None if self._reads is None else self._reads.report(),
        )
        found = self._sync.meet(message, self._judge)
        if found["do"] == "extend":
            self._extended = True
            self._lanes += MORE_LANES
            self._apply(self._lanes[self._number - 1])
            return None
        if found["do"] == "again":
            self._again = True
            # Take another, longer profile. If it is not steadier, plan with it anyway:
            # the prediction is rough then, but the plan's shape is rarely wrong.
            self._begin((PROFILE_LANES[0],) * (WARMUP_STEPS + 2 * len(PROFILE_LANES)))
            return None
        self._stop()
        return self._plan(
            codec.decode(found["workload"], Workload), found["step_s"], found["forward"]
        )

    def _stop(self) -> None:
        self._profile.stop()
        if self._reads is not None:
            self._reads.stop()

    def abandon(self) -> None:
        """End the profile without a result."""
        self._stop()

    # On rank 0.

    def _judge(self, tables: list[ProfileReport]) -> dict[str, Any]:
        """Return the next action, from the records of all ranks."""
        if not self._again:
            waits = [
                (self._lanes[int(number)], min(t["waits"][number] for t in tables))
                for number in _common(table["waits"] for table in tables)
            ]
            self._bulk = bulk_samples(
                waits,
                size_bytes=sum(row.bytes for row in self._model.tensor_table()),
                ranks=self._sync.size,
            )
            if not self._extended and more_lanes_help(self._bulk):
                return {"do": "extend"}
        rows = [
            [max(column) for column in zip(*rows, strict=True)]
            for rows in (
                [table["rows"][number] for table in tables]
                for number in _common(table["rows"] for table in tables)
            )
        ]
        if len(rows) < MIN_ROWS:
            if not self._again:
                return {"do": "again"}
            raise NoisyProfile(
                f"only {len(rows)} of {len(self._lanes)} steps could be profiled: "
                "the model was evaluated more often during the others than usually, "
                "or its forward or backward can't be observed (a model compiled as a "
                "whole)"
            )
        workload = self._profile.merged_workload(
            name=self._name, rows=rows, ranks=self._sync.size
        )
        step_s = statistics.median(self._steps_s)
        spread_s = workload.provenance["backward_spread_s"]
        max_s = max(MAX_SPREAD_RATIO * workload.backward_s, MATTERS_RATIO * step_s)
        if not self._again and spread_s > max_s:
            return {"do": "again"}
        forward = None
        if self._reads is not None:
            forward = verdict_of([table["reads"] for table in tables])
            workload = needed_early(workload, forward["early"])
        return {
            "do": "probe",
            "workload": codec.encode(workload),
            "step_s": step_s,
            "forward": forward,
        }

    # On all ranks.

    def _plan(
        self, workload: Workload, step_s: float, forward: ForwardVerdict | None
    ) -> ProfileResult:
        """Plan; ``step_s``, a step with its communication, is equal on all ranks."""
        bulk = [sample for sample in self._bulk if determines_rate(sample)]
        some_bulk = bool(self._sync.broadcast_int(len(bulk)))
        steps: float = PROBE_STEPS if some_bulk else WHOLE_PROBE_STEPS
        budget_s = min(max(steps * step_s, MIN_PROBE_S), MAX_PROBE_S)
        begin_s = perf_counter()
        found: Any = None
        for times in (1, PROBE_AGAIN, PROBE_AGAIN**2):
            # A longer probe mostly resolves what a short probe finds contradictory.
            samples, trouble = probe_lanes(
                self._model, times * budget_s, some_bulk=some_bulk
            )
            found = self._sync.meet_or_end(
                trouble, partial(self._plan_on_rank_0, workload, samples, bulk, forward)
            )
            if "retry" not in found:
                break
        if "retry" in found:
            raise UnclearNetwork(found["retry"], probe_s=perf_counter() - begin_s)
        return ProfileResult(
            workload=workload,
            cluster=codec.decode(found["cluster"], Cluster),
            plan=codec.decode(found["plan"], Plan),
            ddp=codec.decode(found["ddp"], Plan),
            probe_s=perf_counter() - begin_s,
            deferred_s=step_s if self._median_is_of_first_lanes else None,
            forward=codec.decode(found["forward"], Plan) if found["forward"] else None,
            no_forward=found["no_forward"],
            may_forward=forward is not None and forward["prevents"] is None,
        )

    @property
    def _median_is_of_first_lanes(self) -> bool:
        """Whether most steps ran on the lanes of a plain deferred plan."""
        return not self._extended and PROFILE_LANES[0] == DEFERRED_LANES

    def _plan_on_rank_0(
        self,
        workload: Workload,
        samples: NetworkSamples | None,
        bulk: Sequence[CollectiveSample],
        verdict: ForwardVerdict | None,
        troubles: list[dict[str, Any] | None],
    ) -> dict[str, Any]:
        """Return the encoded cluster and plans, or why the probe must be repeated."""
        failed = [(rank, found) for rank, found in enumerate(troubles) if found]
        if len(failed) == len(troubles) and all(found["equal"] for _, found in failed):
            return {"retry": failed[0][1]["why"]}  # too short a budget
        if failed or samples is None:
            # A lost connection mostly results from another rank's failure.
            rank, found = min(failed, key=lambda item: item[1]["lost"])
            raise NoisyProfile(f"{self._sync.name(rank)}: {found['why']}")
        try:
            cluster = fit_cluster(
                [*plausible(samples.collectives), *bulk],
                name=self._name,
                hosts=self._hosts,
                ranks_per_host=self._sync.size // self._hosts,
                contention_samples=samples.contention,
                provenance=samples.provenance,
            )
            plan = planners.plan_with_wire(
                workload, cluster, self._planner, wire_dtype=self._wire_dtype
            )
            ddp = planners.get("ddp").plan(workload, cluster)
            forward, no_forward = None, None
            if verdict is not None:
                forward, no_forward = forward_or_why(
                    verdict,
                    workload,
                    cluster,
                    plan,
                    planner=self._planner,
                    wire_dtype=self._wire_dtype,
                )
        except (Infeasible, NoisyProfile) as exc:
            return {"retry": str(exc)}
        return {
            "forward": None if forward is None else codec.encode(forward),
            "no_forward": no_forward,
            "cluster": codec.encode(cluster),
            "plan": codec.encode(plan),
            "ddp": codec.encode(ddp),
        }


def probe_lanes(
    model: DistributedDataParallel, budget_s: float, *, some_bulk: bool
) -> tuple[NetworkSamples | None, dict[str, Any] | None]:
    """Measure the network on the model's lanes, or say why not.

    Nothing else uses the lanes between two steps. A rank that fails closes its
    connections, so that no other rank waits for it; then tuning ends, and so do the
    lanes.
    """
    samples: NetworkSamples | None = None
    trouble: dict[str, Any] | None = None
    lanes, agreement = model._probe_pools()  # noqa: SLF001
    widest = max(lane for _, lane in SMALL_POINTS) if some_bulk else max(PROBE_LANES)
    try:
        # Open before anything that may fail on one rank alone: closing a connection
        # can't release ranks that wait for one.
        agreement.lane(0)
        for number in range(widest):
            lanes.lane(number)
        samples = probe_network(
            group=model.process_group,
            agreement_group=agreement.lane(0),
            lane_group=lanes.lane,
            sizes_bytes=PROBE_SIZES_BYTES,
            lanes=PROBE_LANES,
            points=SMALL_POINTS if some_bulk else None,
            repetitions=PROBE_REPETITIONS,
            budget_s=budget_s,
            contention=budget_s >= CONTENTION_FROM_S,
        )
    except SpecError as exc:  # too short a budget: all ranks agreed on that
        trouble = {"why": reason_of(exc), "equal": True, "lost": False}
    except Exception as exc:  # noqa: BLE001 - all ranks learn of it
        trouble = {
            "why": reason_of(exc),
            "equal": False,
            "lost": isinstance(exc, LaneFailure) or is_communication_error(exc),
        }
        for pool in (agreement, lanes):
            pool.abort()
    if agreement is not lanes:
        agreement.close()
    return samples, trouble


def _common(tables: Iterable[dict[str, Any]]) -> list[str]:
    """Return the steps that all ranks have, in order; ranks may have seen others."""
    numbers = [set(table) for table in tables]
    return sorted(set.intersection(*numbers), key=int)


def determines_rate(sample: CollectiveSample) -> bool:
    """Return whether the sample exceeds what shapers and socket buffers absorb."""
    size_bytes = sample.size_bytes * sample.lanes
    return size_bytes >= MIN_BULK_BYTES or sample.duration_s >= MIN_BULK_S


def more_lanes_help(samples: Sequence[CollectiveSample]) -> bool:
    """Return whether the largest number of lanes left the link unfilled.

    Every sample transfers the same total bytes, in equal parts on its lanes.
    """
    time_s = {sample.lanes: sample.duration_s for sample in samples}
    max_lanes = max(time_s, default=0)
    half_s = time_s.get(max_lanes // 2)
    return half_s is not None and half_s >= LANES_HELP_RATIO * time_s[max_lanes]


def plausible(samples: Sequence[CollectiveSample]) -> list[CollectiveSample]:
    """Return the samples of a short probe without what noise makes impossible.

    A larger message, or the same one on more lanes, never takes less time. If it seemed
    to, the smaller one was disturbed, or it was chance.
    """
    found: dict[tuple[int, int], CollectiveSample] = {}
    for sample in sorted(samples, key=lambda s: (s.lanes, s.size_bytes)):
        smaller_s = [
            other.duration_s
            for other in found.values()
            if other.lanes <= sample.lanes and other.size_bytes <= sample.size_bytes
        ]
        min_s = (1 + _GROWTH) * max(smaller_s, default=0.0)
        found[sample.lanes, sample.size_bytes] = replace(
            sample, duration_s=max(sample.duration_s, min_s)
        )
    return list(found.values())
