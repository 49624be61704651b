"""Calls that only change the memory layout may depend on the number of samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.errors import SpecError


class Between(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 2)
        self.function = function

    def forward(self, x):
        return self.after(self.function(self.before(x)))


def contiguous_if_many(h):
    if len(h) >= 64:
        h = h.contiguous()
    return h.tanh()


def contiguous_if_few(h):
    if len(h) < 64:
        h = h.contiguous()
    return h.tanh()


def copied_if_many(h):
    h = h.t() * 2
    if h.shape[1] >= 64:
        h = h.contiguous()
    return h.t()


def cloned_if_few(h):
    return (h.clone() if len(h) < 64 else h).tanh()


def converted_to_its_own_type_if_many(h):
    return (h.to(torch.float32, copy=True) if len(h) >= 64 else h).tanh()


def viewed_as_it_is_if_many(h):
    return (h.view(len(h), 4) if len(h) >= 64 else h).tanh()


def several_if_many(h):
    y = h.tanh()
    if len(h) >= 64:
        h = h.contiguous().clone()
    y = y.contiguous()
    return y + h


def the_last_if_many(h):
    h = h.tanh()
    return h.contiguous() if len(h) >= 64 else h


def in_results_with_several(h):
    one, two = h.split(2, 1)
    if len(h) >= 64:
        one = one.contiguous()
    return torch.cat([two, one], 1)


@pytest.mark.parametrize(
    "function",
    [
        contiguous_if_many,
        contiguous_if_few,
        copied_if_many,
        cloned_if_few,
        converted_to_its_own_type_if_many,
        viewed_as_it_is_if_many,
        several_if_many,
        the_last_if_many,
        in_results_with_several,
    ],
)
def test_a_layout_call_for_some_numbers_of_samples_is_captured(function):
    graph = capture(Between(function), (torch.randn(6, 4),))
    for count in (1, 2, 5, 64, 100, 2000):
        graph.require_count(count)


class SpecialCount(nn.Module):
    """Treats one number of samples in another way."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) * (0.5 if len(x) == 3 else 1.0)


def test_a_number_of_samples_is_tried_however_many_came_before():
    graph = capture(SpecialCount(), (torch.randn(6, 4),))
    for count in range(20, 3, -1):
        graph.require_count(count)
    with pytest.raises(SpecError, match=r"test_layout_calls.py:\d+: "):
        graph.require_count(3)


class Classed(nn.Module):
    """Puts a learned row before each sample's rows, as vision transformers do."""

    def __init__(self, expanded):
        super().__init__()
        self.first, self.layer = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 2)
        self.expanded = expanded

    def forward(self, x):
        return self.layer(torch.cat([self.expanded(self.first, len(x)), x], 1))


@pytest.mark.parametrize(
    "expanded",
    [
        lambda row, count: row.expand(count, -1, -1),
        lambda row, count: row.broadcast_to(count, 1, 4),
        lambda row, count: row.repeat(count, 1, 1),
        lambda row, count: row.expand(count, -1, -1).contiguous(),
        lambda row, count: (row * 2).expand(count, 1, 4) + row.expand(count, 1, 4),
    ],
)
def test_a_row_that_is_expanded_for_each_sample_is_captured(expanded):
    graph = capture(Classed(expanded), (torch.randn(6, 3, 4),))
    for count in (1, 2, 5, 64):
        graph.require_count(count)


def test_a_layout_call_on_the_input_is_captured():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x.contiguous() if len(x) >= 64 else x)

    assert len(capture(Model(), (torch.randn(6, 4),)).nodes) == 1


def detached_if_many(h):
    return (h.detach() if len(h) >= 64 else h).tanh()


def cloned_without_gradient_if_many(h):
    if len(h) >= 64:
        with torch.no_grad():
            h = h.clone()
    return h.tanh()


def rounded_if_many(h):
    return (h.half().float() if len(h) >= 64 else h).tanh()


def transposed_if_many(h):
    h = h.unflatten(1, (2, 2))
    return (h.transpose(1, 2) if len(h) >= 64 else h).flatten(1)


def written_copy_if_many(h):
    h = h.tanh()
    other = h.clone() if len(h) >= 64 else h
    other.mul_(2.0)
    return other


def written_later_if_many(h):
    h = h.tanh()
    other = h.clone() if len(h) >= 64 else h
    return h.add_(1.0) * 0.0 + other


def read_by_its_memory_if_many(h):
    h = h.unflatten(1, (2, 2)).transpose(1, 2) * 2
    h = h.contiguous() if len(h) >= 64 else h
    return h.as_strided((len(h), 4), (4, 1))


@pytest.mark.parametrize(
    "function",
    [
        detached_if_many,
        cloned_without_gradient_if_many,
        rounded_if_many,
        transposed_if_many,
        written_copy_if_many,
        written_later_if_many,
        read_by_its_memory_if_many,
    ],
)
def test_what_changes_more_than_the_layout_is_refused_with_its_line(function):
    with pytest.raises(SpecError, match="number of samples") as caught:
        capture(Between(function), (torch.randn(6, 4),))
    assert "test_layout_calls.py:" in str(caught.value)


def test_a_layout_call_for_a_later_number_of_samples_is_captured():
    def function(h):
        return (h.clone() if len(h) == 9 else h.contiguous()).tanh()

    graph = capture(Between(function), (torch.randn(6, 4),))
    graph.require_count(9)


def test_another_operation_for_a_later_number_of_samples_is_refused():
    def function(h):
        return (h.clone() if len(h) == 9 else h.neg()).tanh()

    graph = capture(Between(function), (torch.randn(6, 4),))
    with pytest.raises(SpecError, match="number of samples"):
        graph.require_count(9)
