"""Places in which a forward may keep constants, and what it must not keep there."""

from __future__ import annotations

import collections
import contextvars
import threading
import types
import weakref

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.tracing.cached_values import FirstValues
from stretto.burst.tracing.proof import require_equal
from stretto.errors import SpecError

SPACE = types.SimpleNamespace()
LOCAL = threading.local()
USER = collections.UserDict()
WEAK = weakref.WeakKeyDictionary()
VARIABLE = contextvars.ContextVar("table", default=None)


def made():
    return torch.arange(4.0).cos()


class Model(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("rates", torch.arange(4.0))
        self.scale, self.others, self.table, self.rate = (
            scale,
            [nn.Linear(4, 4)],
            None,
            2.0,
        )

    def forward(self, x):
        return self.last(self.scale(self, self.first(x).tanh()))


def as_attribute_of(find):
    def scale(model, h):
        if not hasattr(find(model), "table"):
            find(model).table = made()
        return h * find(model).table

    return scale


def under_a_key_of(holder, find):
    def scale(model, h):
        if find(model) not in holder:
            holder[find(model)] = made()
        return h * holder[find(model)]

    return scale


def in_a_context_variable(_model, h):
    if VARIABLE.get() is None:
        VARIABLE.set(made())
    return h * VARIABLE.get()


@pytest.fixture(autouse=True)
def _cold():
    yield
    for space in (SPACE, LOCAL):
        vars(space).clear()
    USER.clear()
    VARIABLE.set(None)
    if hasattr(nn.Linear, "table"):
        del nn.Linear.table


@pytest.mark.parametrize(
    "scale",
    [
        as_attribute_of(lambda _: SPACE),
        as_attribute_of(lambda _: LOCAL),
        as_attribute_of(lambda model: model.others[0]),
        under_a_key_of(USER, lambda _: 4),
        under_a_key_of(WEAK, lambda model: model),
        in_a_context_variable,
    ],
)
def test_constants_in_objects_of_the_library_are_captured(scale):
    model, x = Model(scale), torch.randn(6, 4)
    graph = capture(model, (x,))
    found = model(x)
    assert type(found) is torch.Tensor
    require_equal(graph, model, (x,), None)


def test_a_model_works_after_a_refused_capture_without_a_search():
    model, x = Model(as_attribute_of(lambda _: nn.Linear)), torch.randn(6, 4)
    with pytest.raises(SpecError, match="an earlier call that kept it"):
        capture(model, (x,))
    assert not hasattr(nn.Linear, "table")
    assert type(model(x)) is torch.Tensor


@pytest.mark.parametrize(
    ("find", "name"),
    [
        (lambda model: model.first, "'first.aux'"),
        (lambda model: model.first.weight, "'first.weight.aux'"),
        (lambda model: model.rates, "'rates.aux'"),
    ],
)
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_term_kept_on_a_layer_or_tensor_is_refused(find, name, is_warm):
    def scale(model, h):
        find(model).aux = h.square().mean(1)
        return h

    model, x = Model(scale), torch.randn(6, 4)
    if is_warm:
        with torch.no_grad():
            model(x)
    with pytest.raises(SpecError, match="return it as another output") as refused:
        capture(model, (x,))
    assert name in str(refused.value)


def test_plain_tensors_of_layers_are_captured():
    model, x = Model(lambda m, h: h * m.first.scale + m.last.scale), torch.randn(6, 4)
    model.first.scale, model.last.scale = torch.arange(4.0), torch.ones(4)
    graph = capture(model, (x,))
    require_equal(graph, model, (x,), None)
    assert "scale" not in model.first._buffers


def of_a_buffer(model, h):
    if model.table is None:
        model.table = model.rates.cos()
    return h * model.table


def of_plain_state(model, h):
    if model.table is None:
        model.table = torch.arange(4.0) * model.rate
    return h * model.table


def of_a_size(model, h):
    if model.table is None or len(model.table) < int(model.rate):
        model.table = torch.arange(float(int(model.rate)))
    return h * model.table[:1]


@pytest.mark.parametrize(
    ("scale", "is_kept"),
    [(of_a_buffer, False), (of_plain_state, False), (of_a_size, True)],
)
def test_a_constant_keeps_the_value_of_the_first_call_or_is_noticed(scale, is_kept):
    model, x = Model(scale), torch.randn(6, 4)
    first = FirstValues()
    graph = capture(model, (x,))
    assert graph.changed_since(first) is None
    model.rates += 1.0
    model.rate = 3.0
    later = capture(model, (x,))
    name = graph.changed_since(first) or later.changed_since(first)
    if is_kept:
        assert name is None
    else:
        assert name is not None
        assert "'table' of" in name
        assert "test_cache_places.py:" in name
