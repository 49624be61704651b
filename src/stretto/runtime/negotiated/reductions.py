"""Scaling, and element types that are sent as other types.

Sums of float16 and bfloat16 on the CPU are scaled in float32 (torch computes an element
in float32 and rounds once), integers in float64; an average of integers truncates.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stretto.runtime.negotiated.requests import Op

if TYPE_CHECKING:
    from stretto.runtime.negotiated.requests import Request

REDUCE_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.AVERAGE: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}


def dtype_of(request: Request) -> torch.dtype:
    """Return the torch dtype of a request."""
    found: torch.dtype = getattr(torch, request.dtype)
    return found


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a reduction is sent: int16 as int32.

    Neither Gloo nor NCCL supports int16.
    """
    return torch.int32 if dtype is torch.int16 else dtype


def options(request: Request) -> Any:
    """Return the options of a request's all-reduce."""
    found: Any = dist.AllreduceOptions()
    found.reduceOp = REDUCE_OPS[request.op]
    return found


def scale(values: torch.Tensor, factor: float) -> None:
    """Multiply in place."""
    if factor == 1.0:
        return
    if values.is_floating_point():
        values.mul_(factor)
    else:
        values.copy_(values.double().mul_(factor))


def finish(values: torch.Tensor, request: Request, size: int) -> None:
    """Apply average and postscale, in place."""
    if request.op is Op.AVERAGE:
        if values.is_floating_point():
            values.div_(size)
        else:
            values.copy_(torch.div(values, size, rounding_mode="trunc"))
    scale(values, request.postscale)


def changes(request: Request) -> bool:
    """Return whether `finish` changes any values."""
    return request.op is Op.AVERAGE or request.postscale != 1.0


def combine(rows: torch.Tensor, op: Op) -> torch.Tensor:
    """Combine the rows of a matrix, in rank order.

    float16 and bfloat16 are summed in float32 and rounded once.
    """
    if op in (Op.MIN, Op.MAX) or rows.dtype is torch.bool:
        takes_lowest = op in (Op.MIN, Op.PRODUCT)
        if rows.dtype is torch.bool:
            return rows.all(0) if takes_lowest else rows.any(0)
        return rows.amin(0) if takes_lowest else rows.amax(0)
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    step = torch.mul if op is Op.PRODUCT else torch.add
    return functools.reduce(step, wide.unbind(0)).to(rows.dtype)


def row_bounds(rows: int, size: int) -> list[int]:
    """Return the first row of each rank's share, and the end.

    Earlier ranks get one more row.
    """
    share, more = divmod(rows, size)
    return [i * share + min(i, more) for i in range(size + 1)]
