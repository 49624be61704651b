"""The contract of all planners, and the conversion of drafts into plans."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from stretto.errors import Infeasible, SpecError
from stretto.schema import (
    NARROWER,
    Bucket,
    Plan,
    Prediction,
    TensorSpec,
    Workload,
)
from stretto.schema.plan import ALGORITHMS, WIRE_DTYPES
from stretto.schema.rules import DTYPE_BYTES
from stretto.sim.scope import BoundScope
from stretto.sim.step import simulate_step
from stretto.sim.step_model import StepModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster


class AbstractPlanner(abc.ABC):
    """Chooses buckets, lanes and slices for one workload on one cluster.

    An implementation is deterministic, puts every tensor into exactly one bucket, keeps
    buckets of one type each and contiguous in the order in which gradients become ready
    (`ddp` and `joint`, where types alternate: in an order of `_orders.views`), never
    mutates its input, and raises `Infeasible` rather than relax a limit.
    The plan it returns has its prediction.
    """

    name: ClassVar[str]
    """Name of the method in the registry and in plan files."""

    def scope(self, cluster: Cluster) -> BoundScope | None:
        """Return the plans this planner may choose; ``None``: `scope_of` its plan."""
        return None

    @abc.abstractmethod
    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return this method's plan.

        Raises:
            Infeasible: no plan meets the limits given to the constructor.
        """

    def replan(
        self,
        workload: Workload,
        cluster: Cluster,
        near: Sequence[Plan],
    ) -> Plan:
        """Return the plan after small changes of the figures, not of the tensors.

        ``near`` are good plans from before. A planner that searches may start from them
        to take less time; others ignore them.

        Raises:
            Infeasible: as `plan`.
        """
        return self.plan(workload, cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan over tensor indices, which searches modify."""

    ends: tuple[int, ...]
    """Exclusive index of each bucket's last tensor, ascending."""

    slices: tuple[int, ...]

    bucket_lanes: tuple[int, ...]
    """Lane of each bucket's first slice."""

    lanes: int = 1

    overlap: str = "backward"

    resources: tuple[int | None, ...] = ()
    """Resource of each bucket; empty: the default for all."""

    algorithms: tuple[str, ...] = ()
    """Algorithm of each bucket; empty: a ring for all."""

    launch: tuple[int, ...] = ()
    """With overlap ``forward``: order in which buckets launch; empty: as listed."""

    @classmethod
    def in_turn(
        cls,
        ends: Sequence[int],
        *,
        lanes: int = 1,
        slices: int = 1,
        overlap: str = "backward",
    ) -> Draft:
        """Return a draft of buckets in ``slices`` parts, lanes taken in turn."""
        return cls(
            ends=tuple(ends),
            slices=(slices,) * len(ends),
            bucket_lanes=tuple(i * slices % lanes for i in range(len(ends))),
            lanes=lanes,
            overlap=overlap,
        )

    @classmethod
    def of(cls, plan: Plan) -> Draft:
        """Return the decisions of a planner's plan, without its tensors' names."""
        ends: list[int] = []
        for bucket in plan.buckets:
            ends.append(len(bucket.tensors) + (ends[-1] if ends else 0))
        return cls(
            ends=tuple(ends),
            slices=tuple(b.slices for b in plan.buckets),
            bucket_lanes=tuple(b.lane for b in plan.buckets),
            lanes=plan.lanes,
            overlap=plan.overlap,
            resources=tuple(b.resource for b in plan.buckets)
            if any(b.resource is not None for b in plan.buckets)
            else (),
            algorithms=tuple(b.algorithm for b in plan.buckets)
            if any(b.algorithm != "ring" for b in plan.buckets)
            else (),
            launch=plan.launch,
        )

    @property
    def collectives(self) -> int:
        """All-reduces in a step; an upper bound if a bucket is tiny."""
        return sum(self.slices)

    def iteration_s(self, model: StepModel) -> float:
        """Return the draft's step time by a model of its workload."""
        return model.iteration_s(
            self.ends,
            self.lanes,
            self.bucket_lanes,
            self.slices,
            self.resources,
            self.algorithms,
            self.overlap,
            self.launch,
        )


def finish(
    draft: Draft,
    planner: str,
    workload: Workload,
    cluster: Cluster,
    scope: BoundScope | None = None,
    *,
    view: Workload | None = None,
) -> Plan:
    """Return the draft as a plan, with the simulator's prediction.

    ``scope`` as in `with_prediction`. ``view`` is the workload in the order to which
    the draft refers, if not its own.

    Raises:
        Infeasible: a gradient's type cannot be sent.
    """
    number = len(draft.ends)
    tensors = workload.tensors if view is None else view.tensors
    buckets = tuple(
        Bucket(
            tensors=tuple(t.name for t in tensors[start:end]),
            lane=lane,
            slices=slices,
            resource=resource,
            algorithm=algorithm,
            wire_dtype=wire_dtype(tensors[start]),
        )
        for start, end, lane, slices, resource, algorithm in zip(
            (0, *draft.ends[:-1]),
            draft.ends,
            draft.bucket_lanes,
            draft.slices,
            draft.resources or (None,) * number,
            draft.algorithms or ("ring",) * number,
            strict=True,
        )
    )
    return with_prediction(
        Plan(
            planner=planner,
            workload_digest=workload.digest,
            ranks=cluster.ranks,
            overlap=draft.overlap,
            lanes=draft.lanes,
            buckets=buckets,
            launch=draft.launch,
        ),
        workload,
        cluster,
        scope,
    )


def with_prediction(
    plan: Plan, workload: Workload, cluster: Cluster, scope: BoundScope | None = None
) -> Plan:
    """Return the plan with the simulator's prediction on this cluster.

    ``scope`` is the family over which its bound holds; by default `scope_of` the plan.
    """
    step = simulate_step(workload, cluster, plan)
    sent, scope = _as_sent(plan, workload), scope or scope_of(plan, cluster)
    if sent is not workload:
        scope = replace(scope, wire_dtype=_types_sent(plan))
    bound_s, scope = scope.proved(sent, cluster)
    return replace(
        plan,
        predicted=Prediction(
            iteration_s=step.iteration_s,
            backward_s=step.backward_s,
            exposed_communication_s=step.exposed_communication_s,
            lower_bound_s=bound_s,
            gap=step.iteration_s / bound_s - 1.0 if bound_s > 0 else 0.0,
            bound_scope=scope.text(cluster),
        ),
    )


def predicted_s(plan: Plan) -> float:
    """Return the predicted step time of a plan that a planner made."""
    if plan.predicted is None:
        raise AssertionError("a planner's plan has its prediction")
    return plan.predicted.iteration_s


CERTIFY_GAP = 1e-2
"""Gaps up to this are not worth loading SciPy for a linear program."""


def certified(
    plan: Plan, workload: Workload, cluster: Cluster, scope: BoundScope | None = None
) -> Plan:
    """Return the plan with the best available bound over a scope, or `scope_of` it.

    A linear program gives it if contention or a limit of lanes leaves the closed forms
    a gap. Otherwise it would not improve the bound, and SciPy, which takes a third of a
    second to load, is not imported.
    """
    prediction = plan.predicted
    scope = scope or scope_of(plan, cluster)
    if (
        prediction is None
        or (cluster.contention is None and scope.max_lanes is None)
        or cluster.ranks == 1
        or scope.forward
        or scope.halves
        or prediction.gap <= CERTIFY_GAP
    ):
        return plan
    sent = _as_sent(plan, workload)
    if sent is not workload:
        scope = replace(scope, wire_dtype=_types_sent(plan))
    bound_s, scope = scope.proved(sent, cluster, certificate="lp")
    if bound_s <= prediction.lower_bound_s:
        return plan
    return replace(
        plan,
        predicted=replace(
            prediction,
            lower_bound_s=bound_s,
            gap=prediction.iteration_s / bound_s - 1.0,
            bound_scope=scope.text(cluster),
        ),
    )


def scope_of(plan: Plan, cluster: Cluster) -> BoundScope:
    """Return the plans to compare one with whose planner had no open choices.

    They have its algorithms and rings, its way of overlapping, any lanes, and any
    resource if it chose one.
    """
    algorithms = {"ring", *(bucket.algorithm for bucket in plan.buckets)}
    levels: tuple[int, ...] | None = None
    if cluster.contention is not None:
        default = cluster.contention.resources[0]
        if {b.resource for b in plan.buckets} <= {None, default}:
            levels = (default,)
    return BoundScope(
        algorithms=tuple(name for name in ALGORITHMS if name in algorithms),
        forward=plan.overlap == "forward",
        halves=plan.overlap == "halves",
        resources=levels,
    )


def _types_sent(plan: Plan) -> str:
    """Return the types in which gradients are sent, as one word for a scope."""
    return " and ".join(dict.fromkeys(bucket.wire_dtype for bucket in plan.buckets))


def _as_sent(plan: Plan, workload: Workload) -> Workload:
    """Return the workload with the types in which the plan sends it."""
    wire_of = {
        name: bucket.wire_dtype for bucket in plan.buckets for name in bucket.tensors
    }
    tensors = tuple(
        replace(
            tensor,
            dtype=wire_of[tensor.name],
            bytes=tensor.bytes
            // DTYPE_BYTES[tensor.dtype]
            * DTYPE_BYTES[wire_of[tensor.name]],
        )
        if wire_of[tensor.name] in NARROWER.get(tensor.dtype, ())
        else tensor
        for tensor in workload.tensors
    )
    if tensors == workload.tensors:
        return workload
    return replace(workload, tensors=tensors)


def wire_dtype(tensor: TensorSpec) -> str:
    """Return the type in which a tensor's gradient is sent without conversion.

    Raises:
        Infeasible: the type has no average.
    """
    if tensor.dtype not in WIRE_DTYPES:
        raise Infeasible(
            f"tensor {tensor.name!r} is of type {tensor.dtype}: only gradients of type "
            f"{', '.join(WIRE_DTYPES)} can be averaged over ranks. "
            "Leave it out of the workload."
        )
    return tensor.dtype


def dtype_starts(workload: Workload) -> tuple[int, ...]:
    """Return for each tensor the index at which the run of its type begins.

    A bucket has one type, so it cannot extend back beyond this index.
    """
    starts: list[int] = []
    for i, tensor in enumerate(workload.tensors):
        same = i > 0 and tensor.dtype == workload.tensors[i - 1].dtype
        starts.append(starts[-1] if same else i)
    return tuple(starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    r"""Time of one bucket alone: $a + b m$ (ASC-WFBP Eq. 3), zero if it is empty."""

    startup_s: float

    s_per_byte: float

    def of(self, size_bytes: float) -> float:
        """Return the seconds for a bucket of a size."""
        return self.startup_s + self.s_per_byte * size_bytes if size_bytes else 0.0


def linear_cost(workload: Workload, cluster: Cluster, *, slices: int = 1) -> LinearCost:
    """Return the cost of a bucket sent alone in ``slices`` parts on as many lanes.

    The simulator gives it at half of the workload's bytes and at all of them, so that
    searches on closed forms and the simulator agree on a and b.
    """
    granule = 8 * slices
    half = max(1, workload.total_bytes // (2 * granule)) * granule
    times = [_bucket_s(size, workload, cluster, slices) for size in (half, 2 * half)]
    s_per_byte = max(0.0, (times[1] - times[0]) / half)
    return LinearCost(
        startup_s=max(0.0, times[0] - s_per_byte * half), s_per_byte=s_per_byte
    )


def _bucket_s(
    size_bytes: int, workload: Workload, cluster: Cluster, slices: int
) -> float:
    tensor = TensorSpec(
        name="probe", bytes=size_bytes, dtype="float64", ready_s=0.0, needed_s=0.0
    )
    probe = Workload(
        name="probe",
        framework=workload.framework,
        device=workload.device,
        batch_per_rank=workload.batch_per_rank,
        forward_s=0.0,
        backward_s=0.0,
        tensors=(tensor,),
    )
    return StepModel(probe, cluster).iteration_s((1,), slices, (0,), (slices,))


def positive(planner: str, option: str, value: float) -> None:
    """Require an option above zero.

    Raises:
        SpecError: naming planner, option and value.
    """
    if not value > 0:
        raise SpecError(f"planner {planner}: {option} must be > 0, got {value:g}")


MAX_LANES = 1024
"""Upper limit for any device or network of communicators that run at once."""


def lanes_in_range(planner: str, option: str, value: int) -> None:
    """Require a number of lanes from 1 to `MAX_LANES`.

    Raises:
        SpecError: naming planner, option and value.
    """
    if not 1 <= value <= MAX_LANES:
        raise SpecError(
            f"planner {planner}: {option} must be from 1 to {MAX_LANES}, got {value}"
        )
