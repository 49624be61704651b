"""Find layers that are one function, such as those of equal blocks.

# Note [Equal layers]
Whether a layer mixes samples depends on its operations and their arguments, and on what
parameters, buffers and inputs hold. Two layers count as equal if their operations and
arguments are equal, their tensors have the same sizes, types and strides, and buffers
hold equal values. Then only the values of parameters and inputs differ, which are
random in a check. So of several such layers, the check of rows takes the first and the
last.

All are checked if values may matter: where a layer's operations give integers or truth
values, one gives only zeros or a number that is not finite, or the check has to leave
parameters as they are. Layers with a backward that is not torch's own, with modules
that are not torch's, or with values of unknown types are equal to none.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, fx, nn

from stretto.burst.tracing.freezing import ATOMS
from stretto.burst.tracing.layer_runs import graph_of, has_gradient, largest_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from stretto.burst.tracing.layers import LayerNode

_PLAIN = (*ATOMS, torch.layout, torch.memory_format, type(...))

_MAX_BYTES = 1 << 24
"""Size of values that are compared."""


class _Unequal(Exception):
    """A layer is equal to none."""


def kinds_of(
    nodes: Iterable[LayerNode],
    replaced: frozenset[int],
    own_backward: frozenset[str],
) -> dict[str, Hashable]:
    """Return what layers compute, by their names; the same for equal layers.

    A layer that is equal to none is left out.

    Args:
        nodes: the layers.
        replaced: ids of the parameters for which a check uses other values.
        own_backward: names of layers from `custom_backward.with_own_backward`, which
            are equal to none.
    """
    found = {}
    for node in nodes:
        if node.name in own_backward:
            continue
        try:
            found[node.name] = _Kind(node, replaced).of_layer()
        except _Unequal:
            continue
    return found


@final
class _Kind:
    def __init__(self, node: LayerNode, replaced: frozenset[int]) -> None:
        self._node = node
        self._replaced = replaced
        self._tensors: dict[int, int] = {}

    def of_layer(self) -> Hashable:
        number = {op: i for i, op in enumerate(graph_of(self._node).nodes)}
        return tuple(self._operation(op, number) for op in number)

    def _operation(self, op: fx.Node, number: Mapping[fx.Node, int]) -> Hashable:
        target: Any = op.target
        if op.op == "get_attr":
            path, _, last = str(target).rpartition(".")
            target = self._value(getattr(self._at(path), last))
        elif op.op == "call_module":
            target = self._module(self._at(str(target)))
        elif op.op == "placeholder":
            target = None
        elif op.op == "call_function":
            target = id(target)
        given = self._arguments((op.args, op.kwargs), number)
        return op.op, target, given, repr(op.meta.get("samples"))

    def _at(self, path: str) -> nn.Module:
        return self._node.module.get_submodule(path)

    def _arguments(self, value: Any, number: Mapping[fx.Node, int]) -> Hashable:
        if isinstance(value, fx.Node):
            return fx.Node, number[value]
        if isinstance(value, (tuple, list)):
            return type(value), tuple(self._arguments(v, number) for v in value)
        if isinstance(value, dict):
            items = value.items()
            return dict, tuple((k, self._arguments(v, number)) for k, v in items)
        if isinstance(value, slice):
            ends = value.start, value.stop, value.step
            return slice, self._arguments(ends, number)
        return self._value(value)

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in _PLAIN:
            return type(value), repr(value)
        if type(value) in (tuple, list):
            return type(value), tuple(map(self._value, value))
        raise _Unequal

    def _tensor(self, tensor: Tensor) -> Hashable:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise _Unequal
        if vars(tensor) or getattr(tensor, "_backward_hooks", None):
            raise _Unequal
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise _Unequal
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        sizes = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        kind = number, type(tensor), sizes, tensor.requires_grad
        if isinstance(tensor, nn.Parameter) and id(tensor) in self._replaced:
            if not bool(torch.isfinite(tensor.detach()).all()):
                raise _Unequal
            return kind
        return kind, _digest_of(tensor)

    def _module(self, module: nn.Module) -> Hashable:
        found: list[Any] = [type(module)]
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                each: Any = self._module if name == "_modules" else self._value
                held = (
                    (key, None if v is None else each(v)) for key, v in value.items()
                )
                found.append((name, tuple(held)))
            elif isinstance(value, (dict, set)):
                if value and name != "_non_persistent_buffers_set":
                    raise _Unequal
            else:
                found.append((name, self._value(value)))
        return tuple(found)


def _digest_of(tensor: Tensor) -> str:
    if tensor.nbytes > _MAX_BYTES:
        raise _Unequal
    held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(held.numpy().tobytes()).hexdigest()


@final
class EqualLayers:
    """Which layers need no check, because equal layers have been checked.

    Args:
        nodes: the layers.
        kinds: from `kinds_of`.
        values: outputs of all layers.
        cotangents: gradients of layers' outputs.
    """

    def __init__(
        self,
        nodes: Iterable[LayerNode],
        kinds: Mapping[str, Hashable],
        values: Mapping[str, Tensor],
        cotangents: Mapping[str, Tensor],
    ) -> None:
        self._kinds: dict[str, Hashable] = {}
        for node in nodes:
            kind = kinds.get(node.name)
            inputs = [values[name] for name in node.inputs]
            if kind is None or not all(map(has_gradient, inputs)):
                continue
            own = cotangents.get(node.name)
            held = [*inputs, values[node.name], *(() if own is None else (own,))]
            self._kinds[node.name] = (
                kind,
                tuple(node.inputs.index(name) for name in node.inputs),
                tuple((x.shape, x.stride(), x.dtype) for x in held),
                tuple(name in cotangents for name in node.inputs),
            )
        self._left = Counter(self._kinds.values())
        self._checked: set[Hashable] = set()

    def may_skip(self, node: LayerNode) -> bool:
        """Return whether another layer stands for this one; ask for each in order."""
        kind = self._kinds.get(node.name)
        if kind is None:
            return False
        self._left[kind] -= 1
        return kind in self._checked and self._left[kind] > 0

    def note_checked(
        self, node: LayerNode, results: Mapping[fx.Node, Any], own: Tensor | None
    ) -> None:
        """Record that a layer keeps samples apart.

        Args:
            node: the layer.
            results: those of its operations.
            own: the gradient of its output, if there is one.
        """
        kind = self._kinds.get(node.name)
        if kind is None or kind in self._checked:
            return
        fixed: set[fx.Node] = set()
        tensors = [] if own is None else [own]
        for op, result in results.items():
            before = op.all_input_nodes
            if op.op == "get_attr" or (before and fixed.issuperset(before)):
                fixed.add(op)
            elif isinstance(result, Tensor):
                tensors.append(result)
        if all(map(_is_usual, tensors)):
            self._checked.add(kind)


def _is_usual(tensor: Tensor) -> bool:
    """Return whether a tensor has finite floating-point values other than zeros."""
    if not has_gradient(tensor) or not bool(torch.isfinite(tensor).all()):
        return False
    return largest_of(tensor) > 0
