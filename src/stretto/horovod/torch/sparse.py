"""Reduce sparse tensors of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import Average, ReduceOp, Sum
from stretto.horovod.torch.allgather import allgather_async
from stretto.horovod.torch.submission import synchronize
from stretto.runtime.torch_compat import sparse_coo_tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to reduce a sparse tensor over all ranks; call the result to wait.

    Every rank gets all ranks' entries, so the bytes grow with the number of ranks.

    Args:
        tensor: COO layout, the same shape on every rank; any number of entries.
        name: Unique among operations that are under way.
        op: `Average` or `Sum`.
        process_set: The participating ranks; all of them must call this.

    Returns:
        A function that waits and returns the combined tensor, not coalesced.

    Raises:
        ValueError: the tensor is not COO, ``op`` is another reduction, or as in
            `allgather_async`.
    """
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(
            f"sparse_allreduce_async takes a COO tensor, got {tensor.layout}. Use "
            "allreduce_async for dense ones, to_sparse_coo() for other layouts."
        )
    if op not in (Average, Sum):
        raise ValueError(
            f"sparse_allreduce_async takes op=Average or op=Sum, got {op!r}"
        )
    # Entries are concatenated along the first dimension, which is the second of
    # indices.
    rows = tensor._indices().transpose(0, 1).contiguous()  # noqa: SLF001
    indices = allgather_async(rows, f"{name}.indices", process_set)
    values = allgather_async(
        tensor._values(),  # noqa: SLF001
        f"{name}.values",
        process_set,
    )
    shape, size = tensor.shape, process_set.size()

    def wait() -> torch.Tensor:
        found = synchronize(values)
        if op == Average:
            found = found / size
        return sparse_coo_tensor(synchronize(indices).transpose(0, 1), found, shape)

    return wait
