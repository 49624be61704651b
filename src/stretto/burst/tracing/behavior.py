"""Summarize what a module computes in one number that ranks can compare.

# Note [Ranks compare what their modules compute]
Layers may run code of the user's with values: a parametrization, a hook, an
``autograd.Function``. Its operations are not recorded, so ranks on which it reads
different values have equal captures. Nor can the values themselves be compared: a hook
may log on the first rank alone. So each check of layers also runs the module forward
and backward on rows and parameters that are the same on all ranks, whatever those hold,
and ranks compare a number made of the output and the gradients.

Each tensor adds the logarithm of its mean magnitude, so that a relative change shows in
the sum however large other tensors are. Gradients that are nothing but rounding are
lifted to a small share of the largest one, and hardly count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stretto.burst.tracing.caches import keep_attributes
from stretto.burst.tracing.fakes import swapped
from stretto.burst.tracing.layer_runs import (
    as_real,
    fresh_buffers,
    gradients_of,
    has_gradient,
)
from stretto.burst.tracing.trial import (
    ConstantDraws,
    RandomInputs,
    tolerance_of,
    without_inner_dropout,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.burst.tracing.layers import LayerGraph

_ROWS = 5
_SEED = 3
_INTEGERS = (1, 0)
"""Values of integers in the input: valid in a mask, and as any index."""

_FLOOR = 1e-2
"""Share of the largest gradient that is added to each."""


def behavior_of(
    graph: LayerGraph, module: nn.Module, examples: Sequence[Tensor]
) -> float:
    """Return a number for what a module computes; 0 if it can't be run so.

    Of ``examples`` only types and shapes matter. What it changes is restored.
    """
    if graph.held_elsewhere:  # this rank may have earlier values of these
        return 0.0
    for integer in _INTEGERS:
        try:
            found = _computed(graph, module, examples, integer)
        except Exception:  # noqa: BLE001 - of the user's code
            continue
        return found if math.isfinite(found) else 0.0
    return 0.0


def tolerance_between(graph: LayerGraph) -> float:
    """Return by how much the numbers of ranks that compute the same may differ.

    Processors of two kinds round differently, and the number adds many logarithms.
    """
    dtypes = {p.dtype for node in graph.nodes for p in node.module.parameters()}
    precisions = [graph.precision_of(dtype) for dtype in dtypes or {torch.float32}]
    return max(map(tolerance_of, precisions))


def _computed(
    graph: LayerGraph, module: nn.Module, examples: Sequence[Tensor], integer: int
) -> float:
    numbers = RandomInputs(_SEED)
    parameters = {id(p) for p in module.parameters()}
    owned = parameters | {id(b) for b in module.buffers()}

    def made(tensor: Tensor) -> Tensor:
        if id(tensor) not in owned or not has_gradient(tensor):
            return tensor
        values = numbers.normal(tensor.shape, tensor)
        if id(tensor) not in parameters:
            return 0.5 + values.abs()  # such as a variance
        values = values / math.sqrt(max(1, values[0].numel() if values.dim() else 1))
        return nn.Parameter(values, requires_grad=tensor.requires_grad)

    rows = [
        numbers.normal((_ROWS, *x.shape[1:]), x)
        if has_gradient(x)
        else x.new_full((_ROWS, *x.shape[1:]), integer)
        for x in examples
    ]
    parts = {id(part): (name, part) for name, part in module.named_modules()}
    for node in graph.nodes:
        for name, part in node.module.named_modules():
            parts.setdefault(id(part), (name, part))
    with (
        keep_attributes(module),
        graph.caches_restored(),
        swapped(parts.values(), made),
        without_inner_dropout(module),
        torch.set_grad_enabled(graph.ambient.grad),
        fresh_buffers(module),
        ConstantDraws(),
    ):
        packed = graph.arguments.packing.pack(rows)
        args, kwargs = graph.arguments.unpack(packed)
        leaves = pytree.tree_leaves(module(*args, **kwargs))
        outputs = [x for x in leaves if isinstance(x, Tensor)]
        total = sum(_logarithms(outputs, numbers))
        back = [x for x in outputs if x.requires_grad and has_gradient(x)]
        trained: list[Any] = [p for p in module.parameters() if p.requires_grad]
        if back and trained:
            loss = sum(_weighted(x, numbers) for x in back)
            assert isinstance(loss, Tensor)  # noqa: S101
            grads = gradients_of(loss, torch.ones_like(loss), trained)
            given = [
                torch.zeros_like(p) if grad is None else grad
                for p, grad in zip(trained, grads, strict=True)
            ]
            total += sum(_logarithms(given, numbers))
    return float(total)


def _weighted(tensor: Tensor, numbers: RandomInputs) -> Tensor:
    values = as_real(tensor) if tensor.is_complex() else tensor
    return (values * numbers.normal(values.shape, values)).sum().to(torch.float64)


def _logarithms(tensors: Sequence[Tensor], numbers: RandomInputs) -> list[float]:
    """Return a number for each tensor, see the note."""
    pairs = []
    for tensor in tensors:
        values = tensor.detach()
        if values.is_complex():
            values = as_real(values)
        values = values.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        weights = numbers.normal(values.shape, values)
        count = max(1, values.numel())
        magnitude = float((values * weights).abs().sum()) / count
        pairs.append((magnitude, float((values * weights).sum()) / count))
    least = _FLOOR * max((size for size, _ in pairs), default=0.0)
    if not least:
        return [0.0 for _ in pairs]
    return [
        math.log(size + least) + signed / (size + least) / 4 for size, signed in pairs
    ]
