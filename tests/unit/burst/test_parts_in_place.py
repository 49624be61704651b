"""Reads beside what forward writes in place through another tensor."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.tracing.layer_runs import run_layer
from stretto.errors import SpecError


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.one, self.two = nn.Linear(4, 12), nn.Linear(4, 2)
        self.function = function

    def forward(self, x):
        return self.two(self.function(self.one(x)))


def of_a_leading_dimension(h):
    """As positions of several axes are interleaved, such as in Qwen3-VL."""
    parts = h.view(-1, 3, 4).transpose(0, 1).contiguous()
    made = parts[0]
    for i in (1, 2):
        made[..., slice(i, 4, 3)] = parts[i, ..., slice(i, 4, 3)]
    return made


def of_views_made_before(h):
    parts = h.view(-1, 3, 4).transpose(0, 1).contiguous()
    one, two = parts[0], parts[1]
    one.mul_(2.0)
    return one + two


def by_select_and_narrow(h):
    parts = h.view(-1, 3, 4).transpose(0, 1).contiguous()
    parts[0].add_(1.0)
    return parts.select(0, 1) + parts.narrow(0, 2, 1)[0]


@pytest.mark.parametrize(
    "function", [of_a_leading_dimension, of_views_made_before, by_select_and_narrow]
)
def test_parts_beside_what_was_written_are_captured(function):
    torch.manual_seed(0)
    model = Model(function)
    x = torch.randn(6, 4)
    graph = capture(model, (x,))
    values = {"input": x}
    for node in graph.nodes:
        values[node.name] = run_layer(node, [values[name] for name in node.inputs])
    assert torch.allclose(values[graph.output], model(x))


def reads_the_part(h):
    parts = h.view(-1, 3, 4).transpose(0, 1).contiguous()
    parts[0].mul_(2.0)
    return parts[0]


def reads_by_an_index(h):
    parts = h.view(-1, 3, 4).transpose(0, 1).contiguous()
    parts[0].mul_(2.0)
    return parts[torch.tensor([1, 2])].sum(0)


def reads_a_place_that_more_samples_reach(h):
    whole = h.contiguous().view(-1).clone()
    whole[: 3 * len(h)].mul_(2.0)
    return whole[21 : 21 + 9 * len(h)].view(len(h), 9)[:, :4]


def reads_a_place_that_few_samples_reach(h):
    whole = h.contiguous().view(-1).clone()
    whole[:18].mul_(2.0)
    return whole[3 * len(h) :].view(len(h), 9)[:, :4]


@pytest.mark.parametrize(
    "function",
    [
        reads_the_part,
        reads_by_an_index,
        reads_a_place_that_more_samples_reach,
        reads_a_place_that_few_samples_reach,
    ],
)
def test_reads_of_what_was_written_are_refused_with_the_line(function):
    written = inspect.getsourcelines(function)[1] + 2
    with pytest.raises(SpecError, match=f"{__file__}:{written}: writes in place into"):
        capture(Model(function), (torch.randn(6, 4),))
