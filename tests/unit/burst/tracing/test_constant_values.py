"""Forward may decide by the values of constants, and not by others."""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from stretto.burst.graph import capture
from stretto.errors import SpecError

GLOBAL = torch.tensor([1.0, 2.0])
KEPT: dict = {}


class Model(nn.Module):
    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.i, self.o = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.middle = middle
        self.register_buffer("times", torch.linspace(0, 1, 4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("saved", None)
        self.sizes = torch.tensor([1, 3])
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.count = torch.zeros(4)
        self.key = None
        self.box = types.SimpleNamespace(count=torch.zeros(()))

    def forward(self, x):
        return self.o(self.middle(self, self.norm(torch.tanh(self.i(x)))))


def captured(middle):
    return capture_of(Model(middle).double())


def capture_of(model):
    return capture(model, (torch.randn(5, 3).double(),), {})


def steps(m, h):
    for one, two in zip(m.times[:-1], m.times[1:], strict=True):
        h = h + float(two - one) * torch.tanh(h)
    return h


def checked(m, h):
    if not (m.times[1:] > m.times[:-1]).all():
        raise ValueError("times must grow")
    return h + m.times


def put(m, h):
    h = h.clone()
    h[:, m.mask] = 0.5
    return h


def written(_m, h):
    weights = torch.zeros(4, dtype=h.dtype)
    weights[1] = 2
    weights += 1
    return h * weights.sum().item() + weights


def written_of_buffer(m, h):
    weights = m.times.clone()
    weights[0] = 7
    return h * weights.max().item()


READS = {
    "a list": lambda _, h: sum(h * v for v in torch.linspace(0.1, 0.4, 3).tolist()),
    "a number": lambda _, h: h * torch.arange(4).sum().item(),
    "a buffer": lambda m, h: h * m.scale.item(),
    "a branch": lambda m, h: h * 2 if m.scale > 0 else h,
    "any": lambda m, h: h * m.mask if m.mask.any() else h,
    "sizes": lambda m, h: torch.cat(h.split(m.sizes.tolist(), 1)[::-1], 1),
    "a check": checked,
    "steps": steps,
    "a mask": lambda m, h: functional.pad(h[:, m.mask], (0, 1)),
    "a mask that is written": put,
    "nonzero": lambda m, h: h[:, m.mask.nonzero().squeeze(1)].repeat(1, 2)[:, :4],
    "equal": lambda m, h: h if torch.equal(m.times, m.times * 1) else -h,
    "frozen": lambda m, h: h ** float(m.frozen),
    "a global": lambda _, h: h * GLOBAL.tolist()[1],
    "data": lambda m, h: h * m.scale.data.item(),
    "a view": lambda m, h: h * m.times.view(2, 2)[1].sum().item(),
    "a constant that is written": written,
    "a copy that is written": written_of_buffer,
    "ones like samples": lambda _, h: h * torch.ones_like(h).max().item(),
    "a range": lambda _, h: functools.reduce(
        lambda y, _: torch.tanh(y), range(torch.tensor(3)), h
    ),
    "a text": lambda m, h: h * (2 if "0.5" in str(m.scale) else 1),
    "a format": lambda m, h: h * float(f"{m.scale:.2f}"),
    "an array": lambda m, h: h * float(m.times.numpy()[2]),
    "an array of NumPy's": lambda m, h: h * float(np.asarray(m.times).max()),
    "repeats": lambda m, h: h[:, :2].repeat_interleave(m.sizes, 1),
}


@pytest.mark.parametrize("name", READS)
def test_values_of_constants_are_read(name):
    # The check of the layers compares them with the model.
    assert captured(READS[name]).nodes


@pytest.mark.parametrize(
    "middle",
    [
        lambda _, h: h * (2 if h.sum() > 0 else 1),
        lambda m, h: h * float(m.i.weight.detach().max()),
        lambda m, h: h * float(m.norm.running_var.mean()),
        lambda m, h: h * (2 if m.norm.num_batches_tracked.item() > 3 else 1),
        lambda _, h: h * (2 if torch.rand(()).item() > 0.5 else 1),
        lambda _, h: h * torch.zeros(len(h)).copy_(h[:, 0]).sum().item(),
    ],
    ids=["samples", "a parameter", "statistics", "a count", "random", "written"],
)
def test_other_values_are_refused_with_the_line(middle):
    with pytest.raises(SpecError, match=r"test_constant_values.py:\d+: .* values"):
        captured(middle)


class ReadsFirst(nn.Module):
    """Reads a vector that its layer computes in each forward."""

    def __init__(self):
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(3, 4))

    def forward(self, x):
        factor = float(self.layer.parametrizations.weight[0]._u.sum())
        return self.layer(x) * factor


def test_a_value_that_forward_changes_is_refused():
    with pytest.raises(SpecError, match=r"test_constant_values.py:\d+: .* statistics"):
        capture_of(ReadsFirst().double())


@pytest.mark.parametrize(
    ("middle", "change", "name"),
    [
        (READS["a buffer"], lambda m: m.scale.data.add_(1), "scale"),
        (
            READS["steps"],
            lambda m: setattr(m, "times", m.times.clone().mul_(2)),
            "times",
        ),
        (READS["frozen"], lambda m: m.frozen.data.add_(1), "frozen"),
        (READS["a text"], lambda m: m.scale.mul_(2), "scale"),
        (READS["an array"], lambda m: m.times.mul_(2), "times"),
        (READS["sizes"], lambda m: m.sizes.copy_(torch.tensor([3, 1])), "a tensor of"),
    ],
    ids=[
        *("a buffer", "another buffer", "a parameter"),
        *("a text", "an array", "an attribute"),
    ],
)
def test_a_capture_ends_when_such_a_value_changes(middle, change, name):
    model = Model(middle).double()
    graph = capture_of(model)
    assert graph.layers_outdated() is None
    change(model)
    assert name in graph.layers_outdated()


def test_a_buffer_that_is_not_decided_by_may_change():
    model = Model(lambda m, h: h * m.scale).double()
    graph = capture_of(model)
    model.scale.mul_(2)
    assert graph.layers_outdated() is None


# Tables and counters that forward keeps.


def registered(m, h):
    if not hasattr(m, "made"):
        m.register_buffer("made", torch.linspace(0, 1, 4), persistent=False)
    return h * m.made


def in_buffer(m, h):
    if m.table is None or len(m.table) < h.shape[1]:
        m.table = torch.arange(h.shape[1])
    return h * m.table[: h.shape[1]]


def by_rows(m, h):
    if m.table is None or len(m.table) < len(h):
        m.table = torch.arange(len(h))
    return h * (m.table[: len(h)] >= 0).unsqueeze(1)


def read_from(m, h):
    if m.table is None:
        m.table = torch.linspace(0, 1, 4)
    return h * float(m.table[2])


def by_size(m, h):
    if m.key != h.shape[1:]:
        m.key = h.shape[1:]
        m.table = torch.arange(h.shape[1])
    return h * m.table


def by_values(m, h):
    key = m.times.tolist()
    if m.key != key:
        m.key = key
        m.table = torch.arange(4) * key[-1]
    return h * m.table


def list_of_values(m, h):
    if m.key is None:
        m.key = m.times.tolist()
    return h * m.key[-1]


@pytest.mark.parametrize(
    "middle",
    [registered, in_buffer, by_rows, read_from, by_size, by_values, list_of_values],
)
def test_a_table_may_be_kept_in_a_buffer(middle):
    model = Model(middle).double()
    graph = capture_of(model)
    assert model.table is None
    assert not hasattr(model, "made")
    assert graph.outdated() is None


def test_a_table_in_a_saved_buffer_is_refused():
    def middle(m, h):
        if m.saved is None:
            m.saved = torch.arange(4)
        return h * m.saved

    with pytest.raises(SpecError, match=r"'saved'.*persistent=False"):
        captured(middle)


def counts(m, h):
    m.count = m.count + 1
    return h * m.count


def counts_in_object(m, h):
    m.box.count = m.box.count + 1
    return h * m.box.count


def counts_in_global(_m, h):
    KEPT["n"] = KEPT.get("n", torch.zeros(())) + 1
    return h * KEPT["n"]


def counts_in_buffer(m, h):
    m.table = torch.zeros(4) if m.table is None else m.table + 1
    return h * m.table


def changes_sign(m, h):
    m.count = -(m.count - 1)
    return h * m.count


def decides_by_count(m, h):
    m.count = m.count + 1
    return h * 2 if m.count.max() > 3 else h


@pytest.mark.parametrize(
    "middle",
    [
        counts,
        counts_in_object,
        counts_in_global,
        counts_in_buffer,
        changes_sign,
        decides_by_count,
    ],
)
def test_a_kept_tensor_that_changes_in_each_call_is_refused(middle):
    with pytest.raises(SpecError, match="is not like a first one"):
        captured(middle)


def same_value(m, h):
    m.count = 0.5 * m.count
    return h + m.count


def test_a_kept_tensor_that_stays_the_same_is_accepted():
    assert captured(same_value).nodes


def once_twice(m, h):
    if m.table is None:
        m.table = torch.arange(4)
        return h * 2
    return h * 3


def once_in_attribute(m, h):
    if not hasattr(m, "made"):
        m.made = torch.arange(4)
        h = h * 2
    return h + m.made


def missing_in_first(_m, h):
    if "t" in KEPT:
        return h + KEPT["t"]
    KEPT["t"] = torch.arange(4)
    return h


@pytest.mark.parametrize("middle", [once_twice, once_in_attribute, missing_in_first])
def test_a_first_call_that_computes_something_else_is_refused(middle):
    KEPT.clear()
    with pytest.raises(SpecError, match="is not like a first one"):
        captured(middle)


def by_type(m, h):
    if m.table is None:
        m.table = torch.arange(4, dtype=h.dtype)
    return h + m.table


def by_cache_or_not(m, h):
    table = m.table
    if table is None:
        table = torch.arange(8)
        m.table = table
    return h * table[:4].flip(0) + m.times.clone()


@pytest.mark.parametrize("middle", [by_type, by_cache_or_not])
def test_a_first_call_that_computes_its_table_is_accepted(middle):
    assert captured(middle).nodes
