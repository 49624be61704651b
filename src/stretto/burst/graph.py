"""Capture a module's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.burst.tracing import grouping, operations, proof
from stretto.burst.tracing.layers import layers_of
from stretto.burst.tracing.reads import Ambient
from stretto.errors import SpecError

if TYPE_CHECKING:
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
            its code that prevents it.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with (ambient or Ambient()).set(device):
        traced = operations.trace(module, example_inputs, kwargs)
        groups = grouping.groups_of(traced)
        graph = layers_of(traced, groups, type(module).__name__, {})
        if verify:
            proof.require_equal(graph, module, example_inputs, kwargs)
    return graph


def require_module(module: Any, arguments: Any, named: Any) -> None:
    """Require a module and its example inputs.

    Raises:
        SpecError: one is something else.
    """
    if not isinstance(module, nn.Module):
        raise SpecError(f"the model must be a torch.nn.Module, got {_kind(module)}")
    if not isinstance(arguments, tuple | list | None):
        hint = ": pass (x,) for one tensor x" if isinstance(arguments, Tensor) else ""
        raise SpecError(
            "example inputs must be a tuple of forward's positional arguments, got "
            f"{_kind(arguments)}{hint}"
        )
    if not isinstance(named, Mapping | None):
        raise SpecError(
            "keyword arguments of forward must be a dictionary of example inputs by "
            f"name, got {_kind(named)}"
        )


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
