"""Ways to use a burst model: each is one process's result, or refused in one sentence.

Every use is a function of a `Side`, run on all ranks and once more by one process with
the whole batch. What it returns must be equal, or all ranks must raise the words that
`REFUSED` names.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm, parametrize

import stretto
from stretto.burst.executor import BurstParallel
from support.burst_ranks import plan_of
from support.burst_sides import (
    Alone,
    Side,
    Widths,
    WithTemperature,
    cross,
    example_of,
    net,
    train,
    worst_of,
)
from support.nets import mlp

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


class Shorts(nn.Module):
    """Its buffer has a type that Gloo can't send."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([3, 2, 1, 2], dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.to(x.dtype)


class Folded(nn.Module):
    """Computes two parts of each sample as rows of their own, with dropouts between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.parts = nn.Sequential(
            nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, 5), nn.Dropout()
        )
        self.last = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts(self.first(x).reshape(2 * len(x), 3))
        return self.last(parts.view(len(x), 2, 5).mean(1))


class Labeled(torch.Tensor):
    """Results keep the class, as those of images with metadata."""


class Image(torch.Tensor):
    """Results are plain tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Doubled(torch.Tensor):
    """Linear layers return twice as much."""

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return found * 2 if func is nn.functional.linear else found


# Uses that are right.


def inputs_with_a_class(side: Side) -> Any:
    model = side.wrap(net(6, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step, kind in enumerate((Labeled, Image, torch.Tensor, Labeled)):
        x, y = side.data(step)
        x = x.requires_grad_()
        optimizer.zero_grad()
        cross(model(x.as_subclass(kind)), y).backward()
        optimizer.step()
        whole = torch.zeros(side.batch, 6)
        start = sum(side.shares[: side.rank])
        assert x.grad is not None
        whole[start : start + len(x)] = x.grad
        if side.size:
            dist.all_reduce(whole)
        found.append(whole)
    return found, side.state(model)


def chain(side: Side) -> Any:
    """A generator and a discriminator, both burst, trained in turns."""
    make = side.wrap(net(6, 5, 1))
    judge = side.wrap(net(5, 4, 2))
    both = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (make, judge)]
    for step in range(2):
        x, y = side.data(step)
        both[1].zero_grad()
        cross(judge(make(x).detach()), y).backward()
        both[1].step()
        both[0].zero_grad()
        judge.requires_grad_(False)
        cross(judge(make(x)), y).backward()
        both[0].step()
        judge.requires_grad_(True)
    x, y = side.data(7)
    for optimizer in both:
        optimizer.zero_grad()
    made = make(x)
    (cross(judge(made), y) + 0.3 * made.square().sum() / max(1, len(x))).backward()
    return side.grads(make), side.grads(judge), side.state(make), side.state(judge)


def chain_of_three(side: Side) -> Any:
    models = [side.wrap(net(6, 6, seed)) for seed in range(2)]
    models.append(side.wrap(net(6, 4, 2)))
    x, y = side.data(0)
    cross(models[2](torch.tanh(models[1](2 * models[0](x)))), y).backward()
    return [side.grads(m) for m in models]


def loss_of_two_models(side: Side) -> Any:
    one, two = side.wrap(net(6, 4, 1)), side.wrap(net(6, 4, 2))
    x, y = side.data(0)
    (cross(one(x), y) + cross(two(x), y) + cross(one(x) * two(x), y)).backward()
    return side.grads(one), side.grads(two)


def output_used_twice(side: Side) -> Any:
    model = side.wrap(net())
    x, y = side.data(0)
    out = model(x)
    (cross(out, y) + 0.1 * out.square().sum() / max(1, len(x))).backward()
    return side.grads(model)


def several_backwards(side: Side) -> Any:
    model = side.wrap(net())
    x, y = side.data(0)
    out = model(x)
    cross(out, y).backward(retain_graph=True)
    (0.5 * cross(2 * out, y)).backward()
    x, y = side.data(1)
    cross(model(x), y).backward()
    return side.grads(model)


def ordinary_module_before(side: Side) -> Any:
    """An ordinary encoder, whose gradients are averaged over ranks as DDP does."""
    torch.manual_seed(9)
    encoder = nn.Linear(6, 6)
    model = side.wrap(net())
    x, y = side.data(0)
    cross(model(torch.tanh(encoder(x))), y).backward()
    grads = [p.grad for p in encoder.parameters()]
    for grad in grads if side.size else []:
        dist.all_reduce(grad)
        grad /= side.size
    return grads, side.grads(model)


def input_gradient(side: Side) -> Any:
    model = side.wrap(net())
    x, y = side.data(0)
    x.requires_grad_()
    cross(model(x), y).backward()
    (again,) = torch.autograd.grad(cross(model(x), y), x)
    if not side.size:
        return [x.grad, again], side.grads(model)
    rows = []
    for grad in (x.grad, again):
        whole = torch.zeros(side.batch, 6)
        side.mine(whole).copy_(torch.zeros_like(x) if grad is None else grad)
        dist.all_reduce(whole)
        rows.append(whole)
    return rows, side.grads(model)


def returned_gradients(side: Side) -> Any:
    """`torch.autograd.grad` of the module's own parameters adds to no gradient."""
    model = side.wrap(net())
    inner = model.module if side.size else model
    parameters = list(inner.parameters())
    penalty = sum(p.square().sum() for p in parameters)
    found = torch.autograd.grad(penalty, parameters)
    x, y = side.data(0)
    cross(model(x), y).backward()
    return list(found), side.grads(model)


def temperature(side: Side) -> Any:
    """A parameter of the module that only the loss uses, with every rank's data."""
    model = side.wrap(WithTemperature())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(3):
        x, y = side.data(step)
        optimizer.zero_grad()
        held = model.module.temperature if side.size else model.temperature
        cross(model(x) / held, y).backward()
        optimizer.step()
    return side.state(model)


def penalty_by_gradient(side: Side) -> Any:
    """An L2 penalty added after backward, as the error recommends."""
    model = side.wrap(net())

    def add() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=0.02)

    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), after=add)
    return side.state(model)


def clip_by_torch(side: Side) -> Any:
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        norms.append(
            nn.utils.clip_grad_norm_(
                list(model.parameters()), 0.04, norm_type=float("inf"), foreach=False
            )
        )
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    train(side, model, optimizer, after=clip)
    return norms, side.state(model)


def clip_part_and_two_models(side: Side) -> Any:
    one, two = side.wrap(net(6, 4, 1)), side.wrap(net(6, 4, 2))
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.full((3,), 0.2)
    x, y = side.data(0)
    (cross(one(x), y) + cross(two(x), y)).backward()
    every = [*one.parameters(), other, *list(two.parameters())[2:]]
    norm = nn.utils.clip_grad_norm_(every, 0.01, norm_type=1.5)
    return norm, side.grads(one), side.grads(two), other.grad


def scaled(side: Side, kind: str = "step") -> Any:
    """A gradient scaler; one layer's gradients overflow in one step."""
    model = side.wrap(net())
    last = list(model.parameters())[-2:]
    rest = list(model.parameters())[:-2]
    optimizers = [torch.optim.SGD(rest, lr=0.1), torch.optim.SGD(last, lr=0.1)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(5):
        x, y = side.data(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(cross(model(x), y)).backward()
        if step == 2:
            for p in last:
                if p.grad is not None:
                    p.grad.fill_(float("inf"))
        for optimizer in optimizers:
            if kind == "unscale":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        scales.append(torch.tensor(scaler.get_scale()))
    return scales, side.state(model)


def scaled_and_clipped(side: Side) -> Any:
    return scaled(side, "unscale")


def freeze_and_unfreeze(side: Side) -> Any:
    model = side.wrap(net())
    first = list(model.parameters())[:2]
    for p in first:
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(side, model, optimizer)
    for p in first:
        p.requires_grad_(True)
    train(side, model, optimizer)
    for p in list(model.parameters())[-1:]:
        p.requires_grad_(False)
    train(side, model, optimizer)
    return side.state(model)


def accumulate_and_drop(side: Side) -> Any:
    """Gradients from `no_sync` that the user throws away are gone."""
    model = side.wrap(net())
    found = []
    for to_none in (True, False):
        context = model.no_sync() if side.size else torch.enable_grad()
        with context:
            x, y = side.data(0)
            cross(model(x), y).backward()
        model.zero_grad(set_to_none=to_none)
        for step in (1, 2):
            context = (
                model.no_sync() if side.size and step == 1 else torch.enable_grad()
            )
            with context:
                x, y = side.data(step)
                cross(model(x), y).backward()
        found.append(side.grads(model))
        model.zero_grad()
    return found


def triple(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(3)


def frozen_before_backward(side: Side) -> Any:
    """Autograd gives a parameter no gradient if it is frozen when backward runs."""
    plain = net()
    model = side.wrap(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
    found = []
    for step in range(2):
        x, y = side.data(step)
        optimizer.zero_grad()
        loss = cross(model(x), y)
        plain[2].requires_grad_(False)
        loss.backward()
        plain[2].requires_grad_(True)
        found.append(plain[2].weight.grad is None)
        optimizer.step()
    assert all(found)
    return side.state(model)


def changed_by_hand_after_refresh(side: Side) -> Any:
    """All ranks make the same change to current values."""
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = side.data(step)
        optimizer.zero_grad()
        cross(model(x), y).backward()
        optimizer.step()
        if side.size:
            model.refresh()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
    return side.state(model)


def gradient_hooks(side: Side) -> Any:
    """A parameter's own hooks see its whole gradient, once."""
    model = side.wrap(net())
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.02) * 2)
        p.register_post_accumulate_grad_hook(triple)
    x, y = side.data(0)
    cross(model(x), y).backward()
    return side.grads(model)


def schedulers_and_groups(side: Side) -> Any:
    model = side.wrap(net())
    every = list(model.parameters())
    groups = [{"params": every[:3], "lr": 0.05}, {"params": every[3:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1, foreach=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    train(side, model, optimizer, 4, after=cycle.step)
    return side.state(model)


def adafactor_and_fused(side: Side) -> Any:
    one, two = side.wrap(net(seed=1)), side.wrap(net(seed=2))
    train(side, one, torch.optim.Adafactor(one.parameters(), lr=0.05))
    train(side, two, torch.optim.Adam(two.parameters(), lr=0.05, fused=True))
    return side.state(one), side.state(two)


def average(side: Side) -> Any:
    """An exponential average over refreshed parameters."""
    model = side.wrap(net())
    inner = model.module if side.size else model
    mean = torch.optim.swa_utils.AveragedModel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(3):
        train(side, model, optimizer, 1)
        if side.size:
            model.refresh()
        mean.update_parameters(inner)
    return [p.detach() for p in mean.parameters()]


def saved_optimizer(side: Side) -> Any:
    model = side.wrap(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    train(side, model, optimizer)
    if side.size:
        model.refresh(optimizer)
    rows = optimizer.state_dict()["state"]
    saved = io.BytesIO()
    torch.save(model.module if side.size else model, saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=False)
    assert all(type(p) is nn.Parameter for p in again.parameters())
    return [rows[i]["exp_avg"] for i in sorted(rows)], list(again.parameters())


def statistics_after_refresh(side: Side) -> Any:
    """Running statistics read, copied and saved where a layer does not run."""
    model = side.wrap(nn.Sequential(*net(), Shorts()))
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = model.module if side.size else model
    if side.size:
        model.refresh()
    saved = io.BytesIO()
    torch.save(inner, saved)
    saved.seek(0)
    found = [inner, copy.deepcopy(inner), torch.load(saved, weights_only=False)]
    for each in found[1:]:
        assert all(type(b) is torch.Tensor for b in each.buffers())
    return [b.detach().clone() for each in found for b in each.buffers()]


def another_model_over_the_module(side: Side) -> Any:
    """A later one, with another plan, continues after `refresh`."""
    module = net()
    model = side.wrap(module)
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1))
    if side.size:
        model.refresh()
        plan = side.plan(module, side.widths[::-1])
        example = example_of(module)
        later = BurstParallel(module, plan, example_inputs=(example,))
    else:
        later = module
    train(side, later, torch.optim.SGD(later.parameters(), lr=0.1))
    return side.state(later)


def new_plan_keeps_state(side: Side) -> Any:
    """`apply_plan` finds the optimizers by itself."""
    model = side.wrap(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(3):
        train(side, model, optimizer, 2)
        if side.size:
            widths = [(step % 2 * second(side), 1), (0, side.size), (0, 1)]
            model.apply_plan(side.plan(net(), widths[step:] + widths[:step]))
    train(side, model, optimizer, 2)
    return side.state(model)


def new_plan_with_a_counting_optimizer(side: Side) -> Any:
    """What an optimizer keeps besides its state is the same on all ranks."""
    model = side.wrap(net())
    optimizer = Momentum(model.parameters(), "plain")
    for _ in range(2):
        train(side, model, optimizer, 1)
        if side.size:
            model.apply_plan(side.plan(net(), [(0, 1), (0, side.size)]))
    assert optimizer.param_groups[0]["steps"] == 2
    return side.state(model)


def plan_from_file(side: Side) -> Any:
    model = net()
    optimizer_of = torch.optim.Muon
    if side.size:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "burst.json"
            side.plan(model, side.widths).save(path)
            assert stretto.BurstPlan.load(path).gpus == side.size
            wrapped = BurstParallel(
                model, str(path), example_inputs=(example_of(model),)
            )
            wrapped.apply_plan(path)
    else:
        wrapped = model
    matrices = [p for p in wrapped.parameters() if p.dim() == 2]
    train(side, wrapped, optimizer_of(matrices, lr=0.05))
    return side.state(wrapped)


def frozen_teacher(side: Side) -> Any:
    """A burst model without a trained parameter teaches another one."""
    teacher = side.wrap(net(seed=4).requires_grad_(False))
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, _ = side.data(step)
        optimizer.zero_grad()
        apart = (model(x) - teacher(x)).square().mean(1)
        (apart.sum() / max(1, len(x))).backward()
        optimizer.step()
    return side.state(model)


def loaded_full_state(side: Side) -> Any:
    """`load_state_dict` takes what `full_state_dict` gives, whole or in part."""
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(side, model, optimizer, 2)
    saved = model.full_state_dict() if side.size else model.state_dict()
    saved = {name: value.clone() for name, value in saved.items()}
    train(side, model, optimizer, 1)
    model.load_state_dict(saved)
    train(side, model, optimizer, 1)
    result = model.load_state_dict({"5.bias": saved["5.bias"]}, strict=False)
    assert not result.unexpected_keys
    return side.state(model)


def new_plan_keeps_gradients(side: Side) -> Any:
    """`apply_plan` between two backwards that add up, and before a step."""
    model = side.wrap(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(3):
        x, y = side.data(step)
        cross(model(x), y).backward()
        if side.size:
            widths = [(step % 2 * second(side), 1), (0, side.size), (second(side), 1)]
            model.apply_plan(side.plan(net(), widths[step:] + widths[:step]))
    optimizer.step()
    return side.state(model)


def compiled(side: Side) -> Any:
    """`torch.compile` leaves a burst model as it is."""
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    again = torch.compile(model, backend="eager") if side.size else model
    train(side, again, optimizer, 2)
    return side.state(model)


# Gradients and parameters that a program changes by hand.


class Scaled(torch.optim.Optimizer):
    """Scales each update, by the parameter's norm or by that of all gradients."""

    def __init__(self, parameters: Any, kind: str = "each") -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            total = sum((p.grad.square().sum() for p in held), torch.zeros(()))
            for p in held:
                if self.kind == "each":
                    factor = p.norm() / p.grad.norm()
                else:
                    factor = 0.1 / total.sqrt()
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad * factor)
                p.sub_(group["lr"] * mean)


class Around(torch.optim.Optimizer):
    """Slow weights around an optimizer; it does not initialize its base class."""

    def __init__(self, base: Any) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.base = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p].setdefault("slow", p.clone())
                    p.copy_(slow.lerp_(p, 0.5))


Around.step = torch.optim.Optimizer.profile_hook_step(Around.step)  # type: ignore[method-assign]


class Averaging(torch.optim.Optimizer):
    """Replaces parameters by their average in ``eval()``, as schedule-free ones do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(0.1 * p.grad)
                mean = self.state[p].setdefault("mean", p.clone())
                mean.lerp_(p, 0.3)

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "mean" in self.state[p]:
                p.lerp_(self.state[p]["mean"], 0.9)


def own_optimizers(side: Side) -> Any:
    found = []
    for make in (Scaled, lambda held: Around(torch.optim.SGD(held, lr=0.1))):
        model = side.wrap(net())
        train(side, model, make(model.parameters()))
        found.append(side.state(model))
    return found


def averaged_by_an_optimizer(side: Side, order: str = "state") -> Any:
    model = side.wrap(net())
    optimizer = Averaging(model.parameters())
    train(side, model, optimizer)
    if side.size and order == "state":
        model.refresh(optimizer)
    elif side.size and order == "early":
        model.refresh()
    optimizer.eval()
    if side.size and order == "late":
        model.refresh()
    inner = model.module if side.size else model
    inner.eval()
    found = [inner(torch.ones(2, 6)).detach()]
    state = copy.deepcopy(inner).state_dict()
    return [*found, *state.values()]


def averaged_then_refreshed(side: Side) -> Any:
    return averaged_by_an_optimizer(side, "late")


def initialized_again(side: Side) -> Any:
    """By `torch.nn.init`, which passes all arguments by name, layer by layer."""
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(side, model, optimizer)
    if side.size:
        model.refresh()
    torch.manual_seed(11)
    inner = model.module if side.size else model
    nn.init.normal_(inner[0].weight, 0.0, 0.2)
    nn.init.uniform_(inner[5].weight, -0.2, 0.2)
    nn.init.constant_(inner[2].weight, 0.1)
    nn.init.trunc_normal_(inner[2].weight, std=0.1)
    nn.init.orthogonal_(inner[0].weight)
    nn.init.kaiming_uniform_(inner[5].weight)
    inner[5].reset_parameters()
    train(side, model, optimizer)
    return side.state(model)


def resumed_by_checkpoint(side: Side) -> Any:
    """A new optimizer, prepared and loaded by torch.distributed.checkpoint."""
    from torch.distributed.checkpoint import state_dict as checkpoint

    model = side.wrap(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(side, model, optimizer)
    if side.size:
        model.refresh(optimizer)
    inner = model.module if side.size else model
    saved = copy.deepcopy(checkpoint.get_state_dict(inner, optimizer))
    later = side.wrap(net(seed=5))
    inner = later.module if side.size else later
    optimizer = torch.optim.Adam(later.parameters(), lr=0.1)
    checkpoint.get_state_dict(inner, optimizer)
    checkpoint.set_state_dict(
        inner, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1]
    )
    train(side, later, optimizer)
    return side.state(later)


def zeros_from_before(side: Side) -> Any:
    """Gradients from before the model was wrapped, set to zero or dropped."""
    found = []
    for drops in (True, False):
        model = net()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model = side.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(3):
            optimizer.zero_grad(set_to_none=drops)
            x, y = side.data(step)
            cross(model(x), y).backward()
            optimizer.step()
        found.append(side.state(model))
    return found


def second(side: Side) -> int:
    """Return rank 1, or the only one."""
    return min(1, side.size - 1)


def apart(side: Side, model: nn.Module) -> Any:
    """A burst model of whose layers none runs on two ranks."""
    if not side.size:
        return model
    plan = side.plan(model, [(0, 1), (second(side), 1)])
    return BurstParallel(model, plan, example_inputs=(example_of(model),))


def deep(seed: int = 0) -> nn.Sequential:
    return mlp(6, 8, 7, 4, between=nn.Tanh, seed=seed)


def held(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


def clip_by_global_norm(side: Side) -> Any:
    """By hand, by the norms that the library and PyTorch join."""
    found = []
    for kind in range(3):
        model = apart(side, deep())
        norms = []

        def clip() -> None:
            grads = [p.grad for p in held(model)]
            if kind == 0 and side.size:
                norm = model.grad_norm()
            elif kind == 1:
                norm = get_total_norm(grads, norm_type=3.0)
            else:
                norm = get_total_norm(p.grad for p in held(model))
            norms.append(norm)
            for grad in grads:
                grad.mul_(0.1 / norm)

        train(side, model, torch.optim.SGD(model.parameters(), lr=0.3), 4, after=clip)
        found.append((norms, side.state(model)))
    return found


def changed_by_hand(side: Side) -> Any:
    """Decay, limits, factors by layer, moved and averaged parameters: no norm."""
    found = []
    for kind in range(6):
        model = apart(side, deep())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        every = list(model.parameters())
        mean = [torch.zeros_like(p) for p in every]
        steps = 0

        @torch.no_grad()
        def change() -> None:
            nonlocal steps
            steps += 1
            for i, p in enumerate(every):
                if p.grad is None:
                    continue
                if kind == 0:
                    p.grad.add_(p, alpha=0.01 * steps)
                elif kind == 1:
                    p.grad.clamp_(-0.02 / steps, 0.02)
                elif kind == 2 and i >= 2:  # ten times faster
                    p.grad.mul_(10)
                elif kind == 3:
                    p.grad.mul_(min(1.0, 0.1 / float(p.grad.norm())))
                elif kind == 4:
                    p.sub_(p, alpha=0.01 * steps)
                elif kind == 5:
                    p.data.add_(p.grad, alpha=-0.1 / steps)
                    mean[i].lerp_(p, 0.1)
            if kind == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05 * steps)
            if kind == 5 and steps == 3:
                for p, other in zip(every, mean, strict=True):
                    if p.grad is not None:
                        p.data.copy_(other)

        train(side, model, optimizer, 5, after=change)
        found.append(side.state(model))
    return found


def gradients_of_some_steps(side: Side) -> Any:
    """Accumulated with zeroed gradients, and steps that all ranks leave out."""
    model = apart(side, deep())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(7):
        x, y = side.data(step)
        (cross(model(x), y) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step % 3 == 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step < 4)
    return side.state(model)


def gradients_dropped_by_layer(side: Side) -> Any:
    """Drop the last layer's gradients in the first steps, as a GAN one network's."""
    found = []
    for kind in range(2):
        model = apart(side, deep())
        layers = list(model.module if side.size else model)
        last = list(layers[-1].parameters())
        first = [p for part in layers[:-1] for p in part.parameters()]
        both = [torch.optim.Adam(some, lr=0.01) for some in (first, last)]
        one = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            for turn in range(2):
                if kind:
                    both[turn].zero_grad(set_to_none=step < 2)
                else:
                    one.zero_grad(set_to_none=step < 2)
                x, y = side.data(2 * step + turn)
                cross(model(x), y).backward()
                if kind:
                    both[turn].step()
                    continue
                for p in last if step < 3 else []:
                    p.grad = None
                one.step()
        found.append(side.state(model))
    return found


def fused_on_one_rank(side: Side) -> Any:
    """Only one rank has gradients, so only its optimizer takes fused steps."""
    found = []
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        model = net(6, 4)
        if side.size:
            plan = side.plan(model, [(0, 1)])
            model = BurstParallel(model, plan, example_inputs=(example_of(model),))
        optimizer = kind(model.parameters(), lr=0.1, fused=True)
        train(side, model, optimizer)
        if side.size:
            model.refresh(optimizer)
            model.apply_plan(side.plan(net(6, 4), [(0, side.size)]))
        train(side, model, optimizer)
        found.append(side.state(model))
    return found


def options_that_change(side: Side) -> Any:
    """Rates of tensors, groups and a scheduler by a joined loss, layers apart."""
    model = apart(side, deep())
    rate = torch.tensor(0.1)
    layers = list(model.module if side.size else model)
    groups = [
        {"params": list(part.parameters()), "lr": 0.01 * (i + 1)}
        for i, part in enumerate(layers)
        if i != 2
    ]
    optimizers = [
        torch.optim.Adam(groups, betas=(0.8, 0.9)),
        torch.optim.Adam(layers[2].parameters(), lr=rate, foreach=False),
    ]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizers[0], patience=0, factor=0.5
    )
    for step in range(6):
        x, y = side.data(step % 2)
        loss = cross(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach() * len(y)
        if side.size:
            dist.all_reduce(total)
        plateau.step(total)
        rate.mul_(0.7)
    return side.state(model)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Tanh())
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run: Any = torch.utils.checkpoint.checkpoint
        found: torch.Tensor = self.head(run(self.body, x, use_reentrant=False))
        return found


def no_dropout_in_a_checkpoint(side: Side) -> Any:
    torch.manual_seed(0)
    model = side.wrap(Checkpointed())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return side.state(model)


class Bounded(torch.optim.Optimizer):
    """Limits each gradient; without a limit by default."""

    def __init__(self, params: Any, most: float = float("inf")) -> None:
        super().__init__(params, {"lr": 0.1, "most": most})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.clamp(-group["most"], group["most"])


def limits_of_infinity(side: Side) -> Any:
    """Clipping to infinity returns the norm; an option may be infinite too."""
    model = side.wrap(net())
    norms = []

    def norm() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).clone())

    train(side, model, Bounded(model.parameters()), after=norm)
    return norms, side.state(model)


def clip_held_gradients_in_groups(side: Side) -> Any:
    """Each rank has the gradients of one group, and passes none of the other."""
    module = nn.Sequential(*deep()[:3])
    model = apart(side, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []

    def clip() -> None:
        for layer in (module[0], module[2]):
            norms.append(nn.utils.clip_grad_norm_(held(layer), 0.02).clone())

    train(side, model, optimizer, after=clip)
    return norms, side.state(model)


class Squared(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * weight.abs()


def cached_parametrization(side: Side) -> Any:
    """The cache of the program's `with` gets nothing of a capture."""
    module = net()
    parametrize.register_parametrization(module[0], "weight", Squared())
    model = side.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = side.data(step)
        optimizer.zero_grad()
        with parametrize.cached():
            (cross(model(x), y) + cross(model(2 * x), y)).backward()
        optimizer.step()
    return side.state(model)


def layers_that_join_in_evaluation(side: Side) -> Any:
    """Dropouts in rows of parts separate layers in training only."""
    module: Any = Folded()
    if side.size:
        widths = [(0, side.size), (second(side), 1), (second(side), 1), (0, 1)]
        plan = side.plan(module, widths)
        module = BurstParallel(module, plan, example_inputs=(example_of(module),))
    module.eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(side, module, optimizer, 2)
    return side.state(module)


RIGHT = [
    layers_that_join_in_evaluation,
    cached_parametrization,
    inputs_with_a_class,
    clip_held_gradients_in_groups,
    limits_of_infinity,
    no_dropout_in_a_checkpoint,
    fused_on_one_rank,
    gradients_dropped_by_layer,
    options_that_change,
    own_optimizers,
    averaged_by_an_optimizer,
    averaged_then_refreshed,
    initialized_again,
    resumed_by_checkpoint,
    zeros_from_before,
    clip_by_global_norm,
    changed_by_hand,
    gradients_of_some_steps,
    frozen_teacher,
    loaded_full_state,
    new_plan_keeps_gradients,
    compiled,
    plan_from_file,
    chain,
    chain_of_three,
    loss_of_two_models,
    output_used_twice,
    several_backwards,
    ordinary_module_before,
    input_gradient,
    returned_gradients,
    temperature,
    penalty_by_gradient,
    clip_by_torch,
    clip_part_and_two_models,
    scaled,
    scaled_and_clipped,
    freeze_and_unfreeze,
    accumulate_and_drop,
    frozen_before_backward,
    changed_by_hand_after_refresh,
    gradient_hooks,
    schedulers_and_groups,
    adafactor_and_fused,
    average,
    saved_optimizer,
    statistics_after_refresh,
    another_model_over_the_module,
    new_plan_keeps_state,
    new_plan_with_a_counting_optimizer,
]


def rank_of_right_uses(
    rank: int, size: int, names: list[str], widths: Widths, shares: str
) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    for name in names:
        use = globals()[name]
        torch.manual_seed(3)
        try:
            got = use(Side(rank, size, widths, shares))
        except Exception as exc:  # noqa: BLE001
            found[name] = f"{type(exc).__name__}: {exc}"
            break  # the ranks are no longer in step
        torch.manual_seed(3)
        found[name] = worst_of(got, use(Alone()))
    return found


PLANS = [
    (2, [(0, 2), (1, 1), (0, 1)], "uneven"),
    (1, [(0, 1)], "even"),
    pytest.param(3, [(1, 2), (0, 3), (2, 1)], "even", marks=pytest.mark.repeat),
    pytest.param(2, [(0, 2)], "one", marks=pytest.mark.repeat),
]


def test_a_rank_that_runs_no_layer_clips_nothing(ranks: Any) -> None:
    widths = [(0, 2), (1, 1), (0, 1)]
    for found in ranks(rank_of_right_uses, 3, ["clip_by_torch"], widths, "even"):
        assert isinstance(found["clip_by_torch"], float), found
        assert found["clip_by_torch"] < 1e-9


@pytest.mark.parametrize(("size", "widths", "shares"), PLANS)
def test_a_use_gives_what_one_process_gives(
    ranks: Any, size: int, widths: Widths, shares: str
) -> None:
    names = [use.__name__ for use in RIGHT]
    everyone = ranks(
        rank_of_right_uses, size, names, widths, shares, timeout_s=280, group_s=60
    )
    for rank, found in enumerate(everyone):
        for name, value in found.items():
            assert isinstance(value, float), (rank, name, value)
            assert value < 1e-9, (rank, name, value)
        assert len(found) == len(names)


# Uses that are refused, each on all ranks. Layers run on ranks 0 to 1, 1, and 0.


def ordinary_module_between_uneven_shares(side: Side) -> None:
    first, last = side.wrap(net(6, 5, 1)), side.wrap(net(5, 4, 2))
    x = torch.randn(2 + side.rank, 6)
    last(nn.Linear(5, 5)(first(x))).square().mean().backward()


def two_models_with_one_encoder(side: Side) -> None:
    encoder = nn.Linear(6, 5)
    heads = [nn.Sequential(encoder, nn.Tanh(), nn.Linear(5, n)) for n in (3, 2)]
    plans = [side.plan(model, side.widths) for model in heads]
    kept = []
    for model, plan in zip(heads, plans, strict=True):
        kept.append(BurstParallel(model, plan, example_inputs=(example_of(model),)))


def forward_mode(side: Side) -> None:
    model = side.wrap(net())
    x, _ = side.data(0)
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def gradient_penalty(side: Side) -> None:
    model = side.wrap(net())
    x, _ = side.data(0)
    x.requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def gradients_of_parameters(side: Side) -> None:
    model = side.wrap(net())
    x, y = side.data(0)
    torch.autograd.grad(cross(model(x), y), list(model.parameters()), allow_unused=True)


def backward_of_parameters(side: Side) -> None:
    model = side.wrap(net())
    x, y = side.data(0)
    cross(model(x), y).backward(inputs=list(model.parameters()))


def penalty_in_the_loss(side: Side) -> None:
    model = side.wrap(net())
    x, y = side.data(0)
    loss = cross(model(x), y)
    (loss + sum(p.square().sum() for p in model.parameters())).backward()


def penalty_of_a_narrow_layer(side: Side) -> None:
    model = side.wrap(net())
    penalty = sum(p.square().sum() for p in model.parameters())
    x, y = side.data(0)
    (cross(model(x), y) + penalty).backward()


def norm_by_hand(side: Side) -> None:
    """Each rank scales by its own norm: copies of a layer drift apart."""
    model = side.wrap(net())

    def clip() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.mul_(0.01 / norm)

    train(side, model, torch.optim.SGD(model.parameters(), lr=0.5), after=clip)


def norm_by_hand_of_layers_apart(side: Side, kind: str = "clip") -> None:
    """Each rank scales by its own norm, and no two ranks run one layer."""
    model = apart(side, deep())
    old: list[torch.Tensor] = []

    @torch.no_grad()
    def change() -> None:
        grads = [p.grad for p in held(model)]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for p in held(model):
            if kind == "decay":
                p.grad.add_(p, alpha=0.01)
            if kind == "data":
                p.grad.data.mul_(min(1.0, 0.05 / norm))
            elif kind == "new":
                p.grad = p.grad * (0.05 / norm)
            elif kind in ("clip", "decay", "save"):
                p.grad.mul_(0.05 / norm)
            elif kind == "step":
                p.sub_(p.grad, alpha=float(0.1 / norm))
            old.append(p.clone())
            if kind == "sam":
                p.add_(p.grad, alpha=float(0.05 / norm))
            elif kind == "asam":
                p.add_(p.square() * p.grad, alpha=float(0.05 / norm))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if not kind.endswith("sam"):
        steps = 2 if kind == "save" else 3
        train(side, model, optimizer, steps, after=change)
        model.full_state_dict()
        return
    for step in range(3):
        x, y = side.data(step)
        cross(model(x), y).backward()
        change()
        optimizer.zero_grad()
        cross(model(x), y).backward()
        with torch.no_grad():
            for p, before in zip(held(model), old, strict=True):
                p.copy_(before)
        old.clear()
        optimizer.step()
        optimizer.zero_grad()


def norm_by_data_of_layers_apart(side: Side) -> None:
    norm_by_hand_of_layers_apart(side, "data")


def norm_by_new_gradients(side: Side) -> None:
    norm_by_hand_of_layers_apart(side, "new")


def norm_by_hand_after_decay(side: Side) -> None:
    norm_by_hand_of_layers_apart(side, "decay")


def norm_by_hand_then_saved(side: Side) -> None:
    norm_by_hand_of_layers_apart(side, "save")


def normalized_steps_by_hand(side: Side) -> None:
    norm_by_hand_of_layers_apart(side, "step")


def sharpness_aware(side: Side) -> None:
    norm_by_hand_of_layers_apart(side, "sam")


def adaptive_sharpness_aware(side: Side) -> None:
    norm_by_hand_of_layers_apart(side, "asam")


def norm_in_hooks_before_steps(side: Side, kind: str = "before") -> None:
    model = apart(side, deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    @torch.no_grad()
    def change(*_: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in held(model)]).norm()
        for p in held(model):
            if kind == "after":
                p.sub_(p.grad, alpha=float(0.1 / norm))
            else:
                p.grad.mul_(0.05 / norm)

    if kind == "before":
        optimizer.register_step_pre_hook(change)
    elif kind == "after":
        optimizer.register_step_post_hook(change)
    for step in range(3):
        x, y = side.data(step)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross(model(x), y)
            loss.backward()
            if kind == "closure":
                change()
            return loss

        if kind == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    model.full_state_dict()


def norm_in_hooks_after_steps(side: Side) -> None:
    norm_in_hooks_before_steps(side, "after")


def norm_in_closures(side: Side) -> None:
    norm_in_hooks_before_steps(side, "closure")


class LimitedHere(torch.optim.SGD):
    """Limits gradients in its own step, and calls its base class's."""

    def step(self, closure: Any = None) -> Any:
        held = [p.grad for group in self.param_groups for p in group["params"]]
        grads = [grad for grad in held if grad is not None]
        if grads:
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.mul_(0.05 / norm)
        return super().step(closure)


def norm_in_a_step(side: Side) -> None:
    model = apart(side, deep())
    torch.optim.SGD(model.parameters(), lr=0.5)
    train(side, model, LimitedHere(model.parameters(), lr=0.5))


def step_left_out_on_one_rank(side: Side) -> None:
    model = apart(side, deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = side.data(step)
        cross(model(x), y).backward()
        if side.rank == 0:
            optimizer.step()


def use_by_rank(side: Side, kind: str = "loss") -> None:
    """Layers apart: no two ranks have a copy that shows the difference."""
    model = apart(side, deep())
    decay = 0.1 * side.rank if kind == "decay" else 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=decay)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        x, y = side.data(step)
        if kind != "zero" or side.rank == 0:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = cross(model(x), y)
        loss.backward()
        if kind == "drop" and side.rank == 1 and step == 2:
            optimizer.zero_grad()
        optimizer.step()
        if kind == "loss":
            plateau.step(loss.item() + side.rank * step)
    model.full_state_dict()


def decay_by_rank(side: Side) -> None:
    use_by_rank(side, "decay")


def zeroed_on_one_rank(side: Side) -> None:
    use_by_rank(side, "zero")


def dropped_on_one_rank(side: Side) -> None:
    use_by_rank(side, "drop")


def norm_of_each_gradient_that_a_rank_has(side: Side, kind: str = "clip") -> None:
    """Each rank makes as many calls, for other parameters."""
    model = apart(side, deep())
    x, y = side.data(0)
    cross(model(x), y).backward()
    for p in held(model):
        if kind == "clip":
            nn.utils.clip_grad_norm_([p], 0.02)
        else:
            get_total_norm([p.grad])


def norms_of_each_gradient_that_a_rank_has(side: Side) -> None:
    norm_of_each_gradient_that_a_rank_has(side, "norm")


def clip_on_one_rank_and_norm_on_another(side: Side) -> None:
    model = apart(side, deep())
    x, y = side.data(0)
    cross(model(x), y).backward()
    if side.rank:
        model.grad_norm()
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)


def scaler_steps_of_optimizers_with_gradients(side: Side) -> None:
    module = nn.Sequential(*deep()[:3])
    model = apart(side, module)
    scaler = torch.amp.GradScaler("cpu")
    x, y = side.data(0)
    scaler.scale(cross(model(x), y % 2)).backward()
    for layer in (module[0], module[2]):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        if held(layer):
            scaler.unscale_(optimizer)


def rate_by_rank(side: Side) -> None:
    model = side.wrap(net())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1 + side.rank))


def rate_by_rank_then_saved(side: Side) -> None:
    model = side.wrap(net())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1 + side.rank), 1)
    model.full_state_dict()


def inner_module(side: Side) -> None:
    model = side.wrap(net())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    model.module(side.data(0)[0])


def stale_average(side: Side) -> None:
    model = side.wrap(net())
    mean = torch.optim.swa_utils.AveragedModel(model.module)
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    mean.update_parameters(model.module)


def stale_by_foreach(side: Side) -> None:
    model = side.wrap(net())
    mean = [p.detach().clone() for p in model.parameters()]
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    torch._foreach_lerp_(mean, list(model.parameters()), 0.1)


def stale_optimizer(side: Side) -> None:
    model = side.wrap(net())
    optimizer = torch.optim.Adam(model.parameters())
    train(side, model, optimizer, 1)
    model.refresh()
    optimizer.state_dict()


def stale_statistics(side: Side) -> None:
    """Running statistics of a layer that runs on rank 1, and a weight of rank 0's."""
    model = side.wrap(net())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    held = model.module[5].weight if side.rank else model.module[3].running_mean
    held.abs().sum()


class Momentum(torch.optim.Optimizer):
    """Keeps its momentum in an attribute, or what it saw in its parameter groups."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind
        self.kept: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.kind == "attribute":
                    self.kept[p] = 0.9 * self.kept.get(p, 0) + p.grad
                    p -= group["lr"] * self.kept[p]
                    continue
                if self.kind == "group":
                    group["seen"] = group.get("seen", 0) + p.grad.numel()
                p -= group["lr"] * p.grad


def optimizer_with_an_attribute(side: Side, kind: str = "attribute") -> None:
    model = side.wrap(net())
    optimizer = Momentum(model.parameters(), kind)
    train(side, model, optimizer, 1)
    model.apply_plan(side.plan(net(), [(0, 1)]))


def optimizer_with_an_entry(side: Side) -> None:
    optimizer_with_an_attribute(side, "group")


def saved_optimizer_with_an_attribute(side: Side) -> None:
    model = side.wrap(net())
    optimizer = Momentum(model.parameters(), "attribute")
    train(side, model, optimizer, 1)
    model.refresh(optimizer)


def gradients_read_together(side: Side) -> None:
    """LBFGS, on a plan in which no two ranks share a layer."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    wrapped = BurstParallel(
        model,
        side.plan(model, [(0, 1), (1, 1)]),
        example_inputs=(example_of(model),),
    )
    optimizer = torch.optim.LBFGS(wrapped.parameters())
    x, y = side.data(0)
    optimizer.step(lambda: cross(wrapped(x), y))


def gradients_limited_together(side: Side) -> None:
    """An optimizer limits the norm of all gradients in its step."""
    model = side.wrap(net())
    train(side, model, Scaled(model.parameters(), "all"), 1)


def averaged_after_refresh(side: Side) -> None:
    averaged_by_an_optimizer(side, "early")


def saved_after_a_change(side: Side) -> None:
    """Only the layers that a rank runs were changed, after `refresh`."""
    model = side.wrap(net())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.refresh()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.mul_(0.5)
    model.module.state_dict()


def plan_of_another_kind(side: Side) -> None:
    BurstParallel(net(), {} if side.rank else None)  # type: ignore[arg-type]


def example_without_tuple(side: Side) -> None:
    model = net()
    plan = side.plan(model, side.widths)
    BurstParallel(model, plan, example_inputs=example_of(model))  # type: ignore[arg-type]


def no_model(side: Side) -> None:
    BurstParallel(None, side.plan(net(), side.widths))  # type: ignore[arg-type]


def lazy_module(side: Side) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    BurstParallel(model, side.plan(net(), side.widths))


def gradients_from_before(side: Side) -> None:
    model = net()
    x, y = side.data(0)
    cross(model(x), y).backward()
    wrapped = side.wrap(model)
    cross(wrapped(x), y).backward()


def stale_save(side: Side) -> None:
    model = side.wrap(net())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    torch.save(model.module, io.BytesIO())


def copied(side: Side) -> None:
    torch.optim.swa_utils.AveragedModel(side.wrap(net()))


def pickled(side: Side) -> None:
    torch.save(side.wrap(net()), io.BytesIO())


def replaced(side: Side) -> None:
    model = side.wrap(net())
    model.module[5] = nn.Linear(7, 4)
    model(side.data(0)[0])


def replaced_on_one_rank(side: Side) -> None:
    model = side.wrap(net())
    if side.rank == 0:
        model.module[5] = nn.Linear(7, 4)
    model(side.data(0)[0])


def converted(side: Side) -> None:
    model = side.wrap(net())
    model.refresh()
    model.module.float()
    model(side.data(0)[0])


def frozen_on_one_rank(side: Side) -> None:
    model = side.wrap(net())
    model.module[0].requires_grad_(side.rank != 0)
    model(side.data(0)[0])


def checkpointed(side: Side) -> None:
    model = side.wrap(net())
    x, y = side.data(0)
    saved = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    cross(saved, y).backward()


def sparse(side: Side) -> None:
    model = nn.Sequential(
        nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 4)
    )
    example = torch.zeros(2, 2, dtype=torch.long)
    plan = plan_of(model, example, lambda _i: (0, side.size), side.size)
    BurstParallel(model, plan, example_inputs=(example,))


def nested(side: Side) -> None:
    model = net()
    plan = side.plan(model, side.widths)
    inner = BurstParallel(model, plan, example_inputs=(example_of(net()),))
    BurstParallel(inner, plan, example_inputs=(example_of(net()),))


def inside_ddp(side: Side) -> None:
    model = nn.parallel.DistributedDataParallel(side.wrap(net()))
    model(side.data(0)[0])


def transformed(side: Side) -> None:
    model = side.wrap(net())
    torch.func.jacrev(lambda x: model(x).sum(0))(side.data(0)[0])


def transformed_parameters(side: Side) -> None:
    """The transform wraps no input."""
    model = side.wrap(net())
    x, y = side.data(0)

    def loss(held: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross(torch.func.functional_call(model, held, (x,)), y)

    torch.func.grad(loss)(dict(model.named_parameters()))


def stale_after_the_model_was_deleted(side: Side) -> None:
    """A function trains; its caller saves the module."""
    module = net()

    def fit() -> None:
        model = side.wrap(module)
        train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)

    fit()
    gc.collect()
    module.state_dict()


def replaced_by_a_later_model(side: Side) -> None:
    module = net()
    models = [side.wrap(module), side.wrap(module)]
    models[0](side.data(0)[0])


def stale_after_loading_a_part(side: Side) -> None:
    model = side.wrap(net())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    model.load_state_dict({"3.weight": torch.ones(7)}, strict=False)
    model.module(side.data(0)[0])


class Raising(torch.optim.Optimizer):
    """Raises an error if a gradient is not finite."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        held = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for p in held:
            if not bool(p.grad.isfinite().all()):
                raise FloatingPointError
        for p in held:
            p -= 0.1 * p.grad


def step_that_raises_on_one_rank(side: Side) -> Any:
    model = net()
    model[2].weight.register_hook(lambda grad: grad * float("nan"))
    wrapped = side.wrap(model)
    optimizer = Raising(wrapped.parameters())
    x, y = side.data(0)
    for _ in range(2):
        cross(wrapped(x), y).backward()
        with contextlib.suppress(FloatingPointError):
            optimizer.step()


def norm_within_no_sync(side: Side) -> Any:
    model = side.wrap(net())
    with model.no_sync():
        x, y = side.data(0)
        cross(model(x), y).backward()
        model.grad_norm()


def step_within_no_sync(side: Side) -> Any:
    model = side.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        x, y = side.data(0)
        cross(model(x), y).backward()
    optimizer.step()


def input_whose_class_computes(side: Side) -> Any:
    model = side.wrap(net(6, 5))
    model(side.data(0)[0].as_subclass(Doubled))


REFUSED = {
    step_within_no_sync: "in no_sync(), so that gradients have this rank's own",
    norm_within_no_sync: "ask for the norm, and clip, after that one",
    norm_of_each_gradient_that_a_rank_has: "for parameter '0.weight' on rank 0 and",
    norms_of_each_gradient_that_a_rank_has: "would join those of different gradients",
    clip_on_one_rank_and_norm_on_another: "make the same calls on every rank",
    scaler_steps_of_optimizers_with_gradients: "GradScaler for parameter '0.weight'",
    step_that_raises_on_one_rank: "steps of Raising, one of which did not end",
    input_whose_class_computes: "convert it to a plain tensor",
    two_models_with_one_encoder: "'0.weight' also belongs to another BurstParallel",
    nested: "pass the plain module to BurstParallel",
    inside_ddp: "call the burst model itself",
    transformed: "can't pass through a burst model",
    transformed_parameters: "can't pass through a burst model",
    stale_after_the_model_was_deleted: "the burst model that trained it was deleted",
    replaced_by_a_later_model: "another BurstParallel was built over the same module",
    stale_after_loading_a_part: "full_state_dict(), or refresh()",
    gradient_penalty: "create_graph=True is not supported",
    gradients_of_parameters: "Call loss.backward() and read .grad",
    backward_of_parameters: "Call loss.backward() and read .grad",
    penalty_in_the_loss: "use the optimizer's weight_decay",
    penalty_of_a_narrow_layer: "use the optimizer's weight_decay",
    norm_by_hand_of_layers_apart: "gradients were scaled by different factors",
    norm_by_data_of_layers_apart: "gradients were scaled by different factors",
    norm_by_new_gradients: "use torch.nn.utils.clip_grad_norm_",
    norm_by_hand_after_decay: "gradients were scaled by different factors",
    norm_by_hand_then_saved: "the norm from model.grad_norm()",
    normalized_steps_by_hand: "parameters were moved along their gradients",
    sharpness_aware: "parameters were moved along their gradients",
    adaptive_sharpness_aware: "parameters were moved along their gradients",
    norm_in_hooks_before_steps: "gradients were scaled by different factors",
    norm_in_hooks_after_steps: "parameters were moved along their gradients",
    norm_in_closures: "gradients were scaled by different factors",
    norm_in_a_step: "reads the gradients of several parameters",
    step_left_out_on_one_rank: "rank 0 took an optimizer step",
    norm_by_hand: "ranks 0, 1 hold different parameters of layer '0'",
    rate_by_rank: "'lr' of SGD's parameter group 0 is 0.1 on rank 0 and 1.1 on rank 1",
    rate_by_rank_then_saved: "'lr' of SGD's parameter group 0 is 0.1 on rank 0",
    use_by_rank: "add the ranks' losses with torch.distributed.all_reduce",
    decay_by_rank: "'weight_decay' of AdamW's parameter group 0 is 0.0 on rank 0",
    zeroed_on_one_rank: "rank 0 zeroed gradients before a backward, rank 1 did not",
    dropped_on_one_rank: "rank 1 dropped all gradients before an optimizer step",
    inner_module: "full_state_dict(), or refresh()",
    stale_average: "full_state_dict(), or refresh()",
    stale_by_foreach: "full_state_dict(), or refresh()",
    stale_optimizer: "refresh(optimizer)",
    stale_save: "full_state_dict(), or refresh()",
    stale_statistics: "full_state_dict(), or refresh()",
    gradients_limited_together: "Scaled reads the gradients of several parameters",
    averaged_after_refresh: "or refresh(optimizer) before it",
    saved_after_a_change: "let all ranks call refresh() after the change",
    plan_of_another_kind: "the plan must be a BurstPlan",
    example_without_tuple: "got Tensor: pass (x,)",
    no_model: "must be a torch.nn.Module, got None",
    lazy_module: "'0.weight' has no shape yet",
    gradients_from_before: "call optimizer.zero_grad() or model.zero_grad()",
    gradients_read_together: "LBFGS reads the gradients of all layers together",
    optimizer_with_an_attribute: "attribute 'kept' of Momentum differs between ranks",
    optimizer_with_an_entry: "entry 'seen' of Momentum's parameter group 0 differs",
    saved_optimizer_with_an_attribute: "only the values in optimizer.state",
    ordinary_module_between_uneven_shares: "give each rank the same number of samples",
    forward_mode: "forward-mode differentiation can't pass",
    copied: "can't be copied or pickled",
    pickled: "can't be copied or pickled",
    replaced: "'5' was replaced",
    replaced_on_one_rank: "",
    converted: "was replaced or moved",
    frozen_on_one_rank: "train different parameters",
    checkpointed: "checkpoint modules inside the model",
    sparse: "pass sparse=False to Embedding",
}


def rank_of_refused_uses(rank: int, size: int) -> dict[str, tuple[str, str]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for use in REFUSED:
        try:
            use(Side(rank, size, [(0, 2), (1, 1), (0, 1)], "even"))
            found[use.__name__] = ("", "nothing was raised")
        except Exception as exc:  # noqa: BLE001
            found[use.__name__] = (type(exc).__name__, str(exc))
    return found


def test_a_use_is_refused_on_all_ranks_in_one_sentence(ranks: Any) -> None:
    everyone = ranks(rank_of_refused_uses, 2, timeout_s=280, group_s=60)
    wanted = {use.__name__: words for use, words in REFUSED.items()}
    for rank, found in enumerate(everyone):
        for name, (kind, text) in found.items():
            assert kind in {"StrettoError", "RankDisagreement", "SpecError"}, (
                rank,
                name,
                kind,
                text,
            )
            assert wanted[name] in text, (rank, name, text)
