"""Tensors in values, and their memory, read to send, hash or reinterpret it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def tensors_among(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: itself, or in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_among(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_among(inner)


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
