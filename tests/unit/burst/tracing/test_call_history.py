"""What forward keeps must not depend on the calls that came before."""

from __future__ import annotations

import contextvars
import functools
import types

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.errors import SpecError

CODES: dict = {}
IN_CONTEXT = contextvars.ContextVar("in_context", default={})  # noqa: B039
count = 0
last = None


class Kept(nn.Module):
    """Computes with a factor from plain state that it keeps."""

    def __init__(self, factor):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.factor = types.MethodType(factor, self)
        self.codes, self.seen, self.tuples, self.listed = {}, set(), (), []
        self.count, self.last, self.flag, self.table = 0, None, False, None
        self.options = types.SimpleNamespace(count=0, last=None)

    def forward(self, x):
        return self.scale(x) * self.factor(x)


def code_by_shape(self, x):
    return self.codes.setdefault(x.shape, len(self.codes) + 1)


def code_in_global(_self, x):
    return CODES.setdefault(x.shape, len(CODES) + 1)


def code_in_context(_self, x):
    codes = IN_CONTEXT.get()
    return codes.setdefault(x.shape, len(codes) + 1)


def code_in_default(_self, x, codes={}):  # noqa: B006 - what is tested
    return codes.setdefault(x.shape, len(codes) + 1)


def code_by_mode(self, _x):
    return self.codes.setdefault(self.training, len(self.codes) + 1)


def code_by_grad_mode(self, _x):
    return self.codes.setdefault(torch.is_grad_enabled(), len(self.codes) + 1)


def late_count(self, x):
    if x.shape != self.last:
        self.last, self.count = x.shape, self.count + 1
    return 2 if self.count > 100 else 1


def late_count_in_object(self, x):
    if x.shape != self.options.last:
        self.options.last = x.shape
        self.options.count += 1
    return 2 if self.options.count > 100 else 1


def late_count_in_global(_self, x):
    global count, last
    if x.shape != last:
        last, count = x.shape, count + 1
    return 2 if count > 100 else 1


def late_list(self, x):
    if x.shape not in self.listed:
        self.listed = [*self.listed, x.shape]
    return 2 if len(self.listed) > 100 else 1


def many_seen(self, x):
    self.seen.add(x.shape)
    return 2 if len(self.seen) > 3 else 1


def toggled(self, x):
    if x.shape != self.last:
        self.last, self.flag = x.shape, not self.flag
    return 2 if self.flag else 1


def first_mode(self, _x):
    if self.last is None:
        self.last = self.training
    return 2 if self.last else 1


def numbered_table(self, x):
    if len(x) not in self.codes:
        self.codes[len(x)] = torch.ones(len(x), 1) * (len(self.codes) + 1)
    return self.codes[len(x)]


@functools.cache
def number_of(_mode):
    global count
    count += 1
    return count


def cached_number(self, _x):
    return number_of(self.training)


DEPENDENT = [
    code_by_shape,
    code_in_global,
    code_in_context,
    code_in_default,
    code_by_mode,
    code_by_grad_mode,
    late_count,
    late_count_in_object,
    late_count_in_global,
    late_list,
    many_seen,
    toggled,
    first_mode,
    numbered_table,
    cached_number,
]


@pytest.mark.parametrize("factor", DEPENDENT)
def test_state_that_depends_on_earlier_calls_is_refused(factor):
    with pytest.raises(SpecError, match=r"test_call_history\.py:\d+: .*not like a fir"):
        capture(Kept(factor), (torch.ones(6, 4),))


@pytest.mark.parametrize("factor", DEPENDENT)
def test_a_refused_capture_leaves_state_as_it_was(factor):
    model = Kept(factor)

    def state():
        kept = {k: repr(v) for k, v in vars(model).items() if k[0] != "_"}
        return kept, dict(CODES), dict(IN_CONTEXT.get()), count, last

    before = state()
    with pytest.raises(SpecError):
        capture(model, (torch.ones(6, 4),))
    assert state() == before


def scale_by_shape(self, x):
    if x.shape not in self.codes:
        self.codes[x.shape] = x.shape[1] ** -0.5
    return self.codes[x.shape]


def scale_of_last_shape(self, x):
    if self.last != x.shape:
        self.last, self.tuples = x.shape, (x.shape[1], x.shape[1] ** -0.5)
    return self.tuples[1]


def scale_by_mode(self, _x):
    return self.codes.setdefault(self.training, 0.5 if self.training else 1.0)


def options_by_shape(self, x):
    if x.shape not in self.codes:
        self.codes[x.shape] = {"scale": 0.5, "sizes": [1, 2]}
    return self.codes[x.shape]["scale"]


def reported_once(self, x):
    if x.shape not in self.seen:
        self.seen.add(x.shape)
    return 1


def lazy(self, x):
    if self.last is None:
        self.last = x.shape[1] ** -0.5
    return self.last


def table_by_size(self, x):
    if len(x) not in self.codes:
        self.codes[len(x)] = torch.ones(len(x), 1)
    return self.codes[len(x)]


def longest_table(self, x):
    if self.count < len(x):
        self.count, self.table = len(x), torch.ones(len(x), 1)
    return self.table[: len(x)]


@functools.cache
def table_of(size):
    return torch.ones(size, 1)


def cached_table(_self, x):
    return table_of(len(x))


@functools.cache
def scale_of(size):
    return size**-0.5


def cached_scale(_self, x):
    return scale_of(x.shape[1])


@pytest.mark.parametrize(
    "factor",
    [
        scale_by_shape,
        scale_of_last_shape,
        scale_by_mode,
        options_by_shape,
        reported_once,
        lazy,
        table_by_size,
        longest_table,
        cached_table,
        cached_scale,
    ],
)
def test_a_cache_of_what_depends_on_the_call_alone_is_accepted(factor):
    capture(Kept(factor), (torch.ones(6, 4),))
