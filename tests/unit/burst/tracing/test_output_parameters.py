"""Which parameters get a gradient from each output, as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stretto.burst.graph import capture, check_again


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.function = function

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h), self.function(self, h)


def multiplied(model, h):
    made = model.c(h)
    return made.mul_(model.d(h))


def filled(model, h):
    made = torch.zeros_like(h)
    made.copy_(model.c(h))
    made[:, 0] = model.d(h)[:, 0]
    return made


def filled_through_a_view(model, h):
    made = model.c(h)
    made[:, 1:].mul_(model.d(h)[:, 1:])
    return made


def multiplied_without_gradients(model, h):
    made, factor = model.c(h), model.d(h)
    with torch.no_grad():
        made.mul_(factor)
    return made


def augmented_without_gradients(model, h):
    made, more = model.c(h), model.d(h)
    with torch.no_grad():
        made += more
        made[:, 0] = more[:, 1]
        torch.nn.functional.relu(made, inplace=True)
    return made


def written_with_and_without_gradients(model, h):
    made = model.c(h)
    with torch.no_grad():
        made.neg_()
        with torch.enable_grad():
            made.mul_(model.d(h))
        made.add_(1.0)
    return made


def multiplied_in_a_list_without_gradients(model, h):
    made = model.c(h)
    with torch.no_grad():
        torch._foreach_mul_([made], 0.5)
    return made.tanh()


def dropped_without_gradients(model, h):
    made = model.c(h) + model.d(h)
    with torch.no_grad():
        torch.nn.functional.dropout(made, 0.0, training=True, inplace=True)
    return made


def of_anothers_type(model, h):
    return model.c(h).type_as(model.d(h))


def of_anothers_shape(model, h):
    made = model.d(h)
    more = made.new_full(h.shape, 2.0) + torch.zeros_like(model.b(h)) + made.data
    return model.c(h).view_as(made) * more


def of_a_parameters_shape(model, h):
    return model.c(h) + model.d.weight.new_ones(h.shape) + model.d.bias.data


def filled_without_gradients(model, h):
    made = model.c(h).detach()
    with torch.no_grad():
        made.copy_(model.d(h))
    return made + h


@pytest.mark.parametrize(
    "function",
    [
        multiplied,
        filled,
        filled_through_a_view,
        multiplied_without_gradients,
        augmented_without_gradients,
        written_with_and_without_gradients,
        filled_without_gradients,
        multiplied_in_a_list_without_gradients,
        dropped_without_gradients,
        of_anothers_type,
        of_anothers_shape,
        of_a_parameters_shape,
    ],
)
def test_each_output_gives_gradients_to_the_same_parameters_as_the_module(function):
    torch.manual_seed(0)
    model = Model(function)
    x = torch.randn(6, 4)
    found = capture(model, (x,)).results.output_parameters
    names, parameters = zip(*model.named_parameters(), strict=True)
    for output, reached in zip(model(x), found, strict=True):
        grads = torch.autograd.grad(
            output.sum(), parameters, retain_graph=True, allow_unused=True
        )
        pairs = zip(names, grads, strict=True)
        assert reached == {name for name, grad in pairs if grad is not None}


GATE = {"open": True}


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, grad: Tensor):
        return grad if GATE["open"] else None


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(Gate.apply(self.one(x)))


@pytest.mark.parametrize("is_open", [True, False])
def test_a_capture_is_not_used_for_a_backward_that_gives_other_gradients(is_open):
    model, x = Gated(), torch.randn(6, 4)
    GATE["open"] = is_open
    graph = capture(model, (x,))
    assert check_again(graph, model, (x,))
    GATE["open"] = not is_open
    assert graph.unproven() is not None
    assert not check_again(graph, model, (x,))


def test_a_capture_is_checked_again_when_what_a_backward_may_withhold_is_unfrozen():
    model, x = Gated(), torch.randn(6, 4)
    GATE["open"] = False
    graph = capture(model, (x,))
    model.one.requires_grad_(False)
    GATE["open"] = True
    check_again(graph, model, (x,))
    assert graph.unproven() is None
    model.one.requires_grad_(True)
    assert graph.unproven() is not None
    assert not check_again(graph, model, (x,))


def test_gradients_that_no_operation_shows_count_for_all_outputs():
    model, x = Model(multiplied), torch.randn(6, 4)
    results = capture(model, (x,)).results
    results.output_parameters = (frozenset(), frozenset())
    results.correct(frozenset({"d.bias"}), model, [])
    every = {name for name, _ in model.named_parameters()} - {"d.bias"}
    assert results.output_parameters == (every, every)
