"""Capture a module's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stretto.burst.tracing import grouping, operations, proof
from stretto.burst.tracing.layers import layers_of
from stretto.burst.tracing.reads import Ambient

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

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
