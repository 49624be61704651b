"""Notice parameters that differ between ranks, a part of them in each step.

After the same steps all ranks have equal parameters, bit for bit. Memory that fails, or
a program that treats one rank differently, ends that without any error. So each step
adds up the bits of a part of the parameters, and an all-reduce beside the next step
compares the sums: all are equal if the largest x is the complement of the largest ~x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = 16
"""Steps in which all parameters are compared once."""

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
    """Compares a part of the parameters after each step."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Compare these; they have an order that is equal on all ranks."""
        self._parameters = list(parameters)
        self._pending: tuple[Any, torch.Tensor] | None = None

    def launch(self, step: int, group: dist.ProcessGroup) -> None:
        """Begin to compare a part of the parameters. Collective."""
        part = self._parameters[step % PARTS :: PARTS]
        if not part:
            return
        digest = digest_of(part)
        pair = torch.stack([digest, ~digest])
        work = dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._pending = work, pair

    def differ(self) -> bool:
        """Return whether ranks differ in what was launched last, if anything was.

        Raises:
            RuntimeError: a rank is lost.
        """
        if self._pending is None:
            return False
        (work, pair), self._pending = self._pending, None
        work.wait()
        return bool(pair[0] != ~pair[1])

    def forget(self) -> None:
        """Compare no more what was launched: the ranks have changed."""
        self._pending = None

    def gather(self, group: dist.ProcessGroup) -> list[int]:
        """Return each rank's sum over all parameters. Collective.

        Raises:
            RuntimeError: a rank is lost.
        """
        mine = digest_of(self._parameters).reshape(1)
        rows = [torch.zeros_like(mine) for _ in range(group.size())]
        dist.all_gather(rows, mine, group=group)
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
