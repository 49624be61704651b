"""Plans prepared for `StepModel.times`: one plan's step under many networks.

Called where a model is corrected (`stretto.tune.calibration`), which evaluates the same
few plans some thirty to a hundred times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError
from stretto.sim.flows import plan_flows

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload


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
@dataclass(frozen=True, slots=True, kw_only=True)
class LaneContent:
    """The flows of one lane, or of several with the same flows."""

    flows: tuple[tuple[float, float], ...]
    """When each flow is ready, from the start of backward, and its bytes on the
    wire."""

    number: int
    """How many lanes send exactly this."""

    buckets: tuple[tuple[int, ...], ...]
    """By flow: the buckets of which it is a slice, on any of these lanes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPlan:
    """A plan's flows by lane, without figures of a network."""

    contents: tuple[LaneContent, ...]

    lanes: int

    resource: int | None
    """The resource of all buckets."""

    num_buckets: int

    all_sent: bool
    """Whether every bucket sends something."""


def can_replay(plan: Plan) -> bool:
    """Return whether a plan has rings of one resource and overlaps backward at most."""
    return (
        plan.overlap in ("none", "backward")
        and all(bucket.algorithm == "ring" for bucket in plan.buckets)
        and len({bucket.resource for bucket in plan.buckets}) <= 1
    )


def prepared(workload: Workload, cluster: Cluster, plan: Plan) -> PreparedPlan:
    """Return a plan of this workload, for any cluster of as many ranks as this one.

    Raises:
        SpecError: `can_replay` is false, or the cluster lacks the plan's resource.
    """
    if not can_replay(plan):
        raise SpecError(
            "a plan whose buckets differ in algorithm or resource, or that "
            f"overlaps forward, cannot be replayed: simulate it ({plan.planner})"
        )
    lanes: list[list[tuple[float, float]]] = [[] for _ in range(plan.lanes)]
    held: list[list[int]] = [[] for _ in range(plan.lanes)]
    flows, slices = plan_flows(workload, cluster, plan, origin_s=0.0)
    for flow, part in zip(flows, slices, strict=True):
        lanes[flow.lane].append((flow.ready_work_s, flow.wire_bytes))
        held[flow.lane].append(part.bucket)
    same: dict[tuple[tuple[float, float], ...], list[int]] = {}
    for lane, content in enumerate(lanes):
        if content:
            same.setdefault(tuple(content), []).append(lane)
    return PreparedPlan(
        contents=tuple(
            LaneContent(
                flows=content,
                number=len(numbers),
                buckets=tuple(
                    tuple({held[lane][i] for lane in numbers})
                    for i in range(len(content))
                ),
            )
            for content, numbers in same.items()
        ),
        lanes=plan.lanes,
        resource=next((bucket.resource for bucket in plan.buckets), None),
        num_buckets=len(plan.buckets),
        all_sent=len({part.bucket for part in slices}) == len(plan.buckets),
    )
