"""Batch norms whose forward repeats torch's: which are recorded as norms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.burst.graph import capture
from stretto.errors import SpecError


class Copied(nn.BatchNorm1d):
    def __init__(self, *, counts=1, eps=1e-5, gain=0.0, **more):
        super().__init__(4, **more)
        self.counts, self.own_eps, self.gain = counts, eps, gain

    def forward(self, x):
        if self.training:
            for _ in range(self.counts):
                self.num_batches_tracked.add_(1)
        weight = self.weight + self.gain if self.gain else self.weight
        mean, var = self.running_mean, self.running_var
        momentum = self.momentum or 0.1
        return functional.batch_norm(
            x, mean, var, weight, self.bias, self.training, momentum, self.own_eps
        ).tanh()


def model_with(norm):
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))


def test_a_repeated_forward_is_a_norm_and_what_it_adds():
    norm = Copied()
    graph = capture(model_with(norm), (torch.randn(6, 4),))
    assert [node.num_batch_norms for node in graph.nodes] == [1, 0]
    held = next(
        part
        for part in graph.nodes[0].module.modules()
        if isinstance(part, nn.BatchNorm1d)
    )
    assert not isinstance(held, Copied)
    assert held.running_mean is norm.running_mean
    assert held.weight is norm.weight


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), Copied()

    def forward(self, x):
        h = self.norm(self.first(x)) * 2
        h += x
        h += torch.ones(())
        return h


def test_tensors_may_be_added_in_place_beside_a_repeated_forward():
    graph = capture(Added(), (torch.randn(6, 4),))
    assert sum(node.num_batch_norms for node in graph.nodes) == 1


def test_capture_leaves_the_norm_as_it_was():
    norm = Copied()
    capture(model_with(norm), (torch.randn(6, 4),))
    assert norm.num_batches_tracked == 0
    assert not norm.running_mean.any()


@pytest.mark.parametrize(
    "norm",
    [
        Copied(counts=0),
        Copied(counts=2),
        Copied(eps=0.1),
        Copied(gain=1.0),
        Copied(momentum=None),
    ],
    ids=["no count", "two counts", "other eps", "other weight", "cumulative"],
)
def test_a_forward_that_is_not_torchs_is_refused(norm):
    with pytest.raises(SpecError, match=r"test_copied_norms.py:\d+: .*batch"):
        capture(model_with(norm), (torch.randn(6, 4),))
