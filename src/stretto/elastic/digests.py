"""Notice parameters that differ between ranks: few in each step, many part by part.

After the same steps all ranks have equal parameters, bit for bit. Memory that fails, or
a program that treats one rank differently, ends that without any error. So each step
adds up the bits of a part of the parameters, and an all-reduce beside the next step
compares the sums: all are equal if the largest x is the complement of the largest ~x.
The same all-reduce says whether a rank is to leave: see Note [A rank leaves between two
steps] in `draining`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.runtime.waits import wait_until_over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_PARTS = 16
"""Steps in which all parameters are compared once, at most."""

_PART_BYTES = 2 << 20
_PART_TENSORS = 16
"""Limits of one step's comparison, unless that would take more steps than `MAX_PARTS`:
about 0.5 ms of one core."""

_SAME_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def digest_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a sum over the bits of tensors, as one int64."""
    total = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        kind = _SAME_SIZE.get(tensor.element_size())
        if kind is None or tensor.is_sparse:
            continue
        flat = tensor.detach().reshape(-1)
        total = 31 * total + flat.view(kind).sum(dtype=torch.int64).cpu()
    return total


@final
class ParameterDigests:
    """Compares parameters after each step."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Compare these; they have an order that is equal on all ranks."""
        self._parameters = list(parameters)
        tensors = len(self._parameters)
        size_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        parts = max(-(-size_bytes // _PART_BYTES), -(-tensors // _PART_TENSORS), 1)
        self.parts = min(parts, MAX_PARTS)
        """Steps in which all parameters are compared once."""

        self._pending: tuple[Any, torch.Tensor, Callable[[], bool]] | None = None

    def launch(
        self,
        step: int,
        group: dist.ProcessGroup,
        is_over: Callable[[], bool],
        *,
        leaves: bool = False,
    ) -> None:
        """Begin to compare parameters, all or a part of them. Collective.

        Args:
            step: chooses the part.
            group: of all ranks.
            is_over: whether they have stopped training together.
            leaves: whether this rank is to leave.
        """
        digest = digest_of(self._parameters[step % self.parts :: self.parts])
        row = torch.stack([digest, ~digest, torch.tensor(int(leaves))])
        work = dist.all_reduce(row, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._pending = work, row, is_over

    def result(self) -> tuple[bool, bool]:
        """Return whether ranks differ in what was compared last, and if one leaves.

        Raises:
            CommTimeout, RuntimeError: a rank is lost.
        """
        if self._pending is None:
            return False, False
        (work, row, is_over), self._pending = self._pending, None
        wait_until_over(work, is_over)
        return bool(row[0] != ~row[1]), bool(row[2])

    def forget(self) -> None:
        """Drop the comparison that was launched: the ranks have changed."""
        self._pending = None

    def gather(
        self, group: dist.ProcessGroup, is_over: Callable[[], bool]
    ) -> list[int]:
        """Return each rank's sum over all parameters. Collective.

        Raises:
            CommTimeout, RuntimeError: a rank is lost.
        """
        return gathered(digest_of(self._parameters), group, is_over)


def gathered(
    value: torch.Tensor, group: dist.ProcessGroup, is_over: Callable[[], bool]
) -> list[int]:
    """Return each rank's value, an int64. Collective.

    Args:
        value: this rank's.
        group: of all ranks.
        is_over: whether they have stopped training together.

    Raises:
        CommTimeout, RuntimeError: a rank is lost.
    """
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    wait_until_over(
        dist.all_gather(rows, value.reshape(1), group=group, async_op=True), is_over
    )
    return [int(row) for row in rows]


def minority(digests: Sequence[int]) -> tuple[int | None, list[int]]:
    """Return a rank of the majority, if there is one, and the ranks that differ.

    Without a majority all ranks differ.
    """
    for rank, digest in enumerate(digests):
        others = [r for r, row in enumerate(digests) if row != digest]
        if 2 * len(others) < len(digests):
            return rank, others
    return None, list(range(len(digests)))
