"""A forward may keep constants in caches; capture leaves no trace in them."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from stretto.burst.graph import capture
from stretto.burst.tracing.cached_values import FirstValues
from stretto.burst.tracing.proof import require_equal
from stretto.errors import SpecError

TABLES: dict = {}
LISTED: list = []
table = None


@functools.cache
def cached(size):
    return torch.arange(float(size))


@functools.lru_cache(maxsize=4)
def cached_pair(size):
    return torch.arange(float(size)), [torch.ones(size)]


def memoized(function):
    kept = {}

    def call(size):
        if size not in kept:
            kept[size] = function(size)
        return kept[size]

    return call


from_closure = memoized(lambda size: torch.arange(float(size)))


def from_default(size, kept={}):  # noqa: B006 - what is tested
    if size not in kept:
        kept[size] = torch.arange(float(size))
    return kept[size]


class Rotary:
    def __init__(self):
        self.length, self.cos = 0, None

    def table(self, size):
        if self.length < size:
            self.length, self.cos = size, torch.arange(float(size)).cos()
        return self.cos[:size]


class Model(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("rates", torch.rand(4))
        self.scale, self.kept, self.one, self.length = scale, {}, None, 0
        self.rotary = Rotary()

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(self.scale(self, h))


def in_a_dictionary(model, h):
    if 4 not in model.kept:
        model.kept[4] = torch.arange(4.0).to(h) + h.new_ones(4)
    return h * model.kept[4]


def in_an_attribute_beside_its_length(model, h):
    if model.length < h.shape[1]:
        model.one, model.length = torch.arange(4.0) * model.rates, h.shape[1]
    return h * model.one


def in_a_global_dictionary_from_a_buffer(model, h):
    if "rates" not in TABLES:
        TABLES["rates"] = model.rates.cos()
    return h * TABLES["rates"]


def in_a_global_by_number_of_samples(_model, h):
    if h.shape[0] not in TABLES:
        TABLES[h.shape[0]] = torch.full((h.shape[0], 1), 2.0)
    return h * TABLES[h.shape[0]]


def in_a_global(_model, h):
    global table
    if table is None:
        table = torch.arange(4.0)
    return h * table


def in_a_global_list(_model, h):
    if not LISTED:
        LISTED.append(torch.arange(4.0))
    return h * LISTED[0]


WAYS = (
    in_a_dictionary,
    in_an_attribute_beside_its_length,
    in_a_global_dictionary_from_a_buffer,
    in_a_global_by_number_of_samples,
    in_a_global,
    in_a_global_list,
    lambda _model, h: h * cached(4),
    lambda _model, h: h * cached_pair(4)[0] + cached_pair(4)[1][0],
    lambda _model, h: h * from_closure(4),
    lambda _model, h: h * from_default(4),
    lambda model, h: h * model.rotary.table(4),
)


@pytest.fixture(autouse=True)
def _cold():
    global table
    TABLES.clear()
    LISTED.clear()
    table = None
    cached.cache_clear()
    cached_pair.cache_clear()
    for held in (from_closure.__closure__[1].cell_contents, from_default.__defaults__):
        (held if isinstance(held, dict) else held[0]).clear()


def state_of(model):
    return {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in (*vars(model).items(), *vars(model.rotary).items())
    }


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_of_constants_is_captured_and_left_as_it_was(way, is_warm):
    torch.manual_seed(0)
    model, x = Model(way), torch.randn(6, 4)
    if is_warm:
        model(x)
    before, kept = state_of(model), {**TABLES}
    graph = capture(model, (x,))
    assert state_of(model) == before
    assert kept == TABLES
    found = model(x)  # plain, and of the model's own buffers, not of the check's
    assert type(found) is torch.Tensor
    graph.require_count(6)
    graph.require_count(9)
    require_equal(graph, model, (x,), None)
    TABLES.clear()
    assert torch.equal(found, model(x))


def of_samples(model, h):
    model.one = h * 2
    return h


def of_a_parameter(model, h):
    if model.one is None:
        model.one = model.first.weight.detach().sum()
    return h * model.one


def of_random_numbers(_model, h):
    if "drawn" not in TABLES:
        TABLES["drawn"] = torch.randn(4)
    return h * TABLES["drawn"]


def of_samples_in_a_global_list(_model, h):
    LISTED.append(h * 2)
    return h


def of_samples_by_a_write(model, h):
    if model.one is None:
        model.one = torch.zeros(4)
    model.one[:2] = h.detach()[0, :2]
    return h * model.one


@pytest.mark.parametrize(
    ("way", "source", "name"),
    [
        (of_samples, "module 'first'", "'one'"),
        (of_a_parameter, "'first.weight'", "'one'"),
        (of_random_numbers, "random numbers", "TABLES'"),
        (of_samples_in_a_global_list, "module 'first'", "LISTED'"),
        (of_samples_by_a_write, "module 'first'", "'one'"),
    ],
)
def test_other_tensors_that_forward_keeps_are_refused_with_line_and_source(
    way, source, name
):
    model, x = Model(way), torch.randn(6, 4)
    with pytest.raises(SpecError) as refused:
        capture(model, (x,))
    text = str(refused.value)
    assert "test_caches.py:" in text
    assert f"computed from {source}" in text.replace("the output of ", "")
    assert name in text
    assert model.one is None
    assert not TABLES
    assert not LISTED
    assert type(model(x)) is torch.Tensor


def counted(model, h):
    model.length += 1
    if model.one is None:
        model.one = torch.arange(4.0)
    return h * model.one * model.length


def test_a_counter_beside_a_cache_is_refused_by_its_line():
    line = counted.__code__.co_firstlineno + 1
    words = rf"test_caches.py:{line}: forward of Model changes 'length' in each call"
    with pytest.raises(SpecError, match=words):
        capture(Model(counted), (torch.randn(6, 4),))


@pytest.mark.parametrize(
    "way",
    [
        in_a_dictionary,
        in_an_attribute_beside_its_length,
        in_a_global,
        lambda model, h: h * model.rotary.table(4),
    ],
)
def test_a_capture_holds_while_caches_contain_what_layers_compute(way):
    global table
    model, x = Model(way), torch.randn(6, 4)
    graph = capture(model, (x,))
    model(x)
    assert graph.outdated() is None
    graph.require_count(6)
    other = torch.full((4,), 3.0)
    if way is in_a_global:
        table = other
    elif way is in_a_dictionary:
        model.kept[4] = other
    else:
        model.one = model.rotary.cos = other
    assert graph.outdated() is not None


mask = None


def masked(_model, h):
    return h if mask is None else h * mask


def test_an_empty_global_at_capture_is_noticed_when_it_is_set(monkeypatch):
    graph = capture(Model(masked), (torch.randn(6, 4),))
    assert graph.outdated() is None
    monkeypatch.setitem(globals(), "mask", torch.zeros(4))
    assert graph.outdated() is not None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_parameters_that_a_recurrent_module_lists_are_no_cache(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([kind(4, 4, batch_first=True)])

        def forward(self, x):
            return self.parts[0](x)[0]

    model, x = Recurrent(), torch.randn(3, 5, 4)
    capture(model, (x,))
    assert type(model(x)) is torch.Tensor


class Frozen(OrderedDict):
    """A dictionary that refuses changes, such as the configuration of diffusers."""

    def __setitem__(self, key, value):
        if hasattr(self, "is_made"):
            raise TypeError("frozen")
        super().__setitem__(key, value)

    def update(self, *args, **kwargs):
        raise TypeError("frozen")


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * self.config["scale"]


def test_a_configuration_that_refuses_changes_is_left_alone():
    config = Frozen(scale=2.0, sizes=[1, 2])
    config.is_made = True
    capture(Configured(config), (torch.randn(3, 4),))
    assert list(config.items()) == [("scale", 2.0), ("sizes", [1, 2])]


def test_a_dictionary_that_forward_reorders_is_restored():
    class Reordered(Configured):
        def forward(self, x):
            self.config.move_to_end("scale")
            return super().forward(x)

    config = OrderedDict(scale=2.0, other=1.0)
    with contextlib.suppress(SpecError):
        capture(Reordered(config), (torch.randn(3, 4),))
    assert list(config) == ["scale", "other"]


def test_a_capture_leaves_nothing_in_the_cache_of_parametrizations():
    layer = nn.Linear(4, 3)
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    model, x = nn.Sequential(layer, nn.ReLU()), torch.randn(5, 4)
    wanted = model(x)
    with parametrize.cached():
        capture(model, (x,))
        assert torch.equal(model(x), wanted)


class InAHook(nn.Module):
    """Keeps something in a module that runs as one operation."""

    def __init__(self, keep):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.inside = Keeps(keep)
        self.inside.register_forward_hook(lambda _module, _given, found: found * 0.5)

    def forward(self, x):
        return self.last(self.inside(self.first(x).tanh()))


class Keeps(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.kept, self.keep = {}, keep

    def forward(self, h):
        return h * self.keep(self, h)


def a_constant(module, h):
    if 4 not in module.kept:
        module.kept[4] = torch.arange(4.0).to(h)
    return module.kept[4]


def a_mean_of_samples(module, h):
    if 4 not in module.kept:
        module.kept[4] = h.detach().mean(0)
    return module.kept[4]


def a_constant_with_samples_added(module, h):
    if 4 not in module.kept:
        kept = module.kept[4] = torch.zeros(4)
        torch._foreach_add_([kept], [h.detach()[0]])
    return module.kept[4]


@pytest.mark.parametrize("keep", [a_constant, lambda _module, _h: cached(4)])
def test_a_constant_that_a_module_with_hooks_keeps_is_captured(keep):
    model = InAHook(keep)
    capture(model, (torch.randn(6, 4),))
    assert not model.inside.kept


@pytest.mark.parametrize("keep", [a_mean_of_samples, a_constant_with_samples_added])
def test_samples_that_a_module_with_hooks_keeps_are_refused(keep):
    with pytest.raises(SpecError, match="keeps a tensor in its attribute"):
        capture(InAHook(keep), (torch.randn(6, 4),))


def test_a_table_that_a_module_with_hooks_would_compute_otherwise_now_is_found():
    factor = [1.0]

    @functools.cache
    def scaled(size):
        return factor[0] * torch.arange(float(size))

    model, first = InAHook(lambda _module, _h: scaled(4)), FirstValues()
    assert capture(model, (torch.randn(6, 4),)).changed_since(first) is None
    factor[0] = 2.0
    found = capture(model, (torch.randn(6, 4),)).changed_since(first)
    assert found is not None
    assert "scaled" in found
