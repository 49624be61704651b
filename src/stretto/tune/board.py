"""Small agreements between steps: what all ranks measured, what rank 0 decided."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@final
class Board:
    """A model's ranks around one table. Every rank must call the same methods in turn.

    On NCCL the numbers would go through the device and make the host wait for it, so
    they travel over a Gloo group of their own there. Not yet run on a GPU.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._numbers: Any = group
        if dist.get_backend(group) == "nccl":
            self._numbers = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="gloo",
                use_local_synchronization=True,
            )

    def most(self, *values: float) -> tuple[float, ...]:
        """The largest of all ranks' values, one by one; infinite where any is."""
        if self.size == 1:
            return values
        table = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._numbers)
        return tuple(table.tolist())

    def decision(self, number: int) -> int:
        """Rank 0's number."""
        if self.size == 1:
            return number
        row = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(row, group=self._numbers, group_src=0)
        return int(row[0])

    def shared(self, value: Any) -> Any:
        """Rank 0's value, of any kind that pickles."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]


@final
class StepClock:
    """Lengths of training steps, from the end of one `begin` to the next one's start.

    A step may hold several micro-steps, of which the last reduces. One with an
    evaluation or a pause of ours in it does not count.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._reduces = False
        self._disturbed = False

    def ended_s(self, now_s: float) -> float | None:
        """Length of the step that ends at ``now_s``, infinite if it does not count.

        ``None``: no step ends here, for the last forward did not reduce.
        """
        if self._began_s is None or not self._reduces:
            return None
        return math.inf if self._disturbed else now_s - self._began_s

    def begin(self, now_s: float, *, reduces: bool, new_step: bool) -> None:
        """A forward begins, of a new step or a further micro-step of the last."""
        if new_step or self._began_s is None:
            self._began_s = now_s
            self._disturbed = False
        self._reduces = reduces

    def disturb(self) -> None:
        """Something else than training happened within this step."""
        self._disturbed = True
