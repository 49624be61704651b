"""Detect layers whose backward is not torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from stretto.burst.hooks import HOOKS, HOOKS_OF_ALL
from stretto.burst.tracing.around import around_now
from stretto.burst.tracing.recorder import apply_function
from stretto.burst.tracing.replaced import is_torchs_forward

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stretto.burst.tracing.layers import LayerNode

_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # noqa: SLF001

_TORCH_OPS = ("aten::", "prims::", "prim::")


def with_own_backward(nodes: Iterable[LayerNode]) -> frozenset[str]:
    """Return names of layers whose backward may do more than derive torch's operations.

    Derivatives are linear in the gradient that comes in, and mix samples only where
    forward does. An ``autograd.Function``, an operation of another library, a hook or
    a mode may do anything.
    """
    in_mode = bool(around_now())
    return frozenset(n.name for n in nodes if in_mode or any(own_backwards_in(n)))


def own_backwards_in(node: LayerNode) -> Iterator[fx.Node]:
    """Yield a layer's operations whose backward is not derived from torch's."""
    graph = node.module.graph
    assert isinstance(graph, fx.Graph)  # noqa: S101
    for op in graph.nodes:
        if op.op == "call_function":
            target: Any = op.target
            name = str(target.name() if isinstance(target, _OPS[:1]) else "")
            if isinstance(target, _OPS[1:]):
                name = str(target._qualified_op_name)  # noqa: SLF001
            is_foreign = isinstance(target, _OPS) and not name.startswith(_TORCH_OPS)
            if is_foreign or target is apply_function:
                yield op
        elif op.op == "call_module" and _has_own(
            node.module.get_submodule(str(op.target))
        ):
            yield op


def _has_own(module: torch.nn.Module) -> bool:
    for part in module.modules():
        forward = getattr(type(part), "forward", None)
        if not is_torchs_forward(forward):
            return True
        if any(getattr(part, hooks) for hooks in HOOKS):
            return True
    return any(HOOKS_OF_ALL.values())
