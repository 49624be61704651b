"""Buffers that forward only reads are compared between ranks, whatever their type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stretto.burst.checks.constant_buffers import ConstantBuffers
from stretto.errors import RankDisagreement

DTYPES = (torch.float64, torch.complex128, torch.float32, torch.complex64)


class Shifted(nn.Module):
    """A layer that adds a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3, dtype=dtype))


def _differences(dtype: torch.dtype, by: float) -> None:
    """Compare a buffer of two ranks that differs by a factor."""
    every: list[list[Any]] = []
    ranks: Any = SimpleNamespace(size=2, name_all=lambda some: f"ranks {some}")
    texts: list[str] = []

    def gather(mine: str) -> list[str]:
        texts.append(mine)
        return [texts[0], texts[-1]]

    for factor in (1.0, 1.0 + by):
        module = Shifted(dtype)
        module.shift *= factor
        node = SimpleNamespace(module=module, trained_and_changed=list)
        graph: Any = SimpleNamespace(nodes=[node])
        buffers = ConstantBuffers(ranks, gather)
        buffers.watch(graph)
        every.append([buffers, buffers.next_values()])
    rows = [values for _, values in every]
    for buffers, _ in every:
        buffers.require_equal(rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_that_differ_on_a_rank_are_found(dtype: torch.dtype) -> None:
    with pytest.raises(RankDisagreement, match="different values of buffer 'shift'"):
        _differences(dtype, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_that_differ_by_rounding_are_accepted(dtype: torch.dtype) -> None:
    _differences(dtype, 4 * torch.finfo(dtype).eps)
