"""Which parameters each of a model's outputs is computed from.

Read off the recorded operations, so that it does not depend on which parameters are
frozen. Gradients pass neither operations under ``no_grad`` nor ``detach()`` nor values
that are no floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.burst.tracing.packing import Results

_ENDS = ("detach", "detach_")


def behind_outputs(
    root: fx.GraphModule,
    results: Results,
    shapes: Mapping[fx.Node, tuple[Any, Any]],
    module: nn.Module,
) -> tuple[frozenset[str], ...] | None:
    """Return for each output the parameters that it is computed from, by name.

    Parameters that no operation shows to be behind an output, such as those that an
    ``autograd.Function`` reads by itself, count as behind each. ``None``: the same
    parameters are behind all outputs.
    """
    packing = results.packing
    if packing is None or packing.is_one:
        return None
    (end,) = (node for node in root.graph.nodes if node.op == "output")
    packed = end.args[0]
    parts = packed.args[0] if isinstance(packed, fx.Node) and packed.args else ()
    if not isinstance(parts, (tuple, list)) or len(parts) != len(packing.parts):
        return None
    names = {id(p): name for name, p in module.named_parameters()}
    found = [_behind(part, root, shapes, names) for part in parts]
    others = frozenset(names.values()).difference(*found)
    behind = tuple(frozenset(some | others) for some in found)
    return behind if len(set(behind)) > 1 else None


def _behind(
    output: Any,
    root: fx.GraphModule,
    shapes: Mapping[fx.Node, tuple[Any, Any]],
    names: Mapping[int, str],
) -> set[str]:
    found: set[str] = set()
    seen: set[fx.Node] = set()
    left = [output]
    while left:
        node = left.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.op == "get_attr":
            held = _held(root, str(node.target))
            if isinstance(held, Tensor) and id(held) in names:
                found.add(names[id(held)])
            continue
        if _stops(node, shapes):
            continue
        if node.op == "call_module":
            part = _held(root, str(node.target))
            if isinstance(part, nn.Module):
                found |= {names[id(p)] for p in part.parameters() if id(p) in names}
        left += node.all_input_nodes
    return found


def _stops(node: fx.Node, shapes: Mapping[fx.Node, tuple[Any, Any]]) -> bool:
    """Return whether no gradient passes an operation."""
    context = node.meta.get("context")
    if context is not None and not context.grad:
        return True
    name = node.target if isinstance(node.target, str) else None
    name = name or getattr(node.target, "__name__", "")
    if node.op in ("call_method", "call_function") and name in _ENDS:
        return True
    given = shapes.get(node)
    if given is None:
        return False
    dtype: torch.dtype = given[0].dtype
    return not (dtype.is_floating_point or dtype.is_complex)


def _held(root: nn.Module, target: str) -> Any:
    found: Any = root
    for name in target.split("."):
        found = getattr(found, name, None)
    return found
