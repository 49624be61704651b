"""Which parameters each of a model's outputs is computed from.

Read off the recorded operations, so that it does not depend on which parameters are
frozen. Gradients pass neither operations under ``no_grad`` nor ``detach()`` nor values
that are not floats. A write in place under ``no_grad`` leaves a tensor its gradient, so
they pass to what was written to. For parameters that are trained, `proof` then replaces
this by what the module's own autograd graph reaches, see `graph_reach`.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.burst.tracing.packing import PackedResults

_ENDS = ("detach", "detach_")


def parameters_of_outputs(
    root: fx.GraphModule,
    results: PackedResults,
    shapes: Mapping[fx.Node, tuple[Any, Any]],
    module: nn.Module,
) -> tuple[frozenset[str], ...] | None:
    """Return for each output the parameters that its gradient reaches, by name.

    Parameters that no operation shows, such as those that an ``autograd.Function``
    reads by itself, count as reached from each output. ``None``: every output's
    gradient may reach every parameter.
    """
    packing = results.packing
    if packing is None:
        return None
    (end,) = (node for node in root.graph.nodes if node.op == "output")
    packed = end.args[0]
    if packing.is_one:
        parts: Any = (packed,)
    else:
        parts = packed.args[0] if isinstance(packed, fx.Node) and packed.args else ()
    if not isinstance(parts, (tuple, list)) or len(parts) != len(packing.parts):
        return None
    names = {id(p): name for name, p in module.named_parameters()}
    walk = partial(_parameters_of, root=root, names=names)
    found = [walk([part], shapes=shapes) for part in parts]
    shown = walk(list(root.graph.nodes), shapes=None)
    each = frozenset(names.values()).difference(shown)
    reached = tuple(frozenset(some | each) for some in found)
    return None if all(len(some) == len(names) for some in reached) else reached


def _parameters_of(
    outputs: Sequence[Any],
    *,
    root: fx.GraphModule,
    shapes: Mapping[fx.Node, tuple[Any, Any]] | None,
    names: Mapping[int, str],
) -> set[str]:
    """Return the parameters from which nodes are computed.

    With ``shapes``, only from those that a gradient reaches.
    """
    found: set[str] = set()
    seen: set[fx.Node] = set()
    left = list(outputs)
    while left:
        node = left.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.op == "get_attr":
            held = attrgetter(str(node.target))(root)
            if isinstance(held, Tensor) and id(held) in names:
                found.add(names[id(held)])
            continue
        if shapes is not None and _is_untracked(node):
            position = node.meta.get("writes")
            if position is not None:
                left.append(node.args[position])
            continue
        if shapes is not None and _stops(node, shapes):
            continue
        if node.op == "call_module":
            part = attrgetter(str(node.target))(root)
            if isinstance(part, nn.Module):
                found |= {names[id(p)] for p in part.parameters() if id(p) in names}
        left += node.all_input_nodes
    return found


def _name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", ""))


def _is_untracked(node: fx.Node) -> bool:
    """Return whether an operation ran under ``no_grad``."""
    context = node.meta.get("context")
    return context is not None and not context.grad


def _stops(node: fx.Node, shapes: Mapping[fx.Node, tuple[Any, Any]]) -> bool:
    """Return whether no gradient passes an operation."""
    if node.op in ("call_method", "call_function") and _name(node) in _ENDS:
        return True
    given = shapes.get(node)
    if given is None:
        return False
    dtype: torch.dtype = given[0].dtype
    return not (dtype.is_floating_point or dtype.is_complex)
