"""`stretto.optim.AdamSGD`: Adam, then SGD, tensor by tensor."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.burst.checks.separable import _tried, why_together
from stretto.optim import AdamSGD

SHAPES = ((3, 4), (5,), (2, 3, 2), (7,))
BETAS = (0.9, 0.99)


def parameters_of(seed=0, dtype=torch.float32):
    draws = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in SHAPES
    ]


def train(parameters, optimizer, steps, *, first=0):
    """Steps down a noisy bowl; the noise depends on the step and the tensor only."""
    for step in range(first, first + steps):
        for number, parameter in enumerate(parameters):
            draws = torch.Generator().manual_seed(1000 * step + number)
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.grad = parameter.detach() * (number + 1) + 0.3 * noise.to(
                parameter.dtype
            )
        optimizer.step()


def values(parameters):
    return [p.detach().clone() for p in parameters]


def is_equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_before_the_switch_it_is_adamw(foreach):
    ours, theirs = parameters_of(), parameters_of()
    options = {"lr": 0.01, "weight_decay": 0.1, "foreach": foreach}
    train(ours, AdamSGD(ours, switch_at=100, **options), 20)
    train(theirs, torch.optim.AdamW(theirs, **options), 20)
    assert is_equal(values(ours), values(theirs))


def reference(start, grads, *, lr, betas, eps, switch_at):
    """The rule of the switch in plain numbers, for one tensor."""
    w, m, a, square, along = start.double().flatten().tolist(), 0.0, 0.0, 0.0, 0.0
    beta1, beta2 = betas
    m, a, v = [0.0] * len(w), [0.0] * len(w), [0.0] * len(w)
    ratio = None
    for step, grad in enumerate(grads, 1):
        g = grad.double().flatten().tolist()
        if ratio is not None:
            v = [beta1 * x + y for x, y in zip(v, g, strict=True)]
            w = [x - (1 - beta1) * lr * ratio * y for x, y in zip(w, v, strict=True)]
            continue
        m = [beta1 * x + (1 - beta1) * y for x, y in zip(m, g, strict=True)]
        a = [beta2 * x + (1 - beta2) * y * y for x, y in zip(a, g, strict=True)]
        q = [
            x / (1 - beta1**step) / (math.sqrt(y / (1 - beta2**step)) + eps)
            for x, y in zip(m, a, strict=True)
        ]
        w = [x - lr * y for x, y in zip(w, q, strict=True)]
        square = beta2 * square + (1 - beta2) * sum(x * x for x in q)
        along = beta2 * along + (1 - beta2) * sum(
            x * y for x, y in zip(q, g, strict=True)
        )
        if step == switch_at:
            ratio = square / along
    return torch.tensor(w, dtype=torch.float64).reshape(start.shape), ratio


def test_the_whole_way_is_that_of_the_rule():
    parameter = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    draws = torch.Generator().manual_seed(3)
    start = parameter.detach().clone()
    optimizer = AdamSGD([parameter], lr=0.02, betas=BETAS, switch_at=15)
    grads = []
    for _ in range(40):
        noise = torch.randn(3, 4, generator=draws, dtype=torch.float64)
        parameter.grad = parameter.detach() + 0.1 * noise
        grads.append(parameter.grad.clone())
        optimizer.step()
    expected, ratio = reference(
        start, grads, lr=0.02, betas=BETAS, eps=1e-8, switch_at=15
    )
    assert optimizer.switched()[0][1] == pytest.approx(ratio, rel=1e-6)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-7, atol=1e-9)


def test_after_the_switch_it_is_sgd_with_momentum_and_the_found_rate():
    ours = parameters_of()
    optimizer = AdamSGD(ours, lr=0.01, betas=BETAS, switch_at=5)
    train(ours, optimizer, 5)
    ratios = [ratio for _, ratio in optimizer.switched()]
    assert len(ratios) == len(ours)
    theirs = [nn.Parameter(value) for value in values(ours)]
    sgd = torch.optim.SGD(
        [
            {"params": [parameter], "lr": (1 - BETAS[0]) * 0.01 * ratio}
            for parameter, ratio in zip(theirs, ratios, strict=True)
        ],
        momentum=BETAS[0],
    )
    train(ours, optimizer, 10, first=5)
    train(theirs, sgd, 10, first=5)
    assert is_equal(values(ours), values(theirs))


def test_a_settled_ratio_switches_by_itself():
    # All gradients are +1 or -1, so Adam's step is their sign and the ratio is 1.
    parameter = nn.Parameter(torch.ones(6))
    optimizer = AdamSGD([parameter], lr=1e-3, betas=BETAS, min_steps=10)
    for step in range(1, 30):
        parameter.grad = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
        optimizer.step()
        assert bool(optimizer.switched()) == (step >= 10)
    assert optimizer.switched()[0][1] == pytest.approx(1.0, rel=1e-6)


def test_a_ratio_that_moves_does_not_switch():
    parameter = nn.Parameter(torch.ones(6))
    optimizer = AdamSGD([parameter], betas=(0.5, 0.999), min_steps=2, tolerance=1e-3)
    for step in range(1, 40):
        parameter.grad = torch.full((6,), 1.0 / step)  # the ratio grows with the step
        optimizer.step()
    assert not optimizer.switched()


def test_a_direction_that_does_not_descend_never_switches():
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamSGD([parameter], betas=(0.999, 0.5), switch_at=10)
    parameter.grad = torch.full((4,), 100.0)
    optimizer.step()
    for _ in range(20):
        parameter.grad = torch.full((4,), -1.0)  # against the average
        optimizer.step()
    assert not optimizer.switched()


def test_gradients_that_are_not_finite_leave_the_ratio():
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamSGD([parameter], switch_at=2)
    parameter.grad = torch.full((4,), math.inf)
    optimizer.step()
    optimizer.step()
    assert not optimizer.switched()


def test_schedulers_act_on_both_phases():
    ours = parameters_of()
    optimizer = AdamSGD(ours, lr=0.01, betas=BETAS, switch_at=3)
    train(ours, optimizer, 4)
    before = values(ours)
    optimizer.param_groups[0]["lr"] = 0.0
    train(ours, optimizer, 3, first=4)
    assert is_equal(values(ours), before)


def test_decay_of_weights_does_not_depend_on_the_phase():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamSGD([parameter], lr=0.1, weight_decay=0.5, betas=BETAS, switch_at=1)
    parameter.grad = torch.full((3,), 1e-12)
    optimizer.step()
    assert optimizer.switched()
    before = parameter.detach().clone()
    parameter.grad = torch.zeros(3)
    optimizer.step()
    # Momentum of a gradient of 0 is 0, so only the decay is left.
    torch.testing.assert_close(parameter.detach(), before * (1 - 0.1 * 0.5))


def test_maximize_is_the_mirror_image():
    ours, theirs = parameters_of(), parameters_of()
    for step in range(12):
        for up, down in zip(ours, theirs, strict=True):
            draws = torch.Generator().manual_seed(step)
            up.grad = torch.randn(up.shape, generator=draws) + 0.5
            down.grad = -up.grad
        if step == 0:
            first = AdamSGD(ours, betas=BETAS, switch_at=6, maximize=True)
            second = AdamSGD(theirs, betas=BETAS, switch_at=6)
        first.step()
        second.step()
    assert is_equal(values(ours), values(theirs))
    assert [r for _, r in first.switched()] == [r for _, r in second.switched()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("saved_at", [3, 9])
def test_a_loaded_state_continues_bit_for_bit(dtype, saved_at):
    ours = parameters_of(dtype=dtype)
    optimizer = AdamSGD(ours, lr=0.01, betas=BETAS, switch_at=6)
    train(ours, optimizer, saved_at)
    theirs = [nn.Parameter(value) for value in values(ours)]
    other = AdamSGD(theirs, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(ours, optimizer, 10, first=saved_at)
    train(theirs, other, 10, first=saved_at)
    assert is_equal(values(ours), values(theirs))


@given(
    parts=st.lists(st.integers(0, 2), min_size=len(SHAPES), max_size=len(SHAPES)),
    foreach=st.booleans(),
    switch_at=st.sampled_from([None, 4]),
)
@settings(max_examples=20, deadline=None)
def test_a_step_in_parts_is_the_whole_step(parts, foreach, switch_at):
    options = {
        "lr": 0.01,
        "betas": BETAS,
        "switch_at": switch_at,
        "tolerance": 0.5,
        "min_steps": 3,
        "foreach": foreach,
    }
    whole = parameters_of()
    train(whole, AdamSGD(whole, **options), 12)
    divided = parameters_of()
    groups = [
        [p for p, at in zip(divided, parts, strict=True) if at == n] for n in range(3)
    ]
    optimizers = [AdamSGD(some, **options) for some in groups if some]

    class Every:
        def step(self):
            for optimizer in optimizers:
                optimizer.step()

    train(divided, Every(), 12)
    assert is_equal(values(whole), values(divided))


def test_burst_training_takes_it_as_separate():
    optimizer = AdamSGD(parameters_of(), switch_at=4)
    assert why_together(optimizer) is None
    # Known classes are not tried; the trial agrees.
    assert _tried(optimizer, (), {}, has_loss=False) is None


def test_parameters_without_gradients_are_left():
    some = parameters_of()
    optimizer = AdamSGD(some)
    before = values(some)
    some[0].grad = torch.ones_like(some[0])
    optimizer.step()
    assert not torch.equal(some[0].detach(), before[0])
    assert is_equal(values(some)[1:], before[1:])


def test_complex_parameters_train():
    parameter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    optimizer = AdamSGD([parameter], lr=0.05, betas=BETAS, switch_at=5)
    first = float(parameter.detach().abs().sum())
    for _ in range(60):
        parameter.grad = parameter.detach().clone()
        optimizer.step()
    assert optimizer.switched()
    assert float(parameter.detach().abs().sum()) < 0.5 * first


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = AdamSGD(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"switch_at": 0}, "switch_at"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"min_steps": 0}, "min_steps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"eps": math.nan}, "eps"),
        ({"foreach": True, "fused": True}, "foreach"),
    ],
)
def test_options_out_of_range_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        AdamSGD(parameters_of(), **options)


def test_the_closures_loss_is_returned():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamSGD([parameter])

    def closure():
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
