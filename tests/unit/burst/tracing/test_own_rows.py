"""Computed indexes and operators of other libraries, which may read other samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.burst import row_wise
from stretto.burst.graph import capture
from stretto.burst.tracing.layer_runs import run_layer
from stretto.errors import SpecError


class Across(nn.Module):
    """Computes an index from another layer's output."""

    def __init__(self, function):
        super().__init__()
        self.one, self.two, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.function = function

    def forward(self, x):
        c = (self.two(x).tanh()[:, 0] * 0.1 + 1e-3 * x[:, 0]).abs()
        return self.last(self.function(self.one(x), c))


def by_brackets(h, c):
    return h[torch.arange(len(h)) - c.long()]


def by_brackets_of_two(h, c):
    return h[torch.arange(len(h)) - c.long(), :]


def by_index_select(h, c):
    return h.index_select(0, torch.arange(len(h)) - c.long())


def by_gather(h, c):
    return h.gather(0, (torch.arange(len(h)) - c.long())[:, None].expand(-1, 4))


def run(graph, x):
    values = {"input": x}
    for node in graph.nodes:
        inputs = [values.get(name, x) for name in node.inputs]
        values[node.name] = run_layer(node, inputs)
    return values[graph.output]


@pytest.mark.parametrize(
    "function", [by_brackets, by_brackets_of_two, by_index_select, by_gather]
)
def test_an_index_that_leaves_its_sample_is_an_error_with_its_line(function):
    model = Across(function)
    x = torch.randn(6, 4)
    graph = capture(model, (x,))
    assert torch.allclose(run(graph, x), model(x))
    with pytest.raises(
        SpecError, match=r"test_own_rows.py:\d+: an index into the rows"
    ):
        run(graph, x + 1e5)


def by_writing(h, c):
    h = h.clone()
    h[torch.arange(len(h)) - c.long()] = 1.0
    return h


def test_an_index_for_writing_is_checked_too():
    graph = capture(Across(by_writing), (torch.randn(6, 4),))
    with pytest.raises(SpecError, match="an index into the rows"):
        run(graph, torch.randn(6, 4) + 1e5)


def by_scatter(h, c):
    index = (torch.arange(len(h)) - c.long())[:, None].expand(-1, 4)
    return torch.zeros_like(h).scatter(0, index, h)


class Indexes(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, h, c):
        return h[torch.arange(len(h)) - c.long()]

    @staticmethod
    def backward(_ctx, grad):
        return grad, None


@pytest.mark.parametrize("function", [by_scatter, lambda h, c: Indexes.apply(h, c)])
def test_a_computed_index_that_cant_be_checked_is_refused(function):
    with pytest.raises(SpecError, match="at places that are computed") as caught:
        capture(Across(function), (torch.randn(6, 4),))
    assert "test_own_rows.py:" in str(caught.value)


class Picks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, c):
        ctx.places = (c > 0.05).long()
        return h[torch.arange(len(h)), ctx.places][:, None] + 0 * h

    @staticmethod
    def backward(ctx, grad):
        made = torch.zeros_like(grad)
        made[torch.arange(len(grad)), ctx.places] = grad.sum(1)
        return made, None


@pytest.mark.parametrize(
    "function",
    [
        lambda h, c: h[torch.arange(len(h)), (c > 0.05).long()][:, None] * h,
        lambda h, c: h.gather(1, (c > 0.05).long()[:, None]) * h,
        lambda h, _: h.flatten()[torch.arange(len(h)) * 4 + h.argmax(1)][:, None] * h,
        lambda h, _: h.flatten().take(torch.arange(len(h)) * 4)[:, None] * h,
        lambda h, c: Picks.apply(h, c),
    ],
)
def test_indexes_within_samples_are_captured(function):
    model = Across(function)
    x = torch.randn(6, 4)
    assert torch.allclose(run(capture(model, (x,)), x), model(x))


def sorted_if_large(h, c):
    order = (c - 8).relu().argsort(0)
    return h + 0.1 * order[:, None]


def rolled_if_large(h, c):
    return h + (c - 8).relu().roll(1, 0).long()[:, None]


@pytest.mark.parametrize("function", [sorted_if_large, rolled_if_large])
def test_integers_from_other_samples_for_rare_values_are_refused(function):
    with pytest.raises(SpecError, match=r"test_own_rows.py:\d+: .* mixes samples"):
        capture(Across(function), (torch.randn(6, 4),))


def scale_by_largest(x):
    return x * x.abs().max().clamp(min=1e3)


def declared(name, function, **more):
    """A custom operator, forward and backward."""
    made = torch.library.custom_op(
        f"stretto_tests::{name}",
        lambda x: function(x),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        **more,
    )
    made.register_fake(torch.empty_like)
    made.register_autograd(lambda _ctx, grad: grad * 1e3)
    return made


def opaque(function):
    return lambda h, _: function(h)


def test_a_custom_operator_is_refused_with_the_way_out():
    scale = declared("largest", scale_by_largest)
    with pytest.raises(SpecError, match=r"largest' .*call stretto.burst.row_wise"):
        capture(Across(opaque(scale)), (torch.randn(6, 4),))


def test_a_custom_operator_that_is_pointwise_is_captured():
    double = declared("scaled", lambda x: x * 1e3, tags=[torch.Tag.pointwise])
    assert capture(Across(opaque(double)), (torch.randn(6, 4),)).nodes


@pytest.mark.parametrize("how", ["name", "definition", "overload"])
def test_a_custom_operator_that_is_declared_is_captured(how):
    double = declared(f"scaled_{how}", lambda x: x * 1e3)
    packet = getattr(torch.ops.stretto_tests, f"scaled_{how}")
    row_wise(
        {
            "name": f"stretto_tests::scaled_{how}",
            "definition": double,
            "overload": packet.default,
        }[how]
    )
    assert capture(Across(opaque(double)), (torch.randn(6, 4),)).nodes


def test_what_is_no_operator_can_not_be_declared():
    with pytest.raises(SpecError, match=r"takes an operator of torch\.library"):
        row_wise(scale_by_largest)
