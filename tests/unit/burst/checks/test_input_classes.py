"""Inputs that are one tensor, or one that the model holds."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.burst.checks.input_classes import InputClasses
from stretto.burst.graph import capture
from stretto.errors import StrettoError

X = torch.randn(6, 4)
GUARD: Any = SimpleNamespace(opened=contextlib.nullcontext)


class Pair(nn.Module):
    """The sum of a layer's outputs for two inputs.

    With ``doubles`` the sum is doubled where both inputs are one tensor.
    """

    def __init__(self, doubles: bool) -> None:
        super().__init__()
        self.layer, self.doubles = nn.Linear(4, 4), doubles
        self.last: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.layer(y)
        is_one = x is y or x is self.last
        return found * 2 if is_one and self.doubles else found


def check(model: Pair, *args: Tensor) -> None:
    graph = capture(model, (X, X.clone()))
    same = graph.one_tensor_as(args)
    assert same
    InputClasses(model, GUARD).require_no_effect(graph, args, {}, same)


def test_a_tensor_that_is_passed_twice_may_not_change_the_result():
    with pytest.raises(StrettoError, match=r"classes\.py:\d+: input 1 is .* input 0"):
        check(Pair(doubles=True), X, X)


def test_an_input_that_the_model_holds_may_not_change_the_result():
    model = Pair(doubles=True)
    model.last = X
    with pytest.raises(StrettoError, match="input 0 is the same tensor as 'last'"):
        check(model, X, X.clone())


def test_a_tensor_may_be_passed_twice_if_that_changes_nothing():
    check(Pair(doubles=False), X, X)


class Stops(Pair):
    """Stops the gradient of one of two inputs if they are one tensor."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.layer(y)
        return self.layer(x) + (found.detach() if x is y else found)


def test_a_tensor_that_is_passed_twice_may_not_change_gradients_alone():
    with pytest.raises(StrettoError, match="input 0, which changes the gradients in"):
        check(Stops(doubles=False), X, X)


class StopsInput(Pair):
    """Stops the gradient of one of two inputs themselves if they are one tensor."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y.detach() if x is y else y)


def test_a_tensor_that_is_passed_twice_may_not_change_its_own_gradient_alone():
    x = X.clone().requires_grad_()
    with pytest.raises(StrettoError, match="input 0, which changes the gradients in"):
        check(StopsInput(doubles=False), x, x)


def test_a_tensor_that_needs_a_gradient_may_be_passed_twice():
    leaf = X.clone().requires_grad_()
    x = leaf * 1
    check(Pair(doubles=False), x, x)
    x.sum().backward()  # its graph is still there
    assert torch.equal(leaf.grad, torch.ones_like(X))


def test_what_changes_no_result_of_one_capture_is_not_known_in_another():
    model = Pair(doubles=False)
    classes = InputClasses(model, GUARD)
    graph = capture(model, (X, X.clone()))
    same = graph.one_tensor_as((X, X))
    classes.require_no_effect(graph, (X, X), {}, same)
    assert classes.is_known(graph, same)
    model.doubles = True
    assert not classes.is_known(capture(model, (X, X.clone())), same)


def test_a_tensor_of_one_row_may_be_passed_twice_through_a_batch_norm():
    class Normalizes(Pair):
        def __init__(self) -> None:
            super().__init__(doubles=False)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = self.norm(super().forward(x, y))
            return found

    row = X[:1].clone()
    check(Normalizes(), row, row)
