"""Count the hosts of a group's ranks."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def count_hosts(group: ProcessGroup | None = None) -> int:
    """Return the number of hosts under a group's ranks, by host name; collective.

    Hosts with different numbers of ranks are counted as one host per rank, because a
    cluster has the same number on each.
    """
    ranks = dist.get_world_size(group)
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, platform.node(), group=group)
    count = len(set(names))
    return count if ranks % count == 0 else ranks
