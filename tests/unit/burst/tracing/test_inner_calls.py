"""Operations that read other samples only for some values, which do not come."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.burst.graph import capture
from stretto.errors import SpecError


class Between(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.after = nn.Linear(4, 2)
        self.function = function

    def forward(self, x):
        return self.after(self.function(self.before(x)))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        scale = x.abs().max().clamp(min=1e3)
        return (x / scale).round() * scale

    @staticmethod
    def backward(_ctx, grad):
        return grad


class RowScaled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e3)
        return (x / scale).round() * scale

    @staticmethod
    def backward(_ctx, grad):
        return grad


def scaled(h):
    return Scaled.apply(h)


def row_scaled(h):
    return RowScaled.apply(h)


APPLY_IS_PYTHON = hasattr(torch.autograd.Function.apply, "__func__")


@pytest.mark.skipif(not APPLY_IS_PYTHON, reason="torch's own apply is in C++")
def test_a_function_whose_method_was_bound_earlier_is_captured():
    graph = capture(Between(RowScaled.apply), (torch.randn(6, 4),))
    assert {"before", "after"} <= {node.name for node in graph.nodes}


@pytest.mark.skipif(APPLY_IS_PYTHON, reason="torch's own apply is in Python")
def test_a_function_whose_method_was_bound_earlier_is_refused_with_its_line():
    with pytest.raises(SpecError, match=r"calls\.py:\d+: .* RowScaled.apply that was"):
        capture(Between(RowScaled.apply), (torch.randn(6, 4),))


def rare_hits(h):
    return h.masked_fill(torch.isin((1e6 * h).long(), (1e6 * h[:, 0]).long() + 7), 0.0)


def rare_outliers(h):
    return h.masked_scatter(h > 1e3, -h)


def rare_outliers_by_index(h):
    h = h.clone()
    h[h > 1e3] = h.flatten()
    return h


def sharp_attention(h):
    q = functional.normalize(h, dim=-1)[None]
    return functional.scaled_dot_product_attention(q, q, h[None], scale=1e3)[0]


def sharp_attention_of_heads(h):
    q = functional.normalize(h, dim=-1)[None, None]
    return functional.scaled_dot_product_attention(q, q, h[None, None], scale=1e3)[0, 0]


def column_norms(h):
    return torch.renorm(h, 2, 1, 1e3)


def ranks_among_large(h):
    return h + torch.searchsorted(h[:, 0].abs().sort()[0] + 1e3, h.detach())


def buckets_of_large(h):
    return h + torch.bucketize(h.detach(), h[:, 0].abs().sort()[0] + 1e3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (rare_hits, "'isin' mixes samples: it reads other samples"),
        (rare_outliers, "'masked_scatter' mixes samples: it reads other samples"),
        (rare_outliers_by_index, "'index_put' in it reads other samples"),
        (sharp_attention, "in it compares each sample with the others"),
        (sharp_attention_of_heads, "reads other samples, depending on values"),
        (column_norms, "'renorm' mixes samples: it reads other samples"),
        (scaled, "'max' in it gives one result for all samples"),
    ],
)
def test_mixing_for_values_that_do_not_come_is_refused(function, message):
    with pytest.raises(SpecError, match=message) as caught:
        capture(Between(function), (torch.randn(6, 4),))
    assert "test_inner_calls.py:" in str(caught.value)


@pytest.mark.parametrize("function", [ranks_among_large, buckets_of_large])
def test_places_among_other_samples_are_refused(function):
    with pytest.raises(SpecError, match=r"test_inner_calls.py:\d+: .* mixes samples"):
        capture(Between(function), (torch.randn(6, 4),))


def attends_within(h):
    rows = functional.normalize(h, dim=-1).unflatten(1, (2, 2))
    return functional.scaled_dot_product_attention(rows, rows, rows).flatten(1)


def listed(h):
    return h.masked_fill(torch.isin(h.long(), torch.tensor([1, 3])), 0.0)


def fixed_places(h):
    mask = torch.tensor([True, False, True, False])
    return h.masked_scatter(mask, h[:, :2])


def row_norms(h):
    return torch.renorm(h, 2, 0, 0.5)


def own_places(h):
    return h + torch.searchsorted(h.detach().sort(1)[0], h.detach())


def sums_within(h):
    return h.cumsum(1)


def zeroed_outliers(h):
    h = h.clone()
    h[h > 0.1] = 0.0
    return h


def distances_to_a_table(h):
    """More rows than some number use another algorithm."""
    return torch.cdist(h, torch.eye(4))


def distances_from_a_table(h):
    return torch.cdist(torch.eye(4), h, p=2.0).t()


@pytest.mark.parametrize(
    "function",
    [
        attends_within,
        distances_to_a_table,
        distances_from_a_table,
        listed,
        fixed_places,
        row_norms,
        own_places,
        sums_within,
        zeroed_outliers,
        row_scaled,
    ],
)
def test_what_stays_within_a_sample_is_captured(function):
    model = Between(function)
    graph = capture(model, (torch.randn(6, 4),))
    assert {"before", "after"} <= {node.name for node in graph.nodes}


class Attention(nn.Module):
    def __init__(self, *, rows_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.rows_first = rows_first

    def forward(self, x):
        if self.rows_first:
            return self.attention(x, x, x, need_weights=False)[0]
        return self.attention(x[:, 0], x[:, 0], 1e-12 * x[:, 0], need_weights=False)[0]


def test_attention_over_the_batch_is_refused_in_a_module():
    capture(Attention(rows_first=True), (torch.randn(6, 3, 4),))
    with pytest.raises(SpecError, match=r"test_inner_calls.py:.* mixes samples"):
        capture(Attention(rows_first=False), (torch.randn(6, 3, 4),))


class Distances(nn.Module):
    """Roots at zero, of the input, which needs no gradient."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 4)

    def forward(self, x):
        return self.last((x[:, :, None] - x[:, None]).square().sum(-1).sqrt())


def test_nan_in_a_gradient_that_nothing_needs_hides_nothing(caplog):
    capture(Distances(), (torch.randn(6, 5, 3),))
    assert "NaN" not in caplog.text


class Hooked(nn.Module):
    """A hook takes a mean over all samples, and may give it back."""

    def __init__(self, *, gives):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.layer.register_forward_hook(self.look)
        self.gives = gives

    def look(self, _module, _args, output):
        mean = output.square().mean()
        return output + 0.0 * mean if self.gives else None

    def forward(self, x):
        return self.last(self.layer(x))


def test_a_mean_in_a_hook_counts_if_it_reaches_the_modules_result():
    capture(Hooked(gives=False), (torch.randn(6, 4),))
    with pytest.raises(
        SpecError, match=r"test_inner_calls.py:\d+: .*'mean' in it gives"
    ):
        capture(Hooked(gives=True), (torch.randn(6, 4),))


class CastTwice(nn.Module):
    """Autocast converts the weight in the first use only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ self.weight).tanh() @ self.weight


def test_operators_on_weights_may_differ_between_recordings():
    capture(CastTwice(), (torch.randn(6, 4),))


class Skipping(nn.Module):
    """Reads the input twice, so that a layer of its own sends it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) + x)


def test_a_patched_identity_does_not_change_a_model_without_one(monkeypatch):
    monkeypatch.setattr(nn.Identity, "forward", lambda _, x: 2 * x)
    capture(Skipping().double(), (torch.randn(5, 4).double(),))
