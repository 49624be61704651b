from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from stretto.errors import NoisyProfile, SpecError
from stretto.measure import StepObserver, profile_model

PAUSE_S = 0.01
ANY_SPREAD = 1e9


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class Slow(nn.Module):
    """A layer that takes a known time, at least, in forward and in backward."""

    def __init__(self, forward_s=PAUSE_S, backward_s=PAUSE_S):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.pauses_s = forward_s, backward_s

    def forward(self, x):
        return _Pause.apply(self.linear(x), *self.pauses_s)


def training(model, *, after_s=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        time.sleep(after_s)

    return step


def profiled(model, step=None, **options):
    options = {"warmup": 1, "repetitions": 3, "max_spread_ratio": ANY_SPREAD} | options
    return profile_model(model, step or training(model), **options)


def by_name(workload):
    return {tensor.name: tensor for tensor in workload.tensors}


def test_every_gradient_is_listed_once_with_its_size_and_type():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2).to(torch.float32))
    workload = profiled(model)
    expected = {n: (p.numel() * 4, "float32") for n, p in model.named_parameters()}
    assert {t.name: (t.bytes, t.dtype) for t in workload.tensors} == expected
    assert workload.batch_per_rank == 3


def test_times_follow_the_layers():
    tensors = by_name(workload := profiled(nn.Sequential(Slow(), Slow(), Slow())))
    first, second, third = (tensors[f"{i}.linear.weight"] for i in range(3))
    # Sleeps are never shorter than asked for.
    assert third.ready_s >= PAUSE_S
    assert second.ready_s >= third.ready_s + PAUSE_S
    assert first.ready_s >= second.ready_s + PAUSE_S
    assert second.needed_s >= first.needed_s + PAUSE_S
    assert third.needed_s >= second.needed_s + PAUSE_S
    assert workload.backward_s >= first.ready_s
    assert workload.tensors[0].name.startswith("2.")


def test_what_is_not_backward_counts_to_forward():
    model = Slow(forward_s=0.0, backward_s=0.0)
    workload = profiled(model, training(model, after_s=0.03))
    assert workload.forward_s >= 0.03
    assert workload.provenance["outside_s"] >= 0.03
    assert workload.backward_s < 0.03


def test_a_loss_outside_the_model_does_not_delay_the_start_of_backward():
    model = Slow(forward_s=0.0, backward_s=0.0)

    def step():
        _Pause.apply(model(torch.ones(3, 4)), 0.0, 0.03).sum().backward()

    assert profiled(model, step).backward_s < 0.03


def test_an_unused_parameter_is_named():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
    wrapped = _Uses(model)
    with pytest.raises(SpecError, match=r"2 of 4 .*parts\.idle\.weight"):
        profiled(wrapped)


class _Uses(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["used"](x)


def test_frozen_parameters_do_not_count():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(requires_grad=False)
    assert {t.name for t in profiled(model).tensors} == {"1.weight", "1.bias"}


class _Functional(nn.Module):
    """Uses a child's parameters without calling the child, as attention does."""

    def __init__(self):
        super().__init__()
        self.called = nn.Linear(4, 4)
        self.bypassed = nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(PAUSE_S)
        x = self.called(x)
        return nn.functional.linear(x, self.bypassed.weight, self.bypassed.bias)


def test_parameters_used_past_their_module_are_needed_when_its_parent_starts():
    tensors = by_name(profiled(nn.Sequential(Slow(), _Functional())))
    bypassed = tensors["1.bypassed.weight"].needed_s
    assert bypassed >= PAUSE_S
    assert tensors["1.called.weight"].needed_s >= bypassed + PAUSE_S


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.middle = Slow()
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.middle(self.encode(x)))


def test_a_parameter_outside_the_module_tree_is_needed_when_forward_starts():
    outside = nn.Parameter(torch.ones(4))

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = Slow()

        def forward(self, x):
            return self.before(x) + outside

    model = Adds()
    parameters = [*model.named_parameters(), ("outside", outside)]
    with StepObserver(model, parameters=parameters) as observer:
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            observer.end_step()
    needed_s = [step.needed_s[-1] for step in observer.steps]
    assert needed_s == [0.0] * 3


def test_a_shared_parameter_is_needed_first_and_ready_last():
    workload = profiled(_Tied())
    tied = by_name(workload)["encode.weight"]
    assert workload.tensors[-1] == tied
    assert tied.needed_s < by_name(workload)["middle.linear.weight"].needed_s + PAUSE_S
    assert len(workload.tensors) == 3


def test_steps_end_at_the_next_call_in_an_ordinary_loop():
    model = nn.Linear(4, 4)
    with StepObserver(model) as observer:
        for _ in range(5):
            with torch.no_grad():
                model(torch.ones(1, 4))
            model(torch.ones(1, 4)).sum().backward()
    assert len(observer.steps) == 4


def test_two_forwards_before_one_backward_are_one_step():
    model = nn.Linear(4, 4)
    with StepObserver(model) as observer:
        for _ in range(3):
            (model(torch.ones(1, 4)) - model(torch.zeros(1, 4))).sum().backward()
            observer.end_step()
    assert len(observer.steps) == 3


def test_nothing_remains_on_the_model_afterwards():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    profiled(model)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_gradients_are_those_without_an_observer():
    model = nn.Linear(4, 4)
    model(torch.ones(3, 4)).pow(2).sum().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    with StepObserver(model):
        model(torch.ones(3, 4)).pow(2).sum().backward()
    assert torch.equal(model.weight.grad, expected)


def test_unsteady_steps_are_refused():
    class Moody(Slow):
        count = 0

        def forward(self, x):
            self.count += 1
            return _Pause.apply(self.linear(x), 0.0, 0.03 * (self.count % 2))

    with pytest.raises(NoisyProfile, match="backward"):
        profiled(Moody(), repetitions=8, max_spread_ratio=0.35)


def test_too_few_steps_are_refused():
    with pytest.raises(SpecError, match="at least 3 steps"):
        profiled(nn.Linear(4, 4), repetitions=2)


def test_a_step_that_never_calls_the_model_is_refused():
    with pytest.raises(SpecError, match="never called Linear"):
        profiled(nn.Linear(4, 4), lambda: None)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(SpecError, match="requires a gradient"):
        StepObserver(nn.ReLU())


class Manual(nn.Module):
    """A model whose forward runs backward itself, as Lightning's may."""

    def __init__(self, backwards, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.backwards = backwards

    def forward(self, x):
        for number in range(self.backwards):
            y = x if number else x + 0.5
            for layer in self.layers:
                y = layer(y)
            y.sum().backward()
            self.ended(number)
        return y.detach() if self.backwards else self.layers[1](self.layers[0](x))

    def ended(self, number):
        """Called after each backward."""


def test_a_backward_within_forward_begins_where_the_last_module_returns():
    model = Manual(1, Slow)

    def step():
        model(torch.ones(3, 4))
        time.sleep(3 * PAUSE_S)

    workload = profiled(model, step)
    assert workload.backward_s >= 2 * PAUSE_S
    assert workload.forward_s >= 5 * PAUSE_S
    found = by_name(workload)
    assert found["layers.1.linear.weight"].needed_s >= PAUSE_S
    assert (
        found["layers.1.linear.weight"].ready_s < found["layers.0.linear.bias"].ready_s
    )


@pytest.mark.parametrize("aside", [False, True])
def test_each_of_several_backwards_within_forward_may_be_a_step(aside):
    model = Manual(2, Slow)
    with StepObserver(model, aside=aside) as observer:
        model.ended = lambda _number: observer.end_step(1.0)
        for backwards in (2, 1, 0, 2):
            model.backwards = backwards
            y = model(torch.ones(3, 4))
            if not backwards:
                y.sum().backward()
                observer.end_step(1.0)
    assert observer.error is None
    assert len(observer.steps) == 6
    for step in observer.steps:
        assert step.forward_s >= 2 * PAUSE_S
        assert step.backward_s >= 2 * PAUSE_S
        assert max(step.ready_s) <= step.backward_s
        assert max(step.needed_s) <= step.forward_s


@pytest.mark.parametrize("aside", [False, True])
def test_no_hooks_remain_on_a_parameter_that_the_model_returns(aside):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x), self.linear.bias

    model = Returns()
    with StepObserver(model, aside=aside) as observer:
        for _ in range(3):
            out, bias = model(torch.ones(3, 4))
            (out.sum() + bias.sum()).backward()
        observer.end_step()
    assert len(observer.steps) == 3
    assert not model.linear.bias._backward_hooks


@pytest.mark.parametrize("aside", [True, False])
def test_parameters_trained_in_turn_are_observed_when_they_are_unfrozen(aside):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    named = list(model.named_parameters())
    model[1].requires_grad_(False)
    with StepObserver(model, parameters=named, unused=True, aside=aside) as observer:
        for number in range(4):
            for index, layer in enumerate(model):
                layer.requires_grad_(index == number % 2)
            model(torch.ones(3, 4)).sum().backward()
            observer.end_step()
    assert len(observer.steps) == 4


def test_a_parameter_frozen_as_whole_numbers_does_not_end_the_observation():
    model = nn.Linear(3, 2)
    model.table = nn.Parameter(torch.ones(2))
    parameters = list(model.named_parameters())
    model.table.requires_grad_(False)
    model.table.data = torch.zeros(2, dtype=torch.int8)
    with StepObserver(model, parameters=parameters, unused=True) as observer:
        model(torch.ones(2, 3)).sum().backward()
        observer.end_step()
    assert len(observer.steps) == 1
