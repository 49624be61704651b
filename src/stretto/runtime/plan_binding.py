"""Check a plan against a model, and compute each bucket's schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stretto.errors import PlanMismatch
from stretto.runtime import backends
from stretto.runtime.bucket_schedule import BucketSchedule, Slice
from stretto.runtime.lanes import check_lanes
from stretto.runtime.ranks import TensorRow
from stretto.schema import NARROWER, model_digest, slice_bounds, tensors_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stretto.runtime.backends.base import AbstractBackend
    from stretto.schema import Bucket, Plan


def ignored_names(module: nn.Module, arguments: dict[str, Any]) -> frozenset[str]:
    """Return the names that DDP ignores, given its arguments by name."""
    delayed = arguments.get("delay_all_reduce_named_params") or ()
    return frozenset(
        (
            *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
            *(name for name, _ in delayed),
        )
    )


def why_unplannable(arguments: dict[str, Any]) -> str | None:
    """Return why DDP's arguments, by name, prevent a plan, or None."""
    if arguments.get("skip_all_reduce_unused_params"):
        return "skip_all_reduce_unused_params=True omits buckets in some steps."
    if arguments.get("delay_all_reduce_named_params"):
        # DDP does not wait for it: the later buckets on the same group do.
        return (
            "the all-reduce of delay_all_reduce_named_params relies on DDP's buckets "
            "being sent behind it on one process group."
        )
    return None


def parameter_rows(
    module: nn.Module, ignored: Collection[str] = ()
) -> list[tuple[TensorRow, nn.Parameter]]:
    """Return rows and parameters in the order of DDP's parameter list.

    ``ignored`` names the parameters that DDP ignores.
    """
    rows = []
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if not parameter.requires_grad or f"{prefix}.{leaf}" in ignored:
                continue
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            size_bytes = 0  # uninitialized, which DDP itself refuses
            if not is_lazy(parameter):
                size_bytes = parameter.numel() * parameter.element_size()
            row = TensorRow(name, size_bytes, _dtype_name(parameter.dtype))
            rows.append((row, parameter))
    return rows


def schedules_of(
    plan: Plan,
    table: Sequence[tuple[TensorRow, nn.Parameter]],
    module: nn.Module,
    *,
    backend: str,
    device: torch.device,
) -> list[BucketSchedule]:
    """Return the schedule of each bucket of ``plan``, in launch order.

    Raises:
        PlanMismatch: the plan is for another model, or needs a feature that this
            runtime does not support.
    """
    index_of = {row.name: i for i, (row, _) in enumerate(table)}
    _check_names(plan, index_of)
    _check_digest(plan, [row for row, _ in table], index_of)
    kind = backends.get(backend)
    _check_supported(plan, kind, device)
    sparse, are_named = sparse_parameters(module), names_algorithms(plan)
    schedules = [
        _schedule_of(
            i,
            bucket,
            plan,
            [table[index_of[n]] for n in bucket.tensors],
            [index_of[n] for n in bucket.tensors],
            sparse,
            kind.collectives_per_slice(bucket.resource),
            bucket.algorithm if are_named else "",
        )
        for i, bucket in enumerate(plan.buckets)
    ]
    if device.type != kind.device_type:
        for schedule in schedules:
            if schedule.wire is not None:
                raise PlanMismatch(
                    f"bucket {schedule.index} has wire_dtype {schedule.wire!r}, which "
                    f"{backend} does not support for tensors on {device.type}: plan "
                    "without a wire_dtype, or use the device's own backend."
                )
    return schedules


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sparse_parameters(module: nn.Module) -> set[int]:
    """Return the ids of parameters whose gradients are sparse."""
    return {
        id(parameter)
        for owner in module.modules()
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        for parameter in owner.parameters(recurse=False)
    }


_AGAIN = "Run `stretto profile` and plan again."


def _check_names(plan: Plan, known: dict[str, int]) -> None:
    planned = {}
    for i, bucket in enumerate(plan.buckets):
        for name in bucket.tensors:
            if name not in known:
                raise PlanMismatch(
                    f"bucket {i} names tensor {name!r}, which this model lacks or does "
                    f"not train: the plan was made for another model. {_AGAIN}"
                )
            planned[name] = i
    for name in known:
        if name not in planned:
            raise PlanMismatch(
                f"no bucket contains parameter {name!r} of this model: the plan was "
                f"made for another model. {_AGAIN}"
            )


def _check_digest(
    plan: Plan, rows: Sequence[TensorRow], index_of: dict[str, int]
) -> None:
    """Require that sizes and types are those that the plan was made for.

    Digests of version 0.1 cover an order that the plan need not keep, so the plan's
    order is tried, then the order of declaration, forward and backward. An empty digest
    means that a plan was made by hand, for any model with these names.
    """
    if not plan.workload_digest:
        return
    in_plan = [rows[index_of[n]] for bucket in plan.buckets for n in bucket.tensors]
    tried = [model_digest(rows)]
    tried += [tensors_digest(order) for order in (in_plan, rows, rows[::-1])]
    if plan.workload_digest not in tried:
        raise PlanMismatch(
            f"the plan was made for a model with digest {plan.workload_digest}, this "
            f"one has {tried[0]}: names agree, but sizes or types differ. "
            f"{_AGAIN}"
        )


def check_features(plan: Plan) -> None:
    """Require that a plan needs nothing that this runtime lacks for every model.

    Raises:
        PlanMismatch: it does.
    """
    if plan.overlap == "halves":
        raise PlanMismatch(
            "this runtime does not support overlap 'halves': plan with 'backward', "
            "'forward' or 'none'."
        )
    for i, bucket in enumerate(plan.buckets):
        if bucket.algorithm not in _SUPPORTED:
            raise PlanMismatch(
                f"this runtime does not support algorithm {bucket.algorithm!r} of "
                f"bucket {i} yet: plan with {' or '.join(map(repr, _SUPPORTED))}."
            )


_USUAL_ALGORITHM = "ring"
"""A bucket's algorithm if its plan chooses none."""

_BACKEND_OF = {"hierarchical": "hierarchical"}
"""The backend of lanes that an algorithm needs, by algorithm."""

_SUPPORTED = (_USUAL_ALGORITHM, *_BACKEND_OF)


def names_algorithms(plan: Plan) -> bool:
    """Return whether a plan chooses each bucket's algorithm.

    Otherwise all its buckets use their lanes' own: rings on Gloo and NCCL, two levels
    on hierarchical lanes.
    """
    return any(bucket.algorithm != _USUAL_ALGORITHM for bucket in plan.buckets)


def lane_backend_for(plan: Plan) -> str | None:
    """Return the backend of lanes that a plan's algorithms need, if they need one."""
    for bucket in plan.buckets:
        if bucket.algorithm in _BACKEND_OF:
            return _BACKEND_OF[bucket.algorithm]
    return None


def _check_algorithms(plan: Plan, kind: AbstractBackend, device: torch.device) -> None:
    if not names_algorithms(plan):
        return
    for i, bucket in enumerate(plan.buckets):
        if bucket.algorithm not in kind.algorithms:
            wanted = _BACKEND_OF.get(bucket.algorithm)
            fits = wanted and backends.get(wanted).device_type == device.type
            remedy = f"pass lane_backend={wanted!r}, or " if fits else ""
            raise PlanMismatch(
                f"{kind.name} lanes do not support algorithm {bucket.algorithm!r} of "
                f"bucket {i} with tensors on {device.type}: {remedy}plan with "
                f"{' or '.join(kind.algorithms)}."
            )


def _check_supported(plan: Plan, kind: AbstractBackend, device: torch.device) -> None:
    check_features(plan)
    _check_algorithms(plan, kind, device)
    for i, bucket in enumerate(plan.buckets):
        pieces = bucket.slices * kind.collectives_per_slice(bucket.resource)
        if pieces > 1 and device.type != kind.device_type:
            raise PlanMismatch(
                f"this runtime does not support the {bucket.slices} slices of bucket "
                f"{i}, of resource {bucket.resource or 1}, on {kind.name} with tensors "
                f"on {device.type} yet: plan with 1 slice and resource null."
            )
    check_lanes(plan, kind.name, device)


def _check_wire(
    index: int, wire: str, dtype: str, device: torch.device, *, sparse: bool
) -> None:
    possible = () if sparse else NARROWER.get(dtype, ())
    if wire not in possible:
        kind = "sparse " if sparse else ""
        others = f" or {' or '.join(possible)}" if possible else ""
        raise PlanMismatch(
            f"bucket {index} has wire_dtype {wire!r}, but its gradients are "
            f"{kind}{dtype}: set wire_dtype to {dtype}{others}."
        )
    if device.type not in ("cpu", "cuda"):
        raise PlanMismatch(
            f"bucket {index} has wire_dtype {wire!r}, which is supported on cpu and "
            f"cuda, not on {device.type}: set wire_dtype to {dtype}."
        )


def _schedule_of(
    index: int,
    bucket: Bucket,
    plan: Plan,
    rows: Sequence[tuple[TensorRow, nn.Parameter]],
    positions: Sequence[int],
    sparse: set[int],
    pieces: int,
    algorithm: str,
) -> BucketSchedule:
    dtypes = sorted({row.dtype for row, _ in rows})
    devices = sorted({str(parameter.device) for _, parameter in rows})
    if len(dtypes) > 1 or len(devices) > 1:
        mixed = " and ".join(dtypes if len(dtypes) > 1 else devices)
        raise PlanMismatch(
            f"bucket {index} mixes {mixed}: one collective supports one type on one "
            f"device. {_AGAIN}"
        )
    is_sparse = any(id(p) in sparse for _, p in rows)
    wire = None if bucket.wire_dtype == dtypes[0] else bucket.wire_dtype
    if wire is not None:
        _check_wire(index, wire, dtypes[0], rows[0][1].device, sparse=is_sparse)
    if is_sparse and (len(rows) > 1 or bucket.slices * pieces > 1):
        raise PlanMismatch(
            f"bucket {index} contains a parameter with sparse gradients, which must be "
            "alone in its bucket, in one slice and on one connection."
        )
    elements = sum(parameter.numel() for _, parameter in rows)
    bounds = slice_bounds(elements, bucket.slices) or ((0, elements),)
    # The Reducer sends complex gradients as pairs of real numbers.
    reals = 2 if getattr(torch, dtypes[0]).is_complex else 1
    return BucketSchedule(
        index=index,
        tensors=bucket.tensors,
        parameters=tuple(positions),
        elements=reals * elements,
        wire=wire,
        slices=tuple(
            Slice(
                lane=(bucket.lane + i) % plan.lanes,
                resource=bucket.resource,
                algorithm=algorithm,
                start=reals * (start + first),
                end=reals * (start + last),
            )
            for i, (start, end) in enumerate(bounds)
            for first, last in slice_bounds(end - start, pieces) or ((0, 0),)
        ),
    )
