"""Orders of tensors in which buckets of one type can be contiguous.

Searches cut a list of tensors into contiguous buckets, and a bucket has one type. Where
types alternate in the order of readiness that leaves many small buckets. In another
order, in which tensors wait for later ones, tensors of one type are neighbors.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.schema import Plan, Workload

_WINDOWS = (1, 4, 16)
"""Numbers of parts of equal bytes into which backward is cut to group each by type."""


def alternates(workload: Workload) -> bool:
    """Return whether tensors of one type are separated by others."""
    return num_runs(workload) > len({tensor.dtype for tensor in workload.tensors})


def num_runs(workload: Workload) -> int:
    """Return how many runs of one type there are: no plan has fewer buckets."""
    tensors = workload.tensors
    return 1 + sum(now.dtype != before.dtype for before, now in pairwise(tensors))


def grouped(workload: Workload, caps_bytes: tuple[int, int]) -> Workload:
    """Return the workload in the order of PyTorch's buckets, one open for each type."""
    if not alternates(workload):
        return workload
    groups = _ddp_groups(workload, *caps_bytes)
    return _reordered(workload, [i for group in groups for i in group])


def views(workload: Workload, caps_bytes: tuple[int, int]) -> tuple[Workload, ...]:
    """Return the workload in every order worth planning in, its own first."""
    if not alternates(workload):
        return (workload,)
    found = [workload, grouped(workload, caps_bytes)]
    found += [_windowed(workload, windows) for windows in _WINDOWS]
    return tuple({tuple(t.name for t in view.tensors): view for view in found}.values())


def view_of(workload: Workload, plan: Plan) -> Workload:
    """Return the workload in the order of a plan's buckets, which hold all tensors."""
    place = {tensor.name: i for i, tensor in enumerate(workload.tensors)}
    return _reordered(
        workload, [place[name] for bucket in plan.buckets for name in bucket.tensors]
    )


def in_order(workload: Workload, plan: Plan) -> bool:
    """Return whether a plan's buckets hold exactly the tensors in their order."""
    held = [name for bucket in plan.buckets for name in bucket.tensors]
    return held == [tensor.name for tensor in workload.tensors]


def _reordered(workload: Workload, order: Sequence[int]) -> Workload:
    """Return the workload in another order, ready times never falling.

    Buckets start in the order of a plan, so a bucket that ends at a tensor can start
    only when all tensors before it are ready too.
    """
    tensors = [workload.tensors[i] for i in order]
    ready_s = accumulate((tensor.ready_s for tensor in tensors), max)
    return replace(
        workload,
        tensors=tuple(
            replace(tensor, ready_s=at_s)
            for tensor, at_s in zip(tensors, ready_s, strict=True)
        ),
    )


def _ddp_groups(
    workload: Workload, first_cap_bytes: int, cap_bytes: int
) -> Iterable[list[int]]:
    """Return buckets as PyTorch fills them: those left open at the end come last."""
    closed: list[list[int]] = []
    open_groups: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    caps: dict[str, int] = {}
    for i, tensor in enumerate(workload.tensors):
        dtype = tensor.dtype
        open_groups.setdefault(dtype, []).append(i)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + tensor.bytes
        if open_bytes[dtype] >= caps.get(dtype, first_cap_bytes):
            closed.append(open_groups.pop(dtype))
            open_bytes[dtype] = 0
            caps[dtype] = cap_bytes
    return [*closed, *sorted(open_groups.values(), key=lambda group: group[-1])]


def _windowed(workload: Workload, windows: int) -> Workload:
    """Return the order with each part of equal bytes grouped, large types first."""
    total = max(1, workload.total_bytes)
    sizes: dict[str, int] = {}
    for tensor in workload.tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    ranking = sorted(sizes, key=lambda dtype: -sizes[dtype])
    before = accumulate((tensor.bytes for tensor in workload.tensors), initial=0)
    keys = [
        (min(windows - 1, windows * begin // total), ranking.index(tensor.dtype), i)
        for i, (tensor, begin) in enumerate(zip(workload.tensors, before, strict=False))
    ]
    return _reordered(workload, [i for _, _, i in sorted(keys)])
