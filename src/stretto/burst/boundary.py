"""The autograd boundary of a burst-parallel model: its outputs and its inputs.

# Note [Scale of a gradient]
Outside a burst model a gradient belongs to this rank's own mean loss, as in DDP.
Inside, it belongs to the mean loss over the global batch: it is this rank's gradient
times n_r / N, if the rank has n_r of N samples. An output therefore multiplies by that
share. An input that was computed from another burst model's output divides by that
output's share again, so that a chain D(G(z)) applies the share once. So does an input
computed from the parameters of an ordinary module, whose gradients DDP averages
(share 1 / ranks). A leaf, such as images that need a gradient, gets the gradient of the
global mean loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stretto.burst.hooks import gradient_hooks, post_hooks
from stretto.errors import StrettoError
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NO_PARAMETER_GRADIENTS = (
    "a burst model's parameters can't be named in torch.autograd.grad(loss, "
    "parameters) or backward(inputs=parameters): layers run on other ranks, so only a "
    "whole backward() computes their gradients. Call loss.backward() and read .grad"
)

_NO_DOUBLE_BACKWARD = (
    "create_graph=True is not supported: a burst model's backward moves gradients "
    "between ranks and can't be differentiated again. Compute the gradient penalty "
    "on a model that is not burst parallel"
)

_NO_VALUES = (
    "the loss was computed with a tensor that has no values: it was kept while the "
    "burst model was captured, for example by a forward hook of a layer that this rank "
    "does not run. Use only the model's outputs, which every rank gets for its samples"
)


class _Output(torch.autograd.Function):
    """An output of a burst model; backward multiplies by the share."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        share: float,
        begin: Callable[[Tensor, str], None],
        is_apart: bool,  # noqa: FBT001 - Function.apply takes no keywords
        is_uneven: bool,  # noqa: FBT001
        *_parameters: Tensor,
    ) -> Tensor:
        ctx.share = share
        ctx.is_uneven = is_uneven
        ctx.begin = begin
        ctx.num_parameters = len(_parameters)
        return output.view_as(output) if is_apart else output.clone()

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *grads: Any) -> Any:
        inner = ctx.next_functions[0][0]
        why_not = ""
        if torch.is_grad_enabled():
            why_not = _NO_DOUBLE_BACKWARD
        elif not torch._C._will_engine_execute_node(inner):  # noqa: SLF001
            why_not = _NO_PARAMETER_GRADIENTS
        ctx.begin(grads[0], why_not)
        return (grads[0] * ctx.share, *(None,) * (4 + ctx.num_parameters))


_OUTPUT_NODE: Any = _Output._backward_cls  # noqa: SLF001


def is_output(node: Any) -> bool:
    """Return whether an autograd node is the output of a burst model."""
    return isinstance(node, _OUTPUT_NODE)


class _Input(torch.autograd.Function):
    """An input that other modules computed; backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


def mark_output(
    output: Tensor,
    share: float,
    begin: Callable[[Tensor, str], None],
    parameters: Sequence[Tensor],
    *,
    is_apart: bool,
    is_uneven: bool,
) -> Tensor:
    """Return the output with a backward that multiplies by this rank's share.

    Args:
        output: of the model, needs a gradient.
        share: see Note [Scale of a gradient].
        begin: called when backward arrives, with the gradient and the reason why it
            can't run, or ``""``.
        parameters: parameters to connect to the output without a gradient, so that
            asking autograd for their gradients alone raises instead of doing nothing.
        is_apart: whether the caller gets copies of its parts. Otherwise a copy is
            returned, because autograd lets no caller write into a view.
        is_uneven: whether ranks have other numbers of samples.
    """
    # Autograd would call a user's hook with None.
    plain = [p for p in parameters if not (gradient_hooks(p) or post_hooks(p))]
    found: Tensor = _Output.apply(  # type: ignore[no-untyped-call]
        output, share, begin, is_apart, is_uneven, *plain
    )
    return found


def require_values(grad: Tensor) -> None:
    """Require that a loss's gradient has values.

    Raises:
        StrettoError: the loss was computed with a tensor of the capture.
    """
    if isinstance(grad, FakeTensor):
        raise StrettoError(_NO_VALUES)


def in_checkpoint() -> bool:
    """Return whether `torch.utils.checkpoint` will run the current forward again.

    With ``use_reentrant=True`` this is not detectable before the second run.
    """
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
        return True
    return checkpoint_hook() is not None


def checkpoint_hook() -> Any:
    """Return the hook of the innermost running checkpoint; it is another in each."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003, SLF001
    if hooks is None or "_checkpoint_hook" not in getattr(hooks[0], "__qualname__", ""):
        return None
    return hooks[0]


def plain(rows: Tensor) -> Tensor:
    """Return an input without its own class, such as one for images with metadata.

    Gradients reach the input. Layers on other ranks get plain tensors anyway.

    Raises:
        StrettoError: its class holds other values than a plain tensor.
    """
    kind = type(rows)
    if kind is Tensor or kind is nn.Parameter or hasattr(kind, "stretto_owner"):
        return rows
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise StrettoError(
            f"an input has the class {kind.__name__}, whose values are not those of a "
            "plain tensor (it defines __torch_dispatch__): convert it to a plain "
            "tensor before calling the burst model"
        )
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return rows.as_subclass(Tensor)


def mark_input(rows: Tensor, ranks: int) -> Tensor:
    """Return the input, as a plain tensor with the backward that its origin requires.

    Raises:
        StrettoError: it mixes outputs of burst models with different shares, or
            parameters of ordinary modules with such outputs where shares are uneven;
            or its class is invalid, see `plain`.
    """
    rows = plain(rows)
    if rows.grad_fn is None or not torch.is_grad_enabled():
        return rows
    shares, has_parameter = _origins(rows)
    if not shares and not has_parameter:
        return rows
    if len(shares) > 1:
        raise StrettoError(
            "the input was computed from outputs of burst models in which this rank "
            f"has different parts of the batch ({', '.join(map(str, sorted(shares)))}"
            "): give each rank the same part of every batch"
        )
    share = shares.pop() if shares else 1 / ranks
    if has_parameter and not math.isclose(share, 1 / ranks):
        raise StrettoError(
            "the input was computed from a burst model's output and by an ordinary "
            "module with parameters, whose gradients would be averaged over ranks "
            "with different numbers of samples: give each rank the same number of "
            "samples, or make that module a part of a burst model"
        )
    if share == 0:  # no rows, so nothing to scale
        return rows
    found: Tensor = _Input.apply(rows, 1 / share)  # type: ignore[no-untyped-call]
    return found


def _origins(rows: Tensor) -> tuple[set[float], bool]:
    """Return the shares of burst outputs behind a tensor; whether parameters are."""
    shares: set[float] = set()
    has_parameter = False
    seen: set[Any] = set()
    left: list[Any] = [rows.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_output(node):
            shares.add(node.share)
            continue
        has_parameter |= isinstance(getattr(node, "variable", None), nn.Parameter)
        left += [source for source, _ in node.next_functions]
    return shares, has_parameter
