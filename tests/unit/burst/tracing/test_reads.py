"""Places from which forward reads state: a change in any of them ends a capture."""

from __future__ import annotations

import collections
import configparser
import ctypes
import functools
import logging
import multiprocessing
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.burst.graph import capture

activation = torch.tanh
gated = functional.silu
factor = 1.0
logger = logging.getLogger("stretto_test_reads")
package = types.ModuleType("test_reads_package")
package.inner = types.ModuleType("test_reads_package.inner")
package.inner.rate = 1.0
package.inner.table = {"a": 1.0}
sys.modules["test_reads_package"] = package
sys.modules["test_reads_package.inner"] = package.inner


class Base:
    inherited = 1.0


class Options(Base):
    rate = 1.0

    class Inner:
        rate = 1.0
        table = {"a": 1.0}  # noqa: RUF012

    def __call__(self, h):
        return h * self.rate

    @property
    def gain(self):
        return 1.0

    @classmethod
    def made(cls):
        return cls.rate


class OtherOptions(Options):
    def __call__(self, h):
        return h * 2


class Chooses:
    """Has a method that only its class's base defines."""

    def __init__(self):
        self.options = Options()


options = Options()
chooses = [Chooses()]
chained = collections.ChainMap({"a": 1.0})
parsed = configparser.ConfigParser()
parsed.read_string("[a]\nrate = 1.0")
functions = {"a": lambda h: h * 1.0}


def noted(h):
    return h * noted.rate


noted.rate = 1.0


def scaled(h, rate=1.0, *, more=1.0):
    return h * rate * more


def twice(h, rate=1.0, *, more=1.0):
    return h * 2 * rate * more


@functools.lru_cache
def cached(number):
    return factor * number


def imports_within(_self, h):
    from test_reads_package.inner import rate

    return h * rate


shared = multiprocessing.Value("d", 1.0)
numbers = (ctypes.c_double * 2)(1.0, 1.0)
partial = functools.partial(scaled, rate=1.0)


class Net(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.a.rate = 1.0
        self.options, self.read = Options(), read
        self.activation = torch.tanh

    @staticmethod
    def static(h):
        return h

    @property
    def gain(self):
        return 1.0

    def extra(self, h):
        return h

    def forward(self, x):
        return self.b(self.read(self, self.a(x)))


class OtherNet(Net):
    def extra(self, h):
        return h * 2


def doubles(_self, h):
    return h * 2


two = property(lambda _: 2.0)
CASES = {
    "an attribute of a layer": (
        lambda m, h: h * m.a.rate,
        lambda m, p: p.setattr(m.a, "rate", 2.0),
    ),
    "a missing attribute of a layer": (
        lambda m, h: h * getattr(m.a, "more", 1.0),
        lambda m, p: p.setattr(m.a, "more", 2.0, raising=False),
    ),
    "a size of a layer": (
        lambda m, h: h * m.a.in_features,
        lambda m, p: p.setattr(m.a, "in_features", 2),
    ),
    "the class of an object": (
        lambda m, h: h * m.options.rate,
        lambda m, p: p.setattr(Options, "rate", 2.0),
    ),
    "a base of the class of an object": (
        lambda m, h: h * m.options.inherited,
        lambda m, p: p.setattr(Base, "inherited", 2.0),
    ),
    "what hides a base's attribute": (
        lambda m, h: h * m.options.inherited,
        lambda m, p: p.setattr(Options, "inherited", 2.0, raising=False),
    ),
    "the class of a global": (
        lambda m, h: h * options.rate,
        lambda m, p: p.setattr(Options, "rate", 2.0),
    ),
    "the class of an object in an object": (
        lambda m, h: h * chooses[0].options.rate,
        lambda m, p: p.setattr(Options, "rate", 2.0),
    ),
    "a class method": (
        lambda m, h: h * Options.made(),
        lambda m, p: p.setattr(Options, "made", classmethod(lambda _: 2.0)),
    ),
    "a class's value by a class method": (
        lambda m, h: h * m.options.made(),
        lambda m, p: p.setattr(Options, "rate", 2.0),
    ),
    "a module in a module": (
        lambda m, h: h * package.inner.rate,
        lambda m, p: p.setattr(package.inner, "rate", 2.0),
    ),
    "a table in a module in a module": (
        lambda m, h: h * package.inner.table["a"],
        lambda m, p: p.setitem(package.inner.table, "a", 2.0),
    ),
    "a class in a class": (
        lambda m, h: h * Options.Inner.rate,
        lambda m, p: p.setattr(Options.Inner, "rate", 2.0),
    ),
    "a table in a class in a class": (
        lambda m, h: h * Options.Inner.table["a"],
        lambda m, p: p.setitem(Options.Inner.table, "a", 2.0),
    ),
    "a base's attribute by the class": (
        lambda m, h: h * Options.inherited,
        lambda m, p: p.setattr(Base, "inherited", 2.0),
    ),
    "an attribute of a function": (
        lambda m, h: noted(h),
        lambda m, p: p.setattr(noted, "rate", 2.0),
    ),
    "defaults": (
        lambda m, h: scaled(h),
        lambda m, p: p.setattr(scaled, "__defaults__", (2.0,)),
    ),
    "defaults by keyword": (
        lambda m, h: scaled(h),
        lambda m, p: p.setitem(scaled.__kwdefaults__, "more", 2.0),
    ),
    "other defaults by keyword": (
        lambda m, h: scaled(h),
        lambda m, p: p.setattr(scaled, "__kwdefaults__", {"more": 2.0}),
    ),
    "the code of a function": (
        lambda m, h: scaled(h),
        lambda m, p: p.setattr(scaled, "__code__", twice.__code__),
    ),
    "the code of a method": (
        lambda m, h: m.extra(h),
        lambda m, p: p.setattr(Net.extra, "__code__", doubles.__code__),
    ),
    "the code of a function in a table": (
        lambda m, h: functions["a"](h),
        lambda m, p: p.setattr(functions["a"], "__code__", (lambda h: h * 2).__code__),
    ),
    "a global torch function": (
        lambda m, h: activation(h),
        lambda m, p: p.setitem(globals(), "activation", torch.sin),
    ),
    "a global Python function of torch": (
        lambda m, h: gated(h),
        lambda m, p: p.setitem(globals(), "gated", functional.gelu),
    ),
    "a torch function in an attribute": (
        lambda m, h: m.activation(h),
        lambda m, p: p.setattr(m, "activation", torch.sin),
    ),
    "a torch function in a module": (
        lambda m, h: functional.silu(h),
        lambda m, p: p.setattr(functional, "silu", torch.sin),
    ),
    "a static method": (
        lambda m, h: m.static(h),
        lambda m, p: p.setattr(Net, "static", staticmethod(lambda h: h * 2)),
    ),
    "a property": (
        lambda m, h: h * m.gain,
        lambda m, p: p.setattr(Net, "gain", two),
    ),
    "a property of an object": (
        lambda m, h: h * m.options.gain,
        lambda m, p: p.setattr(Options, "gain", two),
    ),
    "the call of an object": (
        lambda m, h: m.options(h),
        lambda m, p: p.setattr(Options, "__call__", doubles),
    ),
    "the call of a global object": (
        lambda m, h: options(h),
        lambda m, p: p.setattr(Options, "__call__", doubles),
    ),
    "the class of the model": (
        lambda m, h: m.extra(h),
        lambda m, p: p.setattr(m, "__class__", OtherNet),
    ),
    "the class of a layer": (
        lambda m, h: h,
        lambda m, p: p.setattr(m.a, "__class__", nn.Bilinear),
    ),
    "the class of a held object": (
        lambda m, h: m.options(h),
        lambda m, p: p.setattr(m.options, "__class__", OtherOptions),
    ),
    "a chain of tables": (
        lambda m, h: h * chained["a"],
        lambda m, p: p.setitem(chained.maps[0], "a", 2.0),
    ),
    "a parsed configuration": (
        lambda m, h: h * parsed.getfloat("a", "rate"),
        lambda m, p: p.setitem(parsed["a"], "rate", "2.0"),
    ),
    "a cached function": (
        lambda m, h: h * cached(2),
        lambda m, p: (p.setitem(globals(), "factor", 2.0), cached.cache_clear()),
    ),
    "a partial function": (
        lambda m, h: partial(h),
        lambda m, p: p.setitem(partial.keywords, "rate", 2.0),
    ),
    "a level of a logger": (
        lambda m, h: h * (2 if logger.isEnabledFor(10) else 1),
        lambda m, p: p.setattr(logger, "level", 5),
    ),
    "a frozen parameter": (
        lambda m, h: h * (2 if m.a.weight.requires_grad else 1),
        lambda m, p: m.a.weight.requires_grad_(requires_grad=False),
    ),
    "a frozen parameter behind a tensor": (
        lambda m, h: h * (2 if h.requires_grad else 1),
        lambda m, p: m.a.requires_grad_(requires_grad=False),
    ),
    "a module imported in forward": (
        imports_within,
        lambda m, p: p.setattr(package.inner, "rate", 2.0),
    ),
    "a name of globals": (
        lambda m, h: h * globals()["factor"],
        lambda m, p: p.setitem(globals(), "factor", 2.0),
    ),
    "a number in shared memory": (
        lambda m, h: h * shared.value,
        lambda m, p: p.setattr(shared, "value", 2.0),
    ),
    "an array of C": (
        lambda m, h: h * numbers[0],
        lambda m, p: numbers.__setitem__(0, 2.0),
    ),
    "the default type": (
        lambda m, h: h * torch.ones(3).element_size(),
        lambda m, p: torch.set_default_dtype(torch.float64),
    ),
}


@pytest.fixture(autouse=True)
def _same_default_type():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
    cached.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_a_change_ends_a_capture(name, monkeypatch):
    read, change = CASES[name]
    model = Net(read)
    model(torch.randn(2, 3))  # fills caches
    graph = capture(model, (torch.randn(2, 3),), verify=False)
    assert graph.outdated() is None
    model(torch.randn(2, 3))
    assert graph.outdated() is None
    change(model, monkeypatch)
    assert graph.outdated() is not None


def reading_closed_over():
    """Return reads of what a function closes over, and what changes each."""

    class Rates:
        rate = 1.0

        @staticmethod
        def static():
            return Rates.rate

    class Inherits(Rates):
        pass

    class Meta(type):
        rate = 1.0

    class HasMeta(metaclass=Meta):
        pass

    held, function, kind = types.ModuleType("test_reads_held"), torch.tanh, Rates
    held.rate = 1.0
    sys.modules[held.__name__] = held

    def helper(h):
        return h * Rates.rate

    def new_function(_patch):
        nonlocal function
        function = torch.relu

    def new_class(_patch):
        nonlocal kind
        kind = type("Other", (), {"rate": 2.0})

    def change_class(patch):
        patch.setattr(Rates, "rate", 2.0)

    return {
        "an attribute of a class": (lambda h: h * Rates.rate, change_class),
        "an inherited attribute": (lambda h: h * Inherits.rate, change_class),
        "an attribute of a class, in a helper": (lambda h: helper(h), change_class),
        "an attribute of a class, in its method": (
            lambda h: h * Rates.static(),
            change_class,
        ),
        "an attribute by a computed name": (
            lambda h: h * getattr(Rates, "ra" + "te"),
            change_class,
        ),
        "an attribute of a metaclass": (
            lambda h: h * HasMeta.rate,
            lambda patch: patch.setattr(Meta, "rate", 2.0),
        ),
        "an attribute of a module": (
            lambda h: h * held.rate,
            lambda patch: patch.setattr(held, "rate", 2.0),
        ),
        "a function": (lambda h: function(h), new_function),
        "a class": (lambda h: h * kind.rate, new_class),
    }


@pytest.mark.parametrize("name", reading_closed_over())
def test_a_change_of_what_a_function_closes_over_ends_a_capture(name, monkeypatch):
    read, change = reading_closed_over()[name]
    model = Net(lambda _model, h: read(h))
    graph = capture(model, (torch.randn(2, 3),), verify=False)
    model(torch.randn(2, 3))
    assert graph.outdated() is None
    change(monkeypatch)
    assert graph.outdated() is not None


def reading_objects_of_torch():
    """Return reads of objects of torch that a program holds, and changes of them."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    dropout, teacher = nn.Dropout(0.1), nn.Linear(3, 3).requires_grad_(False)
    adapter = logging.LoggerAdapter(logger, {"rate": 1.0})
    scale = functools.singledispatch(lambda h: h)

    def other_scale(_patch):
        scale.register(torch.Tensor, lambda h: h * 2)

    return {
        "a learning rate": (
            lambda h: h * optimizer.param_groups[0]["lr"],
            lambda p: p.setitem(optimizer.param_groups[0], "lr", 2.0),
        ),
        "a scheduler's epoch": (
            lambda h: h * (1 + schedule.last_epoch),
            lambda p: p.setattr(schedule, "last_epoch", 5),
        ),
        "a module's number": (
            lambda h: h * dropout.p,
            lambda p: p.setattr(dropout, "p", 0.2),
        ),
        "another model's mode": (
            lambda h: h * (2 if dropout.training else 1),
            lambda _: dropout.eval(),
        ),
        "another model's parameter": (
            lambda h: h + teacher(h),
            lambda p: p.setitem(
                teacher._parameters,
                "weight",
                nn.Parameter(torch.ones(3, 3), requires_grad=False),
            ),
        ),
        "what a logger adds": (
            lambda h: h * adapter.extra["rate"],
            lambda p: p.setitem(adapter.extra, "rate", 2.0),
        ),
        "a function by the argument's type": (lambda h: scale(h), other_scale),
    }


@pytest.mark.parametrize("name", reading_objects_of_torch())
def test_a_change_of_an_object_of_torch_ends_a_capture(name, monkeypatch):
    read, change = reading_objects_of_torch()[name]
    model = Net(lambda _model, h: read(h))
    graph = capture(model, (torch.randn(2, 3),), verify=False)
    model(torch.randn(2, 3))
    assert graph.outdated() is None
    change(monkeypatch)
    assert graph.outdated() is not None


def test_a_global_named_as_an_attribute_that_forward_reads_is_not_watched(monkeypatch):
    model = Net(lambda m, h: h * m.a.rate)
    monkeypatch.setitem(globals(), "rate", 1.0)
    graph = capture(model, (torch.randn(2, 3),), verify=False)
    model(torch.randn(2, 3))
    monkeypatch.setitem(globals(), "rate", 2.0)
    assert graph.outdated() is None
