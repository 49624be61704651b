"""Tune on a fixed schedule, for tests: every phase runs within ten reduced steps.

`variable_names.TUNE_SCHEDULE` set to ``forced`` makes ``plan="auto"`` profile, probe,
change plans and settle at the same steps in every run, whatever was measured:

| after step | what changes |
|---|---|
| 2 | communication is deferred, steps are profiled |
| 4 | the network is probed; the first plan: buckets of three tensors on three lanes |
| 6 | the second plan: two tensors a bucket, on two lanes |
| 8 | settled on the first plan; lanes that it does not need are closed |
| 9 | confirmed; step times are watched |
| 17 | the search opens again, once, and settles 6 steps later |
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, final

from stretto import variable_names
from stretto.errors import NoisyProfile, SpecError
from stretto.planners import get as planner_named
from stretto.planners.base import with_prediction
from stretto.schema import Bucket, Cluster, Plan, TensorSpec, Workload
from stretto.schema.cluster import Link
from stretto.tune.forward_plans import ProfiledReads, verdict_of
from stretto.tune.initial_profile import (
    DeferredProfile,
    ProfileResult,
    deferred_plan,
    probe_lanes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.runtime import DistributedDataParallel
    from stretto.tune.forward_plans import ForwardVerdict
    from stretto.tune.online_search import Judgment
    from stretto.tune.tuning_meeting import TuningMeeting


FORCED = "forced"
FORCED_FORWARD = "forced-forward"
"""The same with plans whose communication overlaps with the next forward, too."""

PROFILED_STEPS = 2
PLAN_STEPS = 2

PROFILE_LANES = 2
PROBE_S = 0.02

FORCED_STEP_S = 0.03
"""Reported as the settled plan's step time."""

_SHAPES: Final = ((3, 3, 2), (2, 2, 1))
"""For each plan: tensors per bucket, lanes, slices."""


def schedule() -> str:
    """Return the schedule that this process asks for; empty means none.

    Raises:
        SpecError: there is no such schedule.
    """
    found = os.environ.get(variable_names.TUNE_SCHEDULE, "")
    if found not in ("", FORCED, FORCED_FORWARD):
        raise SpecError(
            f"{variable_names.TUNE_SCHEDULE} must be {FORCED!r} or "
            f"{FORCED_FORWARD!r}, got {found!r}"
        )
    return found


def is_forced() -> bool:
    """Return whether this process tunes on a fixed schedule."""
    return bool(schedule())


@final
class ForcedProfiler:
    """Profile and probe as `InitialProfiler` does, then plan from fixed figures."""

    def __init__(
        self,
        model: DistributedDataParallel,
        sync: TuningMeeting,
        *,
        change: Callable[[Plan], None],
        forward: bool = False,
    ) -> None:
        """Prepare; arguments are as for `InitialProfiler`."""
        self._model = model
        self._sync = sync
        self._change = change
        self._profile = DeferredProfile(model, aside=True)
        self._reads = ProfiledReads(model) if forward else None
        self._number = 0
        self._rows: list[list[float]] = []

    def start(self) -> None:
        """Start with the next step."""
        self._change(deferred_plan(self._model, PROFILE_LANES))
        self._profile.start()
        if self._reads is not None:
            self._reads.start()

    def watch_reads(self) -> None:
        """Watch what the program reads from here to the end of the next forward."""
        if self._reads is not None:
            self._reads.watch()

    def step_ended(self, step_s: float, *, counts: bool) -> None:
        """Record a step of this rank; the measurement decides nothing."""
        found = self._profile.reduced(step_s)
        self._number += 1
        if found is not None:
            self._rows.append(found[0])

    def advance(self) -> ProfileResult | None:
        """Return the fixed figures and the first plan once the profile is complete."""
        if self._number < PROFILED_STEPS:
            return None
        self._sync.meet(self._rows, len)
        verdict: ForwardVerdict | None = None
        if self._reads is not None:
            verdict = self._sync.meet(self._reads.report(), verdict_of)
        self.abandon()
        _, trouble = probe_lanes(self._model, PROBE_S, some_bulk=True)
        self._sync.meet_or_end(trouble, _require_no_trouble)
        workload, cluster = workload_of(self._model), _cluster(self._sync.size)
        return ProfileResult(
            workload=workload,
            cluster=cluster,
            plan=with_prediction(plans_of(self._model)[0], workload, cluster),
            ddp=planner_named("ddp").plan(workload, cluster),
            probe_s=PROBE_S,
            no_forward=None if verdict is None else verdict["prevents"],
        )

    def abandon(self) -> None:
        """End the profile without a result."""
        self._profile.stop()
        if self._reads is not None:
            self._reads.stop()


@final
class ForcedSearch:
    """Run each plan for a few steps, in a fixed order, in place of `OnlineSearch`."""

    search: None = None
    ahead = 1

    def __init__(
        self,
        model: DistributedDataParallel,
        sync: TuningMeeting,
        change: Callable[..., None],
    ) -> None:
        """Prepare; ``change`` is as for `ForcedProfiler`."""
        self._sync = sync
        self._change = change
        self._plans = plans_of(model)
        self._steps = 0

    def begin(self) -> bool:
        """Apply the first plan."""
        self._change(self._plans[0])
        return True

    def note(self, step_s: float) -> None:
        """Record a step of this rank; the measurement decides nothing."""

    def message(self) -> list[float | None]:
        """Return this rank's steps for `judge`: none, as nothing is measured."""
        return []

    def judge(self, rows: Sequence[Sequence[float | None]]) -> Judgment:
        """Return that the trials continue and meet after each step."""
        del rows
        return {"over": False, "ahead": 1}

    def advance(self, found: Judgment) -> bool:
        """Continue after a step; return whether the trials continue."""
        self._sync.broadcast_object(found)
        self._steps += 1
        if self._steps == PLAN_STEPS:
            self._change(self._plans[1])
        return self._steps < PLAN_STEPS * len(self._plans)

    def abandon(self) -> None:
        """End the trials; there is nothing to release."""


def _require_no_trouble(troubles: list[dict[str, Any] | None]) -> int:
    for rank, found in enumerate(troubles):
        if found is not None and not found["equal"]:
            raise NoisyProfile(f"rank {rank}: {found['why']}")
    return len(troubles)


def plans_of(model: DistributedDataParallel) -> list[Plan]:
    """Return the plans to try, with this model's tensors."""
    return [_plan(model, *shape) for shape in _SHAPES]


def _plan(
    model: DistributedDataParallel, tensors: int, lanes: int, slices: int
) -> Plan:
    groups: dict[tuple[str, Any], list[str]] = {}
    rows = {row.name: row for row in model.tensor_table()}
    for name, parameter in reversed(model.trained_parameters()):
        groups.setdefault((rows[name].dtype, parameter.device), []).append(name)
    buckets = [
        (names[i : i + tensors], dtype)
        for (dtype, _), names in groups.items()
        for i in range(0, len(names), tensors)
    ]
    forward = schedule() == FORCED_FORWARD
    # The first gradients that are ready, then those that forward needs first.
    launch = (0, *range(len(buckets) - 1, 0, -1)) if forward else ()
    return Plan(
        planner="forced",
        workload_digest=workload_of(model).digest,
        ranks=model._ranks.size,  # noqa: SLF001
        overlap="forward" if forward else "backward",
        launch=launch,
        lanes=lanes,
        buckets=tuple(
            Bucket(
                tensors=tuple(names),
                lane=number % lanes,
                slices=slices,
                wire_dtype=dtype,
            )
            for number, (names, dtype) in enumerate(buckets)
        ),
    )


def workload_of(model: DistributedDataParallel) -> Workload:
    """Return a workload of the model's tensors with made-up times."""
    rows = list(reversed(model.tensor_table()))
    return Workload(
        name="forced",
        framework="torch",
        device=model.device_type,
        batch_per_rank=1,
        forward_s=0.01,
        backward_s=0.02,
        tensors=tuple(
            TensorSpec(
                name=row.name,
                bytes=row.bytes,
                dtype=row.dtype,
                ready_s=0.02 * (number + 1) / len(rows),
                needed_s=0.0,
            )
            for number, row in enumerate(rows)
        ),
    )


def _cluster(ranks: int) -> Cluster:
    link = Link(latency_s=5e-5, bandwidth_bytes_per_s=1e9)
    return Cluster(
        name="forced", hosts=1, ranks_per_host=ranks, inter_host=link, intra_host=link
    )
