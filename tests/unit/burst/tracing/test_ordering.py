"""A capture is the same in every process, though sets of strings have other orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from stretto.burst.graph import capture

if TYPE_CHECKING:
    from stretto.burst.tracing.layers import LayerGraph

KINDS = ("full", "sliding", "chunked")


class Tables(nn.Module):
    """Fills tables in some order, as of ``set(kinds)``, and reads them in another."""

    def __init__(self, order: tuple[str, ...], uses: tuple[str, ...] = KINDS) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.order, self.uses = order, uses
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in uses)
        self.plain = {kind: torch.randn(6, generator=draw) for kind in KINDS}
        for kind in KINDS:
            self.register_buffer(kind, torch.randn(6, generator=draw))
            scale = nn.Parameter(torch.randn(6, generator=draw))
            self.register_parameter(f"{kind}_scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        tables = {}
        for kind in self.order:
            table = torch.cos(getattr(self, kind)) * getattr(self, f"{kind}_scale")
            tables[kind] = table + self.plain[kind].tanh()
        every = torch.stack([tables[kind] for kind in KINDS]).sum(0)
        for layer, kind in zip(self.layers, self.uses, strict=True):
            x = x + (layer(x) * tables[kind] * every).tanh()
        return x


def _identity_of(graph: LayerGraph) -> tuple[object, ...]:
    parts = [
        (node.name, node.inputs, node.parameter_names, node.buffer_names)
        for node in graph.nodes
    ]
    values = [[b.tolist() for b in node.module.buffers()] for node in graph.nodes]
    return graph.digest, graph.semantics, parts, values


@pytest.mark.parametrize("order", [KINDS[::-1], (*KINDS[1:], KINDS[0])])
def test_the_order_of_fixed_operations_changes_nothing(order: tuple[str, ...]) -> None:
    x = torch.randn(4, 6)
    one, two = (capture(Tables(some), (x,)) for some in (KINDS, order))
    assert _identity_of(one) == _identity_of(two)


def test_other_tables_are_another_model() -> None:
    x = torch.randn(4, 6)
    one, two = (capture(Tables(KINDS, uses), (x,)) for uses in (KINDS, KINDS[::-1]))
    assert one.digest == two.digest
    assert one.semantics != two.semantics


class Written(nn.Module):
    """Fixed operations whose order matters, because one writes what others read."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.layer, self.before = nn.Linear(6, 6), before

    def forward(self, x: Tensor) -> Tensor:
        table = torch.ones(6)
        if self.before:
            read = table * 2
            table.mul_(3)
        else:
            table.mul_(3)
            read = table * 2
        return self.layer(x) * read * table


def test_writes_keep_their_place() -> None:
    x = torch.randn(4, 6)
    one, two = (capture(Written(before=some), (x,)) for some in (True, False))
    assert one.semantics != two.semantics
