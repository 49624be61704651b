"""Run PyTorch's communication hooks, such as PowerSGD, over a plan's buckets and lanes.

# Note [A communicator per bucket on Gloo]
PowerSGD sends a bucket in three all-reduces, each started by a callback of the previous
one. Gloo's callbacks run on its own threads, so on one communicator the collectives of
two buckets would start in an order that differs between ranks. On Gloo each bucket
therefore has its own communicator, where only its own chain runs. On NCCL callbacks run
on the launching thread, in launch order, and each bucket uses its plan's lane.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
"""Attributes in which PowerSGD keeps tensors by bucket."""


def on_lanes(
    hook: Callable[..., Any], groups_of: Callable[[], tuple[object, Sequence[Any]]]
) -> Callable[..., Any]:
    """Return the hook, with each bucket's collectives on the bucket's own group.

    ``groups_of`` returns the owner of the buckets and a group for each bucket, or one
    for all. When the owner changes, tensors that PowerSGD keeps for the old buckets are
    dropped. A state without ``process_group`` is replaced by the group, as the default
    hooks expect.
    """
    seen: list[object] = []

    @functools.wraps(hook)
    def run(state: Any, bucket: Any) -> Any:
        plan, groups = groups_of()
        if not seen or seen[0] is not plan:
            seen[:] = [plan]
            for name in _MEMORIES:
                if hasattr(state, name):
                    getattr(state, name).clear()
        group = groups[0 if len(groups) == 1 else bucket.index()]
        if not hasattr(state, "process_group"):
            return hook(group, bucket)
        state.process_group = group
        return hook(state, bucket)

    return run
