"""PyTorch's bucket rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners._orders import grouped
from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    dtype_starts,
    finish,
    positive,
)

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload

FIRST_CAP_BYTES = 2**20
CAP_BYTES = 25 * 2**20


@final
class DdpPlanner(AbstractPlanner):
    """Buckets as PyTorch's DistributedDataParallel builds them, on one lane.

    A bucket closes with the tensor that reaches its cap: the first bucket's cap is
    ``first_cap_bytes``, the others' ``cap_bytes``. By default these are 1 MiB and
    25 MiB. If a cap is given (PyTorch's ``bucket_cap_mb``) the first bucket has it too,
    as in PyTorch. Where types alternate, one bucket for each type is open at a time, as
    in DDP; each type's first bucket has the first cap.
    """

    name: ClassVar[str] = "ddp"

    def __init__(
        self, *, cap_bytes: int | None = None, first_cap_bytes: int | None = None
    ) -> None:
        """Set the caps of the buckets; ``None``: PyTorch's default."""
        if first_cap_bytes is None:
            first_cap_bytes = FIRST_CAP_BYTES if cap_bytes is None else cap_bytes
        if cap_bytes is None:
            cap_bytes = CAP_BYTES
        positive(self.name, "cap_bytes", cap_bytes)
        positive(self.name, "first_cap_bytes", first_cap_bytes)
        self._caps = (first_cap_bytes, cap_bytes)

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return buckets by the caps; times do not matter."""
        view = grouped(workload, self._caps)
        draft = Draft.in_turn(capped_ends(view, *self._caps))
        return finish(draft, self.name, workload, cluster, view=view)


def capped_ends(
    workload: Workload, first_cap_bytes: int, cap_bytes: int
) -> tuple[int, ...]:
    """Return ends of buckets that close with the tensor that reaches the cap.

    Each type's first bucket has the first cap.
    """
    starts = dtype_starts(workload)
    ends: list[int] = []
    open_bytes = 0
    caps: dict[str, int] = {}
    for i, tensor in enumerate(workload.tensors):
        if starts[i] == i and i and ends[-1:] != [i]:
            ends.append(i)
            open_bytes = 0
        open_bytes += tensor.bytes
        if open_bytes >= caps.get(tensor.dtype, first_cap_bytes):
            ends.append(i + 1)
            open_bytes = 0
            caps[tensor.dtype] = cap_bytes
    if ends[-1:] != [len(starts)]:
        ends.append(len(starts))
    return tuple(ends)
