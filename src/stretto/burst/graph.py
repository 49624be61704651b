"""Capture a module's layers."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stretto.boolean_options import bool_option
from stretto.burst.hooks import HOOKS, HOOKS_OF_ALL
from stretto.burst.tracing import grouping, operations, proof
from stretto.burst.tracing.fakes import without_log
from stretto.burst.tracing.freezing import may_read_users
from stretto.burst.tracing.layers import layers_of
from stretto.burst.tracing.reads import Ambient
from stretto.burst.tracing.recordings import is_of_types
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stretto.burst.tracing.layers import LayerGraph


def capture(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    verify: bool = True,
    ambient: Ambient | None = None,
) -> LayerGraph:
    """Return a module's layers by recording its forward on tensors without values.

    A layer is one module or operation that multiplies by parameters or matrices, with
    the activations, normalizations, poolings and reshapings that follow it. Where
    branches join there is a layer for the join. Operations that must run on one rank,
    because a tensor between them has no row for each sample, are one layer: attention's
    heads.

    Args:
        module: takes and returns tensors with a row for each sample.
        example_inputs: the positional arguments of its ``forward``; of tensors only
            types and shapes matter, except for the number of samples.
        kwargs: further arguments of ``forward``.
        verify: whether to compute with the layers and compare them with the module.
        ambient: the modes around the calls; ``None``: gradients, and no autocast.

    Raises:
        SpecError: the module can't be traced or split; the message names the line of
            its code that prevents it. Or ``verify`` is not true or false.
    """
    verify = bool_option("verify", verify)
    _refuse_own_call(module)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with (
        _naming_types(example_inputs, kwargs),
        _spared_full_collections(),
        without_log(),
        (ambient or Ambient()).set(device),
    ):
        traced = operations.trace(module, example_inputs, kwargs)
        groups = grouping.groups_of(traced)
        graph = layers_of(traced, groups, type(module).__name__, {})
        if verify:
            never, graphs = proof.require_equal(graph, module, example_inputs, kwargs)
            graph.results.correct(never, module, graphs)
    return graph


@contextlib.contextmanager
def _naming_types(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Iterator[None]:
    """Add the types of the example inputs to an error about a tensor's type."""
    try:
        yield
    except SpecError as exc:
        if not is_of_types(exc.__cause__):
            raise
        leaves = pytree.tree_leaves((args, dict(kwargs or {})))
        types = dict.fromkeys(str(v.dtype) for v in leaves if isinstance(v, Tensor))
        raise SpecError(
            f"{exc}. The example inputs have type {', '.join(types)}: if forward gets "
            "others in training, give an example of those (torch.long for indices), "
            "else convert them in forward"
        ) from exc.__cause__


def _refuse_own_call(module: nn.Module) -> None:
    """Refuse a model whose class changes what a call does besides forward."""
    for kind in type(module).__mro__:
        for name in _CALLS:
            call = vars(kind).get(name)
            if call is None or not may_read_users(kind.__module__):
                continue
            code = getattr(inspect.unwrap(call), "__code__", None)
            place = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
            raise SpecError(
                f"{place}{kind.__name__} defines {name}, but layers are those of its "
                "forward alone: do in forward what it does"
            )


_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")


def check_again(
    graph: LayerGraph,
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> bool:
    """Compute with the layers of a capture and compare them with the module, as it is.

    See Note [A check is valid while what it ran is unchanged] in `tracing.proven`.

    Returns:
        Whether the capture can still be used: the same parameters get a gradient.

    Raises:
        SpecError: layers differ from the module, or mix samples.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    before = graph.proven
    is_as_before = before is not None and before.changed_inside() is None
    with _spared_full_collections(), without_log(), graph.ambient.set(device):
        never, graphs = proof.require_equal(graph, module, example_inputs, kwargs)
    now = graph.proven
    if is_as_before and before is not None and now is not None:
        now.around |= before.around
    names = frozenset(name for name, _ in module.named_parameters())
    reached = graph.results.output_parameters or (names,)
    still = all(never.isdisjoint(some) for some in reached) and all(
        graph_reach.names - never <= some
        for some, graph_reach in zip(reached, graphs, strict=False)
    )
    return still and graph.results.unreached(module) <= never


def check_hooks(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ambient: Ambient | None = None,
) -> None:
    """Check that a whole module's own forward hooks keep samples apart.

    They belong to no layer: each rank calls them with its samples.

    Raises:
        SpecError: they don't, or change state that they read.
    """
    held = any(vars(module)[kind] or HOOKS_OF_ALL[kind] for kind in HOOKS[:2])
    if held:
        capture(_with_hooks(module), example_inputs, kwargs, ambient=ambient)


def _with_hooks(module: nn.Module) -> nn.Module:
    """Return a module whose only layer is another one, called with its hooks."""
    whole: nn.Module = type(type(module).__name__, (nn.Module,), {})()
    whole.add_module("model", module)
    whole.training = module.training

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    whole.__dict__["forward"] = forward
    return whole


@contextlib.contextmanager
def _spared_full_collections() -> Iterator[None]:
    """Let the garbage collector look at young objects only.

    A capture makes some hundred thousand objects, for which the collector would look at
    all objects of the process two or three times: 0.1 to 0.5 s each.
    """
    before = gc.get_threshold()
    ours = (*before[:2], 1_000_000)
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)
