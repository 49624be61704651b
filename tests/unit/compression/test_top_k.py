"""What `stretto.compression.TopK` chooses, packs, saves and refuses, on one process."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.compression import PowerSGD, TopK
from stretto.compression.top_k import (
    _average,
    _packed,
    _rounded,
    count_to_send,
    index_dtype,
)
from stretto.errors import SpecError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, math.nan, math.inf, "1 %", True])
def test_a_ratio_that_is_no_share_is_refused(ratio):
    with pytest.raises(SpecError, match="share of values to send, above 0"):
        TopK(ratio)


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1.5}, {"start_step": 1}])
def test_power_sgd_refuses_numbers_out_of_range(options):
    with pytest.raises(SpecError, match="whole number of at least"):
        PowerSGD(**options)


@given(st.integers(1, 10**7), st.floats(1e-6, 1.0), st.sampled_from([2, 4, 8]))
def test_what_is_sent_is_the_share_or_all(elements, ratio, value_bytes):
    count = count_to_send(elements, ratio, value_bytes)
    share = max(1, math.ceil(ratio * elements * (1 - 1e-12)))
    assert count in (share, elements)
    if count != elements:
        assert count * (value_bytes + 4) < elements * value_bytes


def test_a_share_that_is_whole_is_not_rounded_up():
    assert count_to_send(30, 0.1, 4) == 3


def test_positions_are_as_narrow_as_their_number_allows():
    assert index_dtype(2**31) is torch.int32
    assert index_dtype(2**31 + 1) is torch.int64


def chosen(state, parameters, gradients):
    flat = torch.cat([g.flatten() for g in gradients])
    return state._choose(flat, parameters), flat


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked_bytes_are_what_was_chosen(dtype):
    """An odd number of values, so that halves end at no multiple of 4 bytes."""
    draws = torch.Generator().manual_seed(3)
    shapes = ((7, 11), (3,), (101,))
    parameters = [nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes]
    rows, means = [], torch.zeros(181, dtype=dtype)
    for _ in range(2):
        gradients = [torch.randn(s, generator=draws).to(dtype) for s in shapes]
        parts, flat = chosen(TopK(0.05), parameters, gradients)
        for part in parts:
            places = part.start + (
                torch.arange(part.values.numel())
                if part.places is None
                else part.places
            )
            assert torch.equal(part.values, flat[places])
            means[places] += part.values / 2
        rows.append(_packed(parts, flat))
    assert parts[0].places is not None
    shapes_sent = [(p.start, p.values.numel(), p.places is None) for p in parts]
    got = _average(torch.empty_like(flat), torch.stack(rows), shapes_sent)
    torch.testing.assert_close(got, means)


def test_the_largest_magnitudes_are_sent():
    parameter = nn.Parameter(torch.zeros(6))
    (part,), _ = chosen(
        TopK(1 / 3), [parameter], [torch.tensor([1.0, -5.0, 2.0, 0.0, 4.0, -3.0])]
    )
    assert sorted(part.values.tolist()) == [-5.0, 4.0]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_sent_and_residual_are_the_sum_of_gradients(dtype, seed):
    """Whole numbers: exact, so equal."""
    draws = torch.Generator().manual_seed(seed)
    parameter, state = nn.Parameter(torch.zeros(50, dtype=dtype)), TopK(0.1)
    given_sum = torch.zeros(50, dtype=torch.float64)
    sent_sum = torch.zeros(50, dtype=torch.float64)
    for _ in range(5):
        gradient = torch.randint(-9, 10, (50,), generator=draws).to(dtype)
        (part,), _ = chosen(state, [parameter], [gradient])
        given_sum += gradient
        sent_sum[part.places] += part.values
    residual = state._residuals.get(parameter)
    assert torch.equal(sent_sum + residual, given_sum)


def test_a_gradient_that_is_zero_sends_zeros_and_keeps_the_residual():
    parameter, state = nn.Parameter(torch.zeros(10)), TopK(0.1)
    chosen(state, [parameter], [torch.arange(10.0)])
    kept = state._residuals.get(parameter).clone()
    (part,), _ = chosen(state, [parameter], [torch.zeros(10)])
    assert not part.values.any()
    assert torch.equal(state._residuals.get(parameter), kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_sent_and_leaves_nothing(bad):
    parameter, state = nn.Parameter(torch.zeros(20)), TopK(0.1)
    gradient = torch.arange(20.0)
    gradient[3] = gradient[4] = gradient[5] = bad
    (part,), _ = chosen(state, [parameter], [gradient])
    assert not torch.isfinite(part.values).any()
    residual = state._residuals.get(parameter)
    assert torch.isfinite(residual).all()
    assert residual[6:].tolist() == list(range(6, 20))


def test_a_residual_beyond_float16_stays_finite():
    most = torch.finfo(torch.float16).max
    values = torch.tensor([1e6, -1e6, math.inf, 3.0])
    got = _rounded(values, torch.float16)
    assert got.tolist() == [most, -most, math.inf, 3.0]


def test_small_gradients_beside_a_large_residual_are_not_rounded_away():
    """In bfloat16, 256 + 1 is 256."""
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    state = TopK(0.25)
    gradient = torch.tensor([1000.0, 1.0, 0.0, 0.0], dtype=torch.bfloat16)
    for _ in range(300):
        chosen(state, [parameter], [gradient])
    assert state._residuals.get(parameter)[1] == 300


def test_saved_residuals_continue_in_another_model():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    state, other = TopK(0.1), TopK(0.1)
    rows = [torch.randn_like(p) for p in first.parameters()]
    chosen(state, list(first.parameters()), rows)
    other.load_state_dict(second, state.state_dict(first))
    parts, _ = chosen(state, list(first.parameters()), rows)
    again, _ = chosen(other, list(second.parameters()), rows)
    for a, b in zip(parts, again, strict=True):
        assert torch.equal(a.values, b.values)


def test_saved_residuals_are_a_copy():
    model, state = nn.Linear(8, 8), TopK(0.1)
    parameters = list(model.parameters())
    rows = [torch.randn_like(p) for p in parameters]
    chosen(state, parameters, rows)
    saved = state.state_dict(model)
    before = saved["residuals"]["weight"].clone()
    chosen(state, parameters, rows)
    assert torch.equal(saved["residuals"]["weight"], before)


@pytest.mark.parametrize("other", [nn.Linear(8, 9), nn.Sequential(nn.Linear(8, 8))])
def test_residuals_of_another_model_are_refused(other):
    model, state = nn.Linear(8, 8), TopK(0.1)
    chosen(state, list(model.parameters()), [torch.ones(8, 8), torch.ones(8)])
    with pytest.raises(SpecError, match="load it into the model"):
        TopK().load_state_dict(other, state.state_dict(model))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copy_has_the_options_and_no_residuals(again):
    model, state = nn.Linear(8, 8), TopK(0.125)
    chosen(state, list(model.parameters()), [torch.ones(8, 8), torch.ones(8)])
    other = again(state)
    assert other.ratio == 0.125
    assert other.state_dict(model) == {"residuals": {}}


def test_a_copied_power_sgd_has_its_options():
    state = copy.deepcopy(PowerSGD(3, start_step=7, min_compression_rate=1))
    assert state.torch_state.matrix_approximation_rank == 3
    assert state.torch_state.start_powerSGD_iter == 7
    assert state.torch_state.min_compression_rate == 1
