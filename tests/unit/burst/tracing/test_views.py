"""Writes in place through a view of a tensor, which layers see as a new tensor."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.errors import SpecError


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.one, self.two = nn.Linear(4, 12), nn.Linear(4, 2)
        self.function = function

    def forward(self, x):
        return self.two(self.function(self.one(x)).reshape(-1, 12)[:, :4])


def augmented(h):
    h[:, 0] += 1.0
    h[..., 1:3] *= h[..., 3:5].clone()
    return h


def filled_in_parts(h):
    made = torch.empty_like(h)
    made[:, :8].copy_(h[:, 4:])
    made[:, 8:].copy_(h[:, :4] * 2)
    return made


def through_a_chain(h):
    parts = h.view(len(h), 3, 4).transpose(1, 2)
    parts[:, 0, :].clamp_(-0.5, 0.5)
    parts[:, 1:3][:, 0].mul_(3.0)
    return h + parts.transpose(1, 2).flatten(1)


def by_select_and_narrow(h):
    h.select(1, 0).mul_(0.5)
    torch.narrow(h, 1, 2, 2).mul_(3.0)
    torch.relu_(h[:, 5:7])
    return h


def another_view_reads(h):
    one, two = h[:, :6], h[:, 3:9]
    one.mul_(2.0)
    two.add_(one)
    return torch.cat((one, two), 1)


def the_owner_is_written(h):
    part = h.unflatten(1, (3, 4))
    h.mul_(part.sum(2).repeat(1, 4))
    return part


def of_a_leading_dimension(h):
    """Write as models do that interleave positions of several axes (Qwen3-VL)."""
    parts = h.view(-1, 3, 4).transpose(0, 1).contiguous()
    made = parts[0]
    for i in (1, 2):
        made[..., slice(i, 4, 3)] = parts[i, ..., slice(i, 4, 3)]
    return made.repeat(1, 3)


def several_views_at_once(h):
    table = torch.arange(12.0, dtype=h.dtype).view(3, 4)
    one, two, _ = table.unbind(0)
    one.add_(1.0)
    two.mul_(one)
    return h * table.flatten()


def of_the_whole_without_gradients(h):
    made = h * 2
    with torch.no_grad():
        made += h.tanh()
        made.mul_(h)
    return made


CAPTURED = [
    augmented,
    filled_in_parts,
    through_a_chain,
    by_select_and_narrow,
    another_view_reads,
    the_owner_is_written,
    of_a_leading_dimension,
    several_views_at_once,
    of_the_whole_without_gradients,
]


@pytest.mark.parametrize("function", CAPTURED)
def test_a_write_through_a_view_is_captured_with_its_gradient(function):
    torch.manual_seed(0)
    model = Model(function).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    rows = x[:3]
    values = {"input": rows}
    for node in graph.nodes:
        values[node.name] = node.module(*(values[name] for name in node.inputs))
    found, wanted = (
        torch.autograd.grad(y.tanh().sum(), list(model.parameters()))
        for y in (values[graph.output], model(rows))
    )
    assert torch.allclose(values[graph.output], model(rows))
    assert all(map(torch.allclose, found, wanted))


def through_data(h):
    made = h.clone()
    made.data[:, 0] = 0.0
    return made


def through_detach(h):
    made = h.clone()
    made.detach()[:, 0].mul_(2.0)
    return made


def without_gradients(h):
    made = h.clone()
    with torch.no_grad():
        made[:, 0].mul_(2.0)
    return made


def of_one_sample(h):
    made = h.clone()
    made[0].mul_(2.0)
    return made


@pytest.mark.parametrize(
    "function", [through_data, through_detach, without_gradients, of_one_sample]
)
def test_a_write_that_layers_would_not_repeat_is_refused_with_its_line(function):
    first = inspect.getsourcelines(function)[1]
    with pytest.raises(SpecError, match=f"{__file__}:{first + 2}|{first + 3}: "):
        capture(Model(function), (torch.randn(6, 4),))


def after_tanh(h):
    made = torch.tanh(h)
    made[:, 0].mul_(2.0)
    return made


def into_an_argument_of_a_product(h):
    made = torch.relu_(h.clone())
    product = made * h
    made.unflatten(1, (3, 4))[:, 1].add_(1.0)
    return product


@pytest.mark.parametrize("function", [after_tanh, into_an_argument_of_a_product])
def test_a_write_that_breaks_backward_is_refused_with_its_line(function):
    lines, first = inspect.getsourcelines(function)
    line = first + len(lines) - 2
    with pytest.raises(SpecError, match=f"{__file__}:{line}: backward fails"):
        capture(Model(function), (torch.randn(6, 4),))


def without_backward(h):
    return torch.special.gammainc(h.abs() + 1.0, torch.ones_like(h))


def test_an_operation_without_a_backward_is_refused_with_its_line():
    line = inspect.getsourcelines(without_backward)[1] + 1
    with pytest.raises(SpecError, match=f"{__file__}:{line}: backward fails"):
        capture(Model(without_backward), (torch.randn(6, 4),))
