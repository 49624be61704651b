"""Calls of a captured model: arguments in any form, values like the example's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.tracing.packing import Arguments
from stretto.errors import SpecError

A, B = torch.ones(2, 3), torch.zeros(2, 3)


def forward(a, b, scale=1.0, mask=None, **more):
    return a, b, scale, mask, more


@pytest.mark.parametrize(
    "example",
    [((A, B), {}), ((), {"a": A, "b": B}), ((), {"b": B, "a": A}), ((A,), {"b": B})],
)
@pytest.mark.parametrize(
    "call",
    [
        ((A, B), {}),
        ((A,), {"b": B}),
        ((), {"a": A, "b": B}),
        ((), {"b": B, "a": A}),
        ((A, B, 1.0), {}),
        ((), {"mask": None, "b": B, "scale": 1.0, "a": A}),
    ],
)
def test_arguments_are_found_by_position_or_name_in_any_order(example, call):
    arguments = Arguments(*example, forward)
    packed = arguments.pack(*call)
    assert torch.equal(packed, torch.cat([A, B], 1))
    args, kwargs = arguments.unpack(packed)
    a, b, *others = forward(*args, **kwargs)
    assert torch.equal(a, A)
    assert torch.equal(b, B)
    assert others == [1.0, None, {}]


@pytest.mark.parametrize(
    ("example", "call", "words"),
    [
        (((A, None), {}), ((A, B), {}), "'b' is a tensor, and was None"),
        (((A,), {"b": None}), ((A,), {"b": B}), "'b' is a tensor, and was None"),
        (((A, B, None), {}), ((A, None, B), {}), "'b' is None, and was a tensor"),
        (((A, {"m": None}), {}), ((A, {"m": B}), {}), "is a tensor, and was None"),
        (((A,), {}), ((None,), {}), "'a' is None, and was a tensor"),
    ],
)
def test_a_tensor_in_place_of_none_is_another_call(example, call, words):
    def takes(a, b=None, mask=None):
        return a

    with pytest.raises(SpecError) as raised:
        Arguments(*example, takes).pack(*call)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (((A,), {}), "'b' is left out, and was a tensor"),
        (((A, B, 2.0), {}), "'scale' is 2.0, and was 1.0"),
        (((A, B), {"mask": A}), "'mask' is a tensor, and was None"),
        (((A, B), {"other": 1}), "'other' is 1, and was left out"),
        (((A, B, 1.0, None, 1), {}), "'more' is 1, and was left out"),
    ],
)
def test_other_arguments_are_refused_by_the_first_that_differs(call, words):
    arguments = Arguments((A, B), {}, forward)
    with pytest.raises(SpecError, match=f"arguments than the example's: {words}"):
        arguments.pack(*call)


def test_a_default_may_be_left_out_if_the_example_gives_it():
    arguments = Arguments((A, B), {"scale": 1.0}, forward)
    assert torch.equal(arguments.pack((A,), {"b": B}), torch.cat([A, B], 1))
    given = Arguments((A, B), {"scale": 2.0}, forward)
    with pytest.raises(SpecError, match="other arguments than the example's"):
        given.pack((A, B), {})


def test_dictionaries_and_more_keywords_may_come_in_any_order():
    def takes(inputs, *rest, **named):
        return inputs, rest, named

    arguments = Arguments(({"x": A, "y": B}, A), {"u": A, "v": B}, takes)
    call = ({"y": B, "x": A}, A), {"v": B, "u": A}
    assert torch.equal(arguments.pack(*call), torch.cat([A, B, A, A, B], 1))


class Tabular(nn.Module):
    """A column of categories beside numbers in one tensor of floats."""

    def __init__(self):
        super().__init__()
        self.kinds, self.numbers = nn.Embedding(5, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.kinds(x[:, 0].long()) + self.numbers(x[:, 1:])


class Spans(nn.Module):
    """The begin and the end of a span, whose length has an embedding."""

    def __init__(self):
        super().__init__()
        self.lengths, self.last = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, span):
        return self.last(self.lengths(span[:, 1] - span[:, 0]))


class SpansOfTwo(Spans):
    """The same, of two inputs."""

    def forward(self, first, last):
        return super().forward(torch.stack([first, last], 1))


class MixedSpans(Spans):
    def forward(self, span):
        h = super().forward(span)
        return h - h.mean(0)


def spans(count):
    first = torch.arange(count) * 31 % 50
    return torch.stack([first, first + torch.arange(count) * 3 % 8], 1)


def table(count, numbers):
    return torch.cat([torch.arange(count)[:, None] % 5.0, numbers], 1)


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        (Tabular, (table(4, torch.randn(4, 3)),)),
        (Tabular, (table(4, 100 * torch.rand(4, 3)),)),
        (Spans, (spans(4),)),
        (SpansOfTwo, tuple(spans(6).unbind(1))),
    ],
)
def test_values_of_a_row_that_depend_on_each_other_are_kept_together(kind, inputs):
    graph = capture(kind(), inputs)
    assert graph.results.trial_values == "rows"


def test_one_sample_of_a_column_is_packed_beside_floats():
    words = torch.arange(6).view(2, 3)[1:, 1]
    assert words.stride() == (3,)
    arguments = Arguments((words, torch.ones(1, 2)), {}, lambda a, b: None)
    (found, _), _ = arguments.unpack(arguments.pack((words, torch.ones(1, 2)), {}))
    assert torch.equal(found, words)


def test_samples_that_are_mixed_are_found_with_whole_rows_too():
    with pytest.raises(SpecError, match="mixes samples"):
        capture(MixedSpans(), (spans(4),))


def test_whole_rows_must_be_different():
    with pytest.raises(SpecError, match="give an example of several different rows"):
        capture(Spans(), (spans(4)[[1, 1, 1]],))


@pytest.mark.parametrize(("given", "kind"), [([], "list"), ({}, "dict")])
def test_an_empty_container_in_place_of_a_tensor_is_named(given, kind):
    arguments = Arguments((A, B), {}, forward)
    with pytest.raises(SpecError, match=f"'a' is an empty {kind}, and was a tensor"):
        arguments.pack((given, B), {})


def reduced(a, reduction="none"):
    return a, reduction


def test_an_equal_text_that_is_another_object_is_accepted():
    arguments = Arguments((A,), {"reduction": "mean"}, reduced)
    arguments.pack((A,), {"reduction": "".join(["me", "an"])})


def test_another_text_is_named_with_both_values():
    arguments = Arguments((A,), {"reduction": "mean"}, reduced)
    with pytest.raises(SpecError, match="'reduction' is 'sum', and was 'mean'"):
        arguments.pack((A,), {"reduction": "sum"})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ((A[:, :2], B), "Pad samples to the example's length"),
        ((A.double(), B), "Convert inputs to the example's type"),
        ((A, B[:1]), "one number of samples, got 1, 2"),
    ],
)
def test_several_inputs_of_other_shapes_are_named(call, words):
    with pytest.raises(SpecError, match=words):
        Arguments((A, B), {}, forward).pack(call, {})
