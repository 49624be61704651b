"""Layers of evaluation run where their parameters are trained, whatever their names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.burst.graph import capture
from stretto.burst.schedule import later_widths


class NoiseInTraining(nn.Module):
    """Evaluation runs fewer operations, so their numbered names differ."""

    def __init__(self, *, more: bool) -> None:
        super().__init__()
        self.one, self.two, self.more = nn.Linear(8, 8), nn.Linear(8, 8), more
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        if self.training:
            h = h + torch.rand(len(h), 1) * torch.randn_like(h)
            if self.more:
                h = functional.linear(h, self.weights[0]).tanh()
        u = h + x.tanh()
        if self.more:
            u = functional.linear(u, self.weights[1])
        return self.two(u) + h


def _later(model: nn.Module) -> tuple[dict[str, tuple[int, int]], str | None]:
    x = torch.randn(4, 8)
    planned, later = capture(model, (x,)), capture(model.eval(), (x,))
    widths = {node.name: (i % 3, 1 + i % 2) for i, node in enumerate(planned.nodes)}
    width_of = {
        id(p): widths[node.name]
        for node in planned.nodes
        for p in node.module.parameters()
    }
    found, unknown = later_widths(later, planned, widths, width_of)
    if unknown is None:
        assert set(found) == {node.name for node in later.nodes}
        for node in later.nodes:
            for parameter in node.module.parameters():
                assert found[node.name] == width_of[id(parameter)]
    return found, unknown


def test_layers_without_tensors_may_have_other_names() -> None:
    _, unknown = _later(NoiseInTraining(more=False))
    assert unknown is None


def test_a_numbered_name_of_other_parameters_is_refused() -> None:
    _, unknown = _later(NoiseInTraining(more=True))
    assert unknown == "linear"
