"""Join neighboring tensors until a workload is small enough to search."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.schema import TensorSpec, Workload


def coarse(workload: Workload, tensors: int) -> tuple[Workload, tuple[int, ...]]:
    """Return the workload with neighbors joined until few tensors are left.

    Also return where each of these ends in the original workload. A workload of few
    tensors is unchanged. Tensors are joined only within one type, and only while
    together they hold no more than a share of the bytes and of the time of backward,
    so large or distant tensors stay apart.
    """
    if len(workload.tensors) <= tensors:
        return workload, tuple(range(1, len(workload.tensors) + 1))
    share_bytes = 2 * workload.total_bytes / tensors
    share_s = 2 * workload.backward_s / tensors
    joined: list[TensorSpec] = []
    ends: list[int] = []
    begin_s = 0.0
    for i, tensor in enumerate(workload.tensors):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.dtype == tensor.dtype
            and last.bytes + tensor.bytes <= share_bytes
            and tensor.ready_s - begin_s <= share_s
        ):
            joined[-1] = replace(
                tensor, name=last.name, bytes=last.bytes + tensor.bytes
            )
            ends[-1] = i + 1
        else:
            joined.append(tensor)
            ends.append(i + 1)
            begin_s = tensor.ready_s
    return replace(workload, tensors=tuple(joined)), tuple(ends)
