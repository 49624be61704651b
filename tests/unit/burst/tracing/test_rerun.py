"""Forward's Python code runs again and is compared, without computing."""

from __future__ import annotations

import enum
import functools
import operator
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stretto.burst.graph import capture


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Net(nn.Module):
    """Applies a function between two layers."""

    def __init__(self, between) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(3))
        self.between = between

    def forward(self, x):
        return self.b(self.between(self, self.a(x)))


def captured(between):
    model = Net(between)
    return model, capture(model, (torch.randn(4, 3),))


def line_of(function, more: int = 0) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + more}"


class Color(enum.Enum):
    RED = 1


class Number(float):
    factor: float


SETTINGS: dict[str, Any] = {"file": ""}
get_rate = operator.attrgetter("zz_rate")
HELD = threading.Event()


class Options:
    zz_rate = 1.0


options = Options()
teacher = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).requires_grad_(False).eval()


def by_file(_, h):
    return h.sin() if Path(SETTINGS["file"]).read_text() == "sin" else h.tanh()


def by_getter(_, h):
    return h * get_rate(options)


def by_event(_, h):
    return h.sin() if HELD.is_set() else h.tanh()


def by_member(_, h):
    return h * getattr(Color.RED, "zz", 1.0)


def by_other_module(_, h):
    return teacher(h)


def change_file():
    Path(SETTINGS["file"]).write_text("sin")


def change_eps():
    teacher[0].eps = 2.0


CHANGES = {
    by_file: change_file,
    by_getter: lambda: setattr(options, "zz_rate", 2.0),
    by_event: HELD.set,
    by_member: lambda: setattr(Color.RED, "zz", 2.0),
    by_other_module: change_eps,
}


@pytest.fixture(autouse=True)
def settings(tmp_path):
    SETTINGS["file"] = str(tmp_path / "word")
    Path(SETTINGS["file"]).write_text("tanh")
    yield
    HELD.clear()
    options.zz_rate = 1.0
    if hasattr(Color.RED, "zz"):
        del Color.RED.zz
    teacher[0].eps = 1e-5


@pytest.mark.parametrize("between", CHANGES)
def test_a_change_that_no_watch_sees_is_found_at_once(between):
    _, graph = captured(between)
    assert graph.rerun_difference() is None
    CHANGES[between]()
    assert graph.rerun_difference() is not None


def test_the_line_that_differs_is_named():
    _, graph = captured(by_getter)
    options.zz_rate = 2.0
    assert graph.rerun_difference() == line_of(by_getter, 1)


def test_a_change_that_is_undone_is_no_difference():
    _, graph = captured(by_getter)
    options.zz_rate = 2.0
    graph.rerun_difference()
    options.zz_rate = 1.0
    assert graph.rerun_difference() is None


def test_a_zero_of_another_sign_differs():
    options.zz_rate = 0.0
    _, graph = captured(by_getter)
    options.zz_rate = -0.0
    assert graph.rerun_difference() is not None


def test_a_forward_that_ends_earlier_differs():
    def between(_, h):
        return h if HELD.is_set() else h.tanh()

    _, graph = captured(between)
    HELD.set()
    assert graph.rerun_difference() is not None


def test_a_forward_that_raises_differs_at_the_line_that_raises():
    def between(_, h):
        if HELD.is_set():
            raise KeyError
        return h.tanh()

    _, graph = captured(between)
    HELD.set()
    assert graph.rerun_difference() == line_of(between, 2)


def test_a_forward_that_handles_all_errors_differs():
    def between(_, h):
        try:
            return h * get_rate(options)
        except BaseException:  # noqa: BLE001
            return h * 1.0

    _, graph = captured(between)
    options.zz_rate = 3.0
    assert graph.rerun_difference() is not None


def test_another_plain_output_differs():
    class Two(Net):
        def forward(self, x):
            return super().forward(x), get_rate(options)

    graph = capture(Two(by_file), (torch.randn(4, 3),))
    assert graph.rerun_difference() is None
    options.zz_rate = 2.0
    assert graph.rerun_difference() is not None


def test_another_kind_of_output_differs():
    class Two(Net):
        def forward(self, x):
            found = super().forward(x)
            return [found] if HELD.is_set() else (found,)

    graph = capture(Two(by_file), (torch.randn(4, 3),))
    assert graph.rerun_difference() is None
    HELD.set()
    assert graph.rerun_difference() is not None


def test_another_mode_around_an_operation_differs():
    def between(_, h):
        with torch.set_grad_enabled(not HELD.is_set()):
            return h.tanh()

    _, graph = captured(between)
    assert graph.rerun_difference() is None
    HELD.set()
    assert graph.rerun_difference() is not None


def test_autocast_around_an_operation_differs():
    def between(self, h):
        with torch.autocast("cpu", torch.bfloat16, enabled=HELD.is_set()):
            return (h @ self.a.weight).float()

    _, graph = captured(between)
    assert graph.rerun_difference() is None
    HELD.set()
    assert graph.rerun_difference() is not None


def by_constructor(_, h):
    return h * torch.tensor([1.0, 2.0, get_rate(options)])


def by_function(_, h):
    return Doubled.apply(h) if not HELD.is_set() else h * 2


def by_checkpoint(self, h):
    return checkpoint(by_event, self, h, use_reentrant=True)


def by_other_checkpoint(self, h):
    return checkpoint(by_event, self, h, use_reentrant=False)


def by_parts(_, h):
    parts = list(h.split(1, dim=1))
    if HELD.is_set():
        parts.reverse()
    return torch.cat(parts, 1)


def by_index(_, h):
    return h[:, 0:3] if not HELD.is_set() else h[:, [0, 2, 1]]


def by_write(_, h):
    h = h.clone()
    h[:, 0] = 2.0 if HELD.is_set() else 1.0
    h += 1
    return h


def by_buffer(self, h):
    return h * self.scale.to(h) * (2.0 if HELD.is_set() else 1.0)


def change_two():
    options.zz_rate = 2.0
    HELD.set()


@pytest.mark.parametrize(
    "between",
    [
        by_constructor,
        by_function,
        by_checkpoint,
        by_other_checkpoint,
        by_parts,
        by_index,
        by_write,
        by_buffer,
    ],
)
def test_kinds_of_calls_are_compared(between):
    _, graph = captured(between)
    assert graph.can_rerun
    assert graph.rerun_difference() is None
    change_two()
    assert graph.rerun_difference() is not None


def test_nothing_is_computed():
    model, graph = captured(by_buffer)
    with torch.profiler.profile() as profile:
        graph.rerun_difference()
    called = [e.key for e in profile.key_averages() if e.key.startswith("aten::")]
    assert not called, called
    assert type(model.a.weight) is nn.Parameter


def test_modules_random_numbers_and_caches_stay_as_they_are():
    table: list[torch.Tensor] = []

    def between(_, h):
        if not table:
            table.append(torch.arange(3.0))
        return functional.dropout(h, 0.5) + table[0]

    model, graph = captured(between)
    assert graph.can_rerun
    before = {key: dict(vars(part)) for key, part in model.named_modules()}
    drawn = torch.get_rng_state()
    assert graph.rerun_difference() is None
    assert not table
    assert torch.equal(torch.get_rng_state(), drawn)
    assert before == {key: dict(vars(part)) for key, part in model.named_modules()}


def test_a_cache_that_the_program_filled_stays_filled():
    table: list[torch.Tensor] = []

    def between(_, h):
        if not table:
            table.append(torch.arange(3.0))
        return h + table[0]

    model, graph = captured(between)
    model(torch.randn(2, 3))
    kept = table[0]
    assert graph.rerun_difference() is None
    assert table[0] is kept


def test_hooks_of_layers_are_not_called():
    model, graph = captured(by_file)
    seen: list[int] = []
    model.a.register_forward_hook(lambda *_: seen.append(1))
    assert graph.rerun_difference() is None
    assert not seen


def test_another_thread_uses_the_layers_meanwhile():
    found: list[torch.Tensor] = []
    begun, done = threading.Event(), threading.Event()

    def between(_, h):
        if HELD.is_set():
            begun.set()
            done.wait(10)
        return h.tanh()

    model, graph = captured(between)

    def other():
        begun.wait(10)
        found.append(model.a(torch.ones(2, 3)))
        done.set()

    HELD.set()
    thread = threading.Thread(target=other)
    thread.start()
    assert graph.rerun_difference() is None
    thread.join()
    assert type(found[0]) is torch.Tensor


def test_a_transformer_layer_is_one_call():
    model = nn.Sequential(
        OrderedDict(
            embed=nn.Linear(3, 8),
            encode=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            out=nn.Linear(8, 2),
        )
    )
    graph = capture(model, (torch.randn(4, 5, 3),))
    assert graph.can_rerun
    assert graph.rerun_difference() is None


def test_a_call_runs_few_lines_of_python():
    model = Net(
        lambda self, h: functools.reduce(lambda x, _: (x * 2).tanh(), [0] * 150, h)
    )
    graph = capture(model, (torch.randn(4, 3),))
    lines = [0]

    def count(*_):
        lines[0] += 1
        return count

    sys.settrace(count)
    try:
        graph.rerun_difference()
    finally:
        sys.settrace(None)
    assert lines[0] < 100 * 300


def by_old_constructor(_, h):
    return h * torch.FloatTensor([1.0, 2.0, get_rate(options)])


def by_variable(_, h):
    return torch.autograd.Variable(h) * get_rate(options)


def by_conversion(self, h):
    return self.to(torch.float32).b.weight[0] * h * get_rate(options)


def by_distribution(_, h):
    return torch.distributions.Normal(0.0, get_rate(options)).log_prob(h)


@pytest.mark.parametrize(
    "between", [by_old_constructor, by_variable, by_conversion, by_distribution]
)
def test_rare_calls_are_compared(between):
    _, graph = captured(between)
    assert graph.can_rerun
    assert graph.rerun_difference() is None
    change_two()
    assert graph.rerun_difference() is not None


def test_a_conversion_that_changes_something_differs():
    def between(self, h):
        return self.to(torch.float64 if HELD.is_set() else torch.float32) and h

    model, graph = captured(between)
    HELD.set()
    assert graph.rerun_difference() is not None
    assert model.a.weight.dtype == torch.float32


class Sizes(list):
    """A list of its own class."""


sizes = Sizes([3, 1])


def by_sizes(_, h):
    return h.unflatten(1, sizes).softmax(-1).flatten(1)


def by_array(_, h):
    return h * torch.tensor(array)


array = np.array([1.0, 0.0, 2.0], np.float32)


def change_array():
    array[1] = -0.0


def by_complex(_, h):
    return torch.complex(h, h).mul(number[0]).real


number = [complex(1.0, 0.0)]


def change_number():
    number[0] = complex(1.0, -0.0)


def by_picked(self, h):
    weight = self.a.weight if not HELD.is_set() else self.c.weight
    return torch.func.functional_call(self.a, {"weight": weight}, (h,))


IN_PLACE = {
    by_sizes: lambda: sizes.reverse(),
    by_array: change_array,
    by_complex: change_number,
    by_picked: HELD.set,
}


@pytest.mark.parametrize("between", IN_PLACE)
def test_a_change_in_place_differs(between):
    model = Net(between)
    model.c = nn.Linear(3, 3)
    graph = capture(model, (torch.randn(4, 3),))
    assert graph.can_rerun
    assert graph.rerun_difference() is None
    IN_PLACE[between]()
    assert graph.rerun_difference() is not None


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("what", ["closure", "partial"])
def test_functions_made_in_each_call_are_compared_by_their_content(what):
    def between(_, h):
        rate = get_rate(options)
        if what == "closure":
            return Applied.apply(h, lambda x: x + rate)
        return Applied.apply(h, functools.partial(torch.add, other=rate))

    _, graph = captured(between)
    assert graph.can_rerun
    assert graph.rerun_difference() is None
    options.zz_rate = 2.0
    assert graph.rerun_difference() is not None


class Counter:
    steps = 0

    def is_late(self) -> bool:
        return self.steps > 100


counter = Counter()


def by_counter(_, h):
    return h.sin() if counter.is_late() else h.tanh()


def test_a_value_that_changes_without_an_effect_is_no_change_of_layers():
    _, graph = captured(by_counter)
    counter.steps += 1
    assert graph.outdated() is not None
    assert graph.layers_outdated() is None
    assert graph.rerun_difference() is None
    counter.steps = 0


def test_a_setting_of_a_layer_is_watched_beside_forwards_code():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    graph = capture(model, (torch.randn(4, 3),))
    model[1].p = 0.25
    assert graph.rerun_difference() is None
    assert graph.layers_outdated() is not None


def test_code_that_layers_run_is_watched_by_its_values():
    def between(_, h):
        return Doubled.apply(h) if counter.steps < 100 else h

    _, graph = captured(between)
    counter.steps += 1
    assert graph.layers_outdated() is not None
    counter.steps = 0


class Lazy(Net):
    """Computes a plain value in the first call."""

    rate: float | None = None

    def forward(self, x):
        if self.rate is None:
            self.rate = get_rate(options) * x.shape[1]
            self.rows = x.shape[0]
        return self.b(self.a(x) * self.rate)


def test_what_a_first_call_keeps_stays():
    model = Lazy(by_file)
    graph = capture(model, (torch.randn(4, 3),))
    assert model.rate is None
    assert graph.rerun_difference() is None
    assert model.rate == 3.0
    options.zz_rate = 2.0
    assert graph.rerun_difference() is None
    assert graph.outdated() is None


def test_a_kept_value_that_depends_on_the_samples_does_not_stay():
    model = Lazy(by_file)
    graph = capture(model, (torch.randn(4, 3),))
    graph.rerun_difference()
    assert not hasattr(model, "rows")


def test_a_setting_that_forward_changes_for_one_call_differs():
    def between(self, h):
        self.act.negative_slope = get_rate(options)
        try:
            return self.act(h)
        finally:
            self.act.negative_slope = 1.0

    model = Net(between)
    model.act = nn.LeakyReLU(1.0)
    graph = capture(model, (torch.randn(4, 3),))
    assert graph.rerun_difference() is None
    options.zz_rate = 2.0
    assert graph.rerun_difference() == line_of(between, 3)


def test_a_setting_that_the_program_changes_is_no_difference():
    model = Net(lambda self, h: self.act(h))
    model.act = nn.LeakyReLU(1.0)
    graph = capture(model, (torch.randn(4, 3),))
    model.act.negative_slope = 0.5
    assert graph.rerun_difference() is None


def test_an_activation_that_forward_begins_to_keep_differs():
    def between(self, h):
        if HELD.is_set():
            self.features = h
        return h.tanh()

    model, graph = captured(between)
    assert graph.rerun_difference() is None
    HELD.set()
    assert graph.rerun_difference() is not None
    assert not hasattr(model, "features")


def test_a_function_that_calls_itself_is_compared():
    def between(_, h):
        def again(x, left=2):
            return again(x, left - 1) if left else x * get_rate(options)

        return Applied.apply(h, again)

    _, graph = captured(between)
    assert graph.can_rerun
    assert graph.rerun_difference() is None
