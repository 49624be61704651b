"""Norms of a single row, whose gradients PyTorch may compute wrongly on CPUs.

A tensor with one row may be contiguous in a memory format and not have its strides.
PyTorch's backward of a norm then takes values in another order, see "Known issues
outside stretto". One process has more rows where a rank has one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def plain_row(x: Tensor) -> Tensor:
    """Return a tensor with its values; one row on a CPU has the usual strides."""
    return x.contiguous() if _is_one_row(x) else x


def normalized(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return a norm's output, with the gradient that any number of rows gives."""
    if not _is_one_row(x):
        return norm(x)
    out = norm(x.contiguous())
    if out.requires_grad:
        out.register_hook(_plain_gradient)
    return out


def _plain_gradient(grad: Tensor | None) -> Tensor | None:
    """Return a gradient with the usual strides; a user's backward may give none."""
    return None if grad is None else plain_row(grad)


@final
class PlainRows:
    """Replaces the forward of a norm, for the gradient that more rows give."""

    def __init__(self, norm: Any) -> None:
        self._forward = partial(type(norm).forward, norm)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm's output."""
        return normalized(self._forward, x)


def _is_one_row(x: Tensor) -> bool:
    return x.shape[:1] == (1,) and x.device.type == "cpu"
