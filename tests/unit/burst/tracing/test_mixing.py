"""Operations that mix samples are refused where their effect is zero at capture."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stretto.burst.graph import capture
from stretto.burst.tracing import layer_runs, proof
from stretto.errors import SpecError


class Gated(nn.Module):
    """Adds something of other samples, times a factor that is zero at first."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(-0.5))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("number", torch.tensor(0))

    def forward(self, x):
        h = self.norm(self.before(x)).tanh()
        factor = {
            "flag": lambda: self.flag,
            "number": lambda: self.number,
            "scale": lambda: self.scale.relu(),
            "batches": lambda: self.norm.num_batches_tracked > 2,
            "uniform": lambda: torch.rand(len(h), 1) < 0.5,
            "normal": lambda: torch.randn(len(h), 1) > 0.5,
        }[self.kind]()
        return self.after(h + factor * h.roll(1, 0))


@pytest.mark.parametrize(
    "kind", ["flag", "number", "scale", "batches", "uniform", "normal"]
)
def test_mixing_behind_a_factor_that_is_zero_now_is_refused_with_its_line(kind):
    code = Gated.forward.__code__
    line = max(line for *_, line in code.co_lines() if line)
    with pytest.raises(SpecError, match=f"test_mixing.py:{line}: 'roll' mixes samples"):
        capture(Gated(kind), (torch.randn(6, 4),))


class Inside(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.before(x).tanh()
        return self.after(h + self.function(h))


def written_over(h):
    other = h.flip(0)
    other.mul_(0.0)
    return other


def rolls_far(h):
    return 0 * h.roll(20, 0)


def rolls_by_columns(h):
    return 0 * h.t().roll(1, 1).t()


def rolls_heads(h):
    return 0 * h.view(-1, 2).roll(2, 0).view(-1, 4)


def near_ones(h):
    near = (torch.cdist(h, h) < 0.01).to(h.dtype)
    return near / near.sum(1, keepdim=True) @ h


def kernel(h):
    return (-1e6 * torch.cdist(h, h).square()).softmax(1) @ h


def same_signs(h):
    signs = h.sign()
    same = (signs @ signs.t() == 4).to(h.dtype)
    return same / same.sum(1, keepdim=True) @ h


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (written_over, "'flip' mixes"),
        (rolls_far, "'roll' mixes"),
        (rolls_by_columns, "'roll' mixes"),
        (rolls_heads, "'roll' mixes"),
        (near_ones, "'cdist' compares each sample with the others"),
        (kernel, "'cdist' compares each sample with the others"),
        (same_signs, "'matmul' compares each sample with the others"),
    ],
)
def test_mixing_whose_effect_random_rows_do_not_show_is_refused(function, message):
    with pytest.raises(SpecError, match=message) as caught:
        capture(Inside(function), (torch.randn(6, 4),))
    assert "test_mixing.py:" in str(caught.value)


def heads_outer(h):
    return (
        h.view(-1, 2, 2)
        .transpose(0, 1)
        .reshape(-1, 2)
        .sin()
        .view(2, -1, 2)[0]
        .sum(1, keepdim=True)
    )


def between_others(h):
    parts = h.view(-1, 2, 2).transpose(0, 1).flatten()  # two, samples, two
    return parts.square().view(2, -1, 2).transpose(0, 1).reshape(-1, 4)


def as_groups(h):
    kernel = h.reshape(-1, 1, 4)
    return functional.conv1d(h.reshape(1, -1, 4), kernel, groups=len(h)).view(-1, 1)


def in_place_later(h):
    made = h * 2
    made.add_(1).mul_(h)
    return made


def ties(h):
    return (h - h).sign() + (h.softmax(1).sum(1, keepdim=True) - 1).sign() * 0


def two_views(h):
    both = torch.cat([h, h * 2])
    one, two = both.chunk(2)
    return one - two


@pytest.mark.parametrize(
    "function",
    [heads_outer, between_others, as_groups, in_place_later, ties, two_views],
)
def test_samples_in_any_part_of_a_dimension_are_captured(function):
    torch.manual_seed(0)
    module = Inside(function).double()
    graph = capture(module, (torch.randn(6, 4, dtype=torch.float64),))
    x = torch.randn(3, 4, dtype=torch.float64)
    values = {"input": x}
    for node in graph.nodes:
        values[node.name] = node.module(*(values[name] for name in node.inputs))
    assert torch.allclose(values[graph.output], module(x))


def beyond_a_margin(h):
    return functional.relu(h - 8).flip(0)


def convolved(h):
    far = functional.hardshrink(h, 8.0).t().unsqueeze(1)
    return functional.conv1d(far, torch.ones(1, 1, 3), padding=1)[:, 0].t()


def where_a_mask_is_true(h):
    return h.where((h > 8).roll(1, 0).logical_not(), 0.0)


def where_a_mask_is_true_elsewhere(h):
    return h * (h > 8)[torch.arange(len(h)).flip(0)]


def _first_or_own(h):
    return torch.where(h[:, 0] > 8, 0, torch.arange(len(h)))


def first_for_some(h):
    return h.index_select(0, _first_or_own(h))


def added_to_the_first(h):
    return torch.zeros_like(h).index_add(0, _first_or_own(h), h)


def written_into_the_first(h):
    return h.index_put((_first_or_own(h),), h)


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (beyond_a_margin, "flip"),
        (convolved, "conv1d"),
        (where_a_mask_is_true, "roll"),
        (where_a_mask_is_true_elsewhere, "getitem"),
        (first_for_some, "index_select"),
        (added_to_the_first, "index_add"),
        (written_into_the_first, "index_put"),
    ],
)
def test_mixing_of_values_that_do_not_come_at_capture_is_refused(function, operation):
    with pytest.raises(SpecError, match=f"{operation}'(: it)? mixes") as caught:
        capture(Inside(function), (torch.randn(6, 4),))
    assert "test_mixing.py:" in str(caught.value)


def positive_definite(h):
    matrices = h[:, :, None] * h[:, None] + 5 * torch.eye(4)
    return torch.linalg.cholesky(matrices).sum(1)


def flat_cells(h):
    cells = (h.sigmoid() * 4).long()  # in range for values from 0 to 1 only
    first = torch.arange(len(h))[:, None] * 4
    return h.flatten()[first + cells]


@pytest.mark.parametrize("function", [positive_definite, flat_cells])
def test_operations_that_need_values_in_a_range_are_captured(function):
    assert capture(Inside(function), (torch.randn(6, 4),)).nodes


class CountsGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * (1 + (self.linear.weight.grad is not None))


def test_a_forward_that_reads_whether_there_is_a_gradient_is_refused():
    with pytest.raises(SpecError, match=r"reads \.grad of a tensor in forward"):
        capture(CountsGradients(), (torch.randn(6, 4),))


def test_usual_values_of_a_layer_run_once_for_each_set_of_rows(monkeypatch):
    ran = []

    def counted(node, values, rows):
        ran.append((node.name, tuple(rows)))
        return layer_runs.trace_layer(node, values, rows)

    monkeypatch.setattr(proof, "trace_layer", counted)
    capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.randn(6, 4),))
    assert len(ran) == len(set(ran))


def test_rows_that_differ_by_rounding_are_those_of_no_position():
    def scaled(h):
        odd = torch.arange(len(h)) % 2
        return h * (1.0 + odd * torch.finfo(h.dtype).eps)[:, None]

    capture(Inside(scaled).double(), (torch.randn(6, 4, dtype=torch.float64),))


class Gives(nn.Module):
    """Returns something that is not computed from its input."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.what == "input" else self.shift


@pytest.mark.parametrize(
    ("what", "words"),
    [("input", "an input is an output"), ("shift", "'shift' is an output")],
)
def test_an_output_that_is_not_computed_is_refused_by_its_line(
    what: str, words: str
) -> None:
    line = Gives.forward.__code__.co_firstlineno
    with pytest.raises(SpecError, match=rf"test_mixing.py:{line}: {words} of Gives"):
        capture(Gives(what), (torch.ones(2, 3),))


class Drawing(nn.Module):
    """Computes something of random numbers of all samples."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        return self.after(self.before(x) * self.function(self, len(x)))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda _, n: torch.rand(n, 1).sort(0)[0], "'sort' mixes samples"),
        (lambda _, n: 1 + torch.rand(n, 4).roll(1, 0), "'roll' mixes samples"),
        (lambda _, n: functional.normalize(torch.rand(n, 4), dim=0), "mixes samples"),
        (lambda _, n: functional.dropout(torch.ones(n, 4)).mean(0), "samples share"),
        (lambda m, n: m.drop(torch.ones(n, 4)).amax(0), "that all samples share"),
        (lambda m, n: m.drop(torch.ones(n, 4)).flip(0), "'flip' mixes samples"),
        (
            lambda _, n: (torch.rand(n) + torch.arange(n))[:, None],
            "depends on a sample's place",
        ),
        (
            lambda _, n: functional.avg_pool1d(
                torch.rand(n, 4).t(), 3, 1, 1, count_include_pad=False
            ).t(),
            "it mixes samples",
        ),
    ],
)
def test_random_numbers_are_kept_apart_too(function, sentence):
    with pytest.raises(SpecError, match=rf"test_mixing.py:\d+: .*{sentence}"):
        capture(Drawing(function), (torch.randn(6, 4),))


@pytest.mark.parametrize("is_module", [False, True])
def test_layers_that_read_one_mask_are_one_layer(is_module):
    def twice(model, number):
        drop = model.drop if is_module else functional.dropout
        mask = drop(torch.ones(number, 4))
        return (mask + model.before(mask)) * mask

    graph = capture(Drawing(twice), (torch.randn(6, 4),))
    holding = [
        node.name
        for node in graph.nodes
        if any(isinstance(part, nn.Dropout) for part in node.module.modules())
    ]
    assert len(holding) == 1


def backward_that(draws):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.state = torch.get_rng_state()
            return functional.dropout(x, 0.5) if draws is set_back else x.clone()

        @staticmethod
        def backward(ctx, grad):
            return draws(ctx, grad)

    return Function.apply


def set_back(ctx, grad):
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(ctx.state)
        return functional.dropout(grad, 0.5)


@pytest.mark.parametrize(
    "draws",
    [
        lambda _, grad: grad * torch.rand_like(grad),
        lambda _, grad: functional.dropout(grad, 0.5),
        lambda _, grad: grad + torch.empty_like(grad).normal_(),
        lambda _, grad: grad[torch.randperm(1).expand(len(grad))],
        lambda _, grad: grad * torch.rand(1, generator=torch.Generator()),
    ],
)
def test_a_backward_that_draws_is_refused_with_its_line(draws):
    with pytest.raises(SpecError, match=r"test_mixing.py:\d+: draws .* in backward"):
        capture(Inside(backward_that(draws)), (torch.randn(6, 4),))


@pytest.mark.parametrize(
    "draws",
    [
        lambda _, grad: grad * random.Random().random(),
        lambda _, grad: grad * np.random.default_rng().random(),
    ],
)
def test_a_backward_that_can_not_be_repeated_is_refused_with_its_line(draws):
    with pytest.raises(SpecError, match=r"test_mixing.py:\d+: gives other gradients"):
        capture(Inside(backward_that(draws)), (torch.randn(6, 4),))


def test_a_backward_that_draws_what_forward_drew_is_captured():
    capture(Inside(backward_that(set_back)), (torch.randn(6, 4),))
    capture(
        Inside(lambda h: checkpoint(functional.dropout, h.tanh(), use_reentrant=False)),
        (torch.randn(6, 4),),
    )


def drops_all_for_nan(_ctx, grad):
    return torch.zeros_like(grad) if bool(grad.isnan().any()) else grad * 2


def keeps_all_if_finite(_ctx, grad):
    return torch.where(grad.isfinite().all(), grad * 2, grad)


@pytest.mark.parametrize("drops", [drops_all_for_nan, keeps_all_if_finite])
def test_a_backward_that_drops_all_gradients_for_one_is_refused(drops):
    with pytest.raises(SpecError, match=r"test_mixing.py:\d+: .*mixes samples in back"):
        capture(Inside(backward_that(drops)), (torch.randn(6, 4),))


def clears_all_for_a_sum(grad):
    return grad if math.isfinite(grad.sum().item()) else grad * 0.0


def clears_all_for_minus_infinity(grad):
    return grad * 0.0 if bool(grad.isneginf().any()) else grad


def limits_all_from_a_large_one(grad):
    return grad * 0.5 if float(grad.abs().max()) > 1e12 else grad


@pytest.mark.parametrize(
    "function",
    [
        clears_all_for_a_sum,
        clears_all_for_minus_infinity,
        limits_all_from_a_large_one,
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_backward_that_changes_all_for_an_extreme_one_is_refused(function, is_first):
    """Also where the batch needs no gradient, or behind a matrix product."""
    linear = nn.Linear(4, 4)
    linear.register_full_backward_hook(lambda _m, grads, _: (function(grads[0]),))
    own = Inside(backward_that(lambda _, grad: function(grad)))
    model = own if is_first else nn.Sequential(nn.Linear(4, 4), linear)
    with pytest.raises(SpecError, match=r"test_mixing.py:\d+: .*mixes samples in back"):
        capture(model, (torch.randn(6, 4),))


def test_a_hook_that_raises_for_infinite_gradients_is_captured():
    def raises(_module, grads, _of_output):
        assert bool(grads[0].isfinite().all())

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_full_backward_hook(raises)
    capture(model, (torch.randn(6, 4),))


def test_a_backward_that_replaces_each_infinite_gradient_is_captured():
    capture(
        Inside(backward_that(lambda _, grad: grad.nan_to_num(0.0, 1.0, -1.0))),
        (torch.randn(6, 4),),
    )


def test_a_backward_that_raises_for_nan_is_captured():
    def raises(_ctx, grad):
        if not bool(grad.isfinite().all()):
            raise FloatingPointError
        return grad * 2

    capture(Inside(backward_that(raises)), (torch.randn(6, 4),))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("shape", [(4,), (5, 4)])
def test_samples_that_are_steps_in_time_are_refused(kind, shape):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = kind(4, 4)

        def forward(self, x):
            return self.recurrent(x)[0]

    with pytest.raises(SpecError, match=r"test_mixing.py:\d+: .* mixes samples: they"):
        capture(Model(), (torch.randn(3, *shape),))


class DeadBeforeNorm(nn.Module):
    """A ReLU gives zeros, so that the norm multiplies gradients that add up to zero."""

    def __init__(self, hook=None):
        super().__init__()
        self.before = nn.Linear(5, 6)
        self.dead, self.mixed = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 1)
        self.after = nn.Linear(6, 3)
        self.dead.bias.data.fill_(-10.0)
        if hook is not None:
            self.mixed.register_full_backward_hook(hook)

    def forward(self, x):
        h = self.dead(torch.tanh(self.before(x))[:, None]).relu()
        h = self.mixed(h).flatten(1, 2)
        return self.after(functional.layer_norm(h, (6,))).mean(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_rounding_that_a_norm_of_equal_values_magnifies_is_no_mixing(seed, dtype):
    torch.manual_seed(seed)
    model = DeadBeforeNorm().to(dtype)
    assert capture(model, (torch.randn(6, 4, 5, dtype=dtype),)).nodes


def subtracts_a_part_of_the_mean(_module, to_inputs, _given):
    return tuple(g - 0.01 * g.mean(0, keepdim=True) for g in to_inputs)


def follows_the_largest(_module, to_inputs, _given):
    return tuple(g * g.abs().max().sign() * g.abs().max() for g in to_inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hook", [subtracts_a_part_of_the_mean, follows_the_largest])
def test_a_backward_that_mixes_behind_such_a_norm_is_refused(hook, dtype):
    torch.manual_seed(0)
    model = DeadBeforeNorm(hook).to(dtype)
    with pytest.raises(SpecError, match="it mixes samples in backward"):
        capture(model, (torch.randn(6, 4, 5, dtype=dtype),))
