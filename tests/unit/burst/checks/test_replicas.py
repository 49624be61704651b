"""Copies of a layer that drift apart are found, whatever their type."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stretto.burst.checks.replicas import Replicas
from stretto.burst.graph import capture
from stretto.errors import RankDisagreement


def _on(rank: int, model: nn.Module, x: torch.Tensor) -> Replicas:
    ranks: Any = SimpleNamespace(rank=rank, name_all=lambda some: f"ranks {some}")
    graph = capture(model, (x,))
    found = Replicas(ranks)
    found.watch(graph, {node.name: (0, 2) for node in graph.nodes})
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_copies_that_differ_are_found(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, dtype=dtype)
    models = [nn.Sequential(nn.Linear(3, 2, dtype=dtype), nn.Tanh())]
    models.append(copy.deepcopy(models[0]))
    one, two = (_on(rank, model, x) for rank, model in enumerate(models))
    one.require_all_equal([one.all_values(), two.all_values()])
    with torch.no_grad():
        models[1][0].weight[0, 0] += 1e-3 if dtype.is_floating_point else 1e-3j
    with pytest.raises(RankDisagreement, match="different parameters of layer"):
        one.require_all_equal([one.all_values(), two.all_values()])
