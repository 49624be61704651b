"""Tensors whose memory is read directly: to send, hash or reinterpret their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def in_memory(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor whose memory contains its values.

    ``conj()`` of a complex tensor, and ``imag`` of that, only mark their memory as
    conjugated or negated, even in a contiguous tensor; reading the memory would lose
    the mark. A tensor of one element counts as contiguous whatever its strides, but it
    can't be viewed as another type.
    """
    found = tensor.resolve_conj().resolve_neg().contiguous()
    if found.stride()[-1:] in ((), (1,)):
        return found
    return found.clone(memory_format=torch.contiguous_format)


def bytes_of(tensor: Tensor) -> Any:
    """Return a tensor's values as bytes, without a copy if they are on the CPU."""
    whole = in_memory(tensor.detach().cpu()).view(-1)
    return whole.view(torch.uint8).numpy() if len(whole) else b""
