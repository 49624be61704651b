"""State that forward reads by other ways than an attribute of its module."""

from __future__ import annotations

import functools
import operator
import types
import weakref

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture


class Options:
    rate = 1.0


class Inner:
    def __init__(self):
        self.rate = 1.0
        self.inner = types.SimpleNamespace(rate=1.0)


settings = types.ModuleType("settings")
settings.rate = 1.0
keeper = Inner()


def scaled(h, table=[1.0]):  # noqa: B006
    return h * table[0]


def a_class(self, h):
    return h * self.options.rate


def a_module(self, h):
    return h * self.settings.rate


def a_made_name(self, h):
    return h * getattr(self.inner, f"{self.prefix}te")


def a_weak_reference(self, h):
    return h * self.keeper().rate


def its_variables(self, h):
    return h * vars(self)["rate"]


def its_dictionary(self, h):
    return h * self.__dict__["rate"]


def a_list_of_its_class(self, h):
    return h * self.shared[0]


def a_default(_self, h):
    return scaled(h)


def a_getter(self, h):
    return h * operator.attrgetter("inner.rate")(self.inner)


def a_chain(self, h):
    return h * functools.reduce(getattr, ["inner", "rate"], self.inner)


class Net(nn.Module):
    shared = [1.0]  # noqa: RUF012

    def __init__(self, function):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)
        self.function = function
        self.options, self.settings = Options, settings
        self.keeper, self.inner = weakref.ref(keeper), Inner()
        self.rate, self.prefix = 1.0, "ra"

    def forward(self, x):
        return self.two(self.function(self, self.one(x)))


@pytest.mark.parametrize(
    "function",
    [
        a_class,
        a_module,
        a_made_name,
        a_weak_reference,
        its_variables,
        its_dictionary,
        a_list_of_its_class,
        a_default,
        a_getter,
        a_chain,
    ],
)
def test_a_change_ends_a_capture_however_it_was_read(function, monkeypatch):
    model = Net(function)
    graph = capture(model, (torch.randn(2, 3),))
    assert graph.outdated() is None
    monkeypatch.setattr(Options, "rate", 2.0)
    monkeypatch.setattr(settings, "rate", 2.0)
    monkeypatch.setattr(keeper, "rate", 2.0)
    lists = [Net.shared, scaled.__defaults__[0]]
    for each in lists:
        each[0] = 2.0
    model.inner.rate = model.inner.inner.rate = model.rate = 2.0
    found = graph.outdated()
    for each in lists:
        each[0] = 1.0
    assert found is not None


def test_a_weak_reference_keeps_nothing_alive():
    model = Net(a_weak_reference)
    held = Inner()
    model.keeper = weakref.ref(held)
    graph = capture(model, (torch.randn(2, 3),))
    gone = weakref.ref(held)
    del held
    assert gone() is None
    assert graph.outdated() is not None
