"""Run layers alone: on some rows, with other parameters, buffers and batch norms."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from stretto.burst.tracing.layers import INPUT
from stretto.burst.tracing.one_row import PlainRows, normalized
from stretto.burst.tracing.torch_modules import BatchNorm, InstanceNorm, batch_norm
from stretto.burst.tracing.trial import ConstantDraws

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stretto.burst.tracing.layers import LayerNode

Twins = tuple[Tensor, Tensor]
"""A parameter and the leaf that replaces it."""


def trace_layer(
    node: LayerNode, values: Mapping[str, Tensor], rows: Sequence[int]
) -> dict[fx.Node, Any]:
    """Return the result of each operation of a layer on some rows.

    An error ends the run; the results until then are returned.
    """
    inputs = [values[name][list(rows)] for name in node.inputs]
    found: dict[fx.Node, Any] = {}
    with (
        contextlib.suppress(Exception),
        fresh_buffers(node.module),
        ConstantDraws(),
    ):
        _Interpreter(node.module, found).run(*inputs)
    return found


class PlainInterpreter(fx.Interpreter):
    """Runs a layer's operations without torch's progress bar and error texts.

    These take more time than the operations of a small layer.

    Args:
        module: The layer.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run(self, *args: Any, **_: Any) -> Any:
        """Run all operations and return the layer's output."""
        self.env = {}
        self.args_iter = iter(args)
        found = None
        for node in self.graph.nodes:
            found = self.env[node] = self.run_node(node)
        return found

    @contextlib.contextmanager
    def _set_current_node(self, _node: fx.Node) -> Iterator[None]:
        yield


class _Interpreter(PlainInterpreter):
    def __init__(self, module: Any, trace: dict[fx.Node, Any]) -> None:
        super().__init__(module)
        self._trace = trace

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        # It may be written later.
        kept = found.detach().clone() if isinstance(found, Tensor) else found
        self._trace[n] = kept
        return found


def graph_of(node: LayerNode) -> fx.Graph:
    """Return a layer's operations."""
    graph = node.module.graph
    assert isinstance(graph, fx.Graph)  # noqa: S101
    return graph


def run_layer(node: LayerNode, inputs: list[Tensor]) -> Tensor:
    """Return a layer's output, without effects on its buffers."""
    with fresh_buffers(node.module), ConstantDraws():
        output: Tensor = node.module(*inputs)
    return output


def leaf_of(tensor: Tensor, name: str) -> Tensor:
    """Return an input of a layer, which needs a gradient if it may."""
    found = tensor.detach()
    return found.requires_grad_(name != INPUT and has_gradient(tensor))


def gradients_of_layer(
    inputs: list[Tensor],
    output: Tensor,
    cotangent: Tensor,
    parameters: Mapping[int, Tensor],
) -> tuple[list[Tensor | None], dict[int, Tensor]]:
    """Return gradients of a layer's inputs and, by id, of its parameters."""
    leaves = [x for x in inputs if x.requires_grad]
    found = gradients_of(output, cotangent, [*leaves, *parameters.values()])
    by_leaf = {id(x): g for x, g in zip(leaves, found, strict=False)}
    to_parameters = {
        key: g
        for key, g in zip(parameters, found[len(leaves) :], strict=True)
        if g is not None
    }
    return [by_leaf.get(id(x)) for x in inputs], to_parameters


def has_gradient(tensor: Tensor) -> bool:
    """Return whether tensors of this type can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor.resolve_conj())


def twin_of(twins: dict[int, Twins], tensor: Tensor) -> Tensor:
    """Return another leaf with a parameter's values, as in the executor (`Shadows`)."""
    if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
        return tensor
    twins[id(tensor)] = tensor, nn.Parameter(tensor.detach())
    return twins[id(tensor)][1]


def gradients_of(
    output: Tensor, cotangent: Tensor, tensors: list[Tensor]
) -> list[Tensor | None]:
    """Compute gradients by ``backward``, which reentrant checkpointing requires."""
    try:
        with ConstantDraws(is_backward=True):  # a checkpoint may draw again
            torch.autograd.backward(edges_of([output]), [cotangent])
        return [
            grad.to_dense()
            if (grad := tensor.grad) is not None and grad.is_sparse
            else grad
            for tensor in tensors
        ]
    finally:  # a backward of the program's own may raise an error in between
        for tensor in tensors:
            tensor.grad = None


_PASSES_MODES = "handle_torch_function" in torch.autograd.backward.__code__.co_names
"""Whether modes of functions get a backward as one call, within which they are off."""


def edges_of(tensors: Sequence[Tensor]) -> Any:
    """Return what to give autograd so that modes stay on while it runs."""
    if not _PASSES_MODES:
        return tensors
    return [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]


def largest_of(tensor: Tensor | None) -> float:
    """Return the largest finite magnitude; 0 without one."""
    if tensor is None or not tensor.numel() or not has_gradient(tensor):
        return 0.0
    values = tensor.detach()
    if values.is_complex():
        values = as_real(values)
    least, most = torch.aminmax(values)
    found = max(-float(least), float(most))
    if math.isfinite(found):  # NaN would be both
        return found
    values = torch.where(torch.isfinite(values), values, 0)
    return float(values.abs().max())


@contextlib.contextmanager
def fresh_buffers(module: nn.Module) -> Iterator[None]:
    """Redirect forward's writes into buffers to copies."""
    undo = []
    memo: dict[int, Tensor] = {}
    try:
        for part in module.modules():
            held: Any = part._buffers  # noqa: SLF001
            for name, buffer in held.items():
                if buffer is None:
                    continue
                memo.setdefault(id(buffer), buffer.detach().clone())
                undo.append((held, name, buffer))
        for held, name, buffer in undo:
            held[name] = memo[id(buffer)]
        yield
    finally:
        for held, name, buffer in undo:
            held[name] = buffer


@contextlib.contextmanager
def lent_values(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[bool]:
    """Let tensors have the memory of others, with which they stay the same objects.

    Buffers get copies, into which forward may write. Yields False, with all as they
    were, if a tensor's type doesn't allow it, or it was made in inference mode.
    """
    undo: list[tuple[Tensor, Tensor]] = []
    both = list(pairs)
    is_lent = not any(tensor.is_inference() for tensor, _ in both)
    try:
        try:
            for tensor, other in both if is_lent else ():
                memory = other.detach()
                if not isinstance(tensor, nn.Parameter):
                    memory = memory.clone()
                had = tensor.data
                tensor.data = memory
                undo.append((tensor, had))
        except (RuntimeError, TypeError, NotImplementedError):  # such as subclasses
            is_lent = False
            _return_memory(undo)
        yield is_lent
    finally:
        _return_memory(undo)


def _return_memory(undo: list[tuple[Tensor, Tensor]]) -> None:
    while undo:
        tensor, memory = undo.pop()
        tensor.data = memory


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Call no hooks that tensors have."""
    held: list[tuple[Any, Any]] = [(x, x._backward_hooks) for x in tensors]  # noqa: SLF001
    held = [(tensor, hooks) for tensor, hooks in held if hooks]
    try:
        for tensor, _ in held:
            tensor._backward_hooks = None  # noqa: SLF001
        yield
    finally:
        for tensor, hooks in held:
            tensor._backward_hooks = hooks  # noqa: SLF001


@contextlib.contextmanager
def fixed_norms(parts: Any) -> Iterator[None]:
    """Let batch norms use their running statistics, or none; see `one_row` too."""
    norms: dict[Any, Any] = {}
    for _, part in parts:
        if "forward" in vars(part):
            continue  # the program's, which layers don't run
        if isinstance(part, BatchNorm):
            norms[part] = _Fixed(part)
        elif isinstance(part, InstanceNorm):
            norms[part] = PlainRows(part)
    try:
        for norm, stand in norms.items():
            norm.__dict__["forward"] = stand
        yield
    finally:
        for norm in norms:
            del norm.__dict__["forward"]


class _Fixed:
    def __init__(self, norm: Any) -> None:
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        mean, var = norm.running_mean, norm.running_var
        if mean is None:
            mean, var = (x.new_full((norm.num_features,), v) for v in (0.0, 1.0))

        def run(rows: Tensor) -> Tensor:
            return batch_norm(rows, norm, (mean, var), (norm.weight, norm.bias))

        return normalized(run, x)
