"""The parameters and buffers of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.burst.tracing.torch_modules import BatchNorm

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.burst.tracing.layers import LayerNode


def tensors_of(node: LayerNode) -> list[Tensor]:
    """Return a layer's parameters and buffers, in one order on all ranks."""
    return [*node.module.parameters(), *node.module.buffers()]


def trained_and_changed(node: LayerNode) -> list[Tensor]:
    """Return a layer's parameters, and the buffers that its forward changes."""
    if node.keeps_state:
        return tensors_of(node)
    found: list[Tensor] = list(node.module.parameters())
    for part in node.module.modules():
        if isinstance(part, BatchNorm):
            found += part.buffers()
    return found
