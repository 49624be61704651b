"""How often a model is recorded, and what captures must refuse or accept."""

from __future__ import annotations

import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.tracing.recorder import FakeTensor

CALLS: list[bool] = []


class Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        CALLS.append(isinstance(x, FakeTensor))
        return self.layer(x)


def test_a_plain_model_is_recorded_once_for_each_number_of_samples():
    CALLS.clear()
    capture(Noted(), (torch.randn(2, 4),))
    assert CALLS == [True, True, False]


def test_parameters_that_share_memory_are_captured_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flat = torch.randn(32)
    model[0].weight.data = flat[:16].view(4, 4)
    model[1].weight.data = flat[16:].view(4, 4)
    graph = capture(model, (torch.randn(2, 4),))
    assert [node.name for node in graph.nodes] == ["0", "1"]
