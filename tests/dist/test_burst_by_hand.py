"""What programs do by hand to parameters, gradients and buffers, and by hooks.

As in `test_burst_uses`: each is one process's result, or refused in one sentence.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from stretto.burst.executor import BurstParallel

sys.path.insert(0, str(Path(__file__).parent))
from test_burst_uses import Alone, Side, Widths, apart, cross, deep, train, worst_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


class Lion(torch.optim.Optimizer):
    """An optimizer of another package: it changes parameters in its step only."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(torch.tanh(50 * (mean + p.grad)), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.1)


class WithEvaluation(Lion):
    """Has a method that replaces the parameters that it has stepped, by an average."""

    @torch.no_grad()
    def eval(self) -> None:
        for p, state in self.state.items():
            p.lerp_(state["mean"], 0.5)


class Shifted(nn.Module):
    """Reads a buffer that it never changes, and a mask of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = deep()
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.long))
        self.shift: torch.Tensor
        self.mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.body(x) + self.shift) * self.mask
        return found


class Gained(nn.Module):
    """Reads a factor and a dictionary of factors that are set later."""

    def __init__(self, gain: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.gain = gain
        self.held: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.gain is not None:
            x = x * self.gain
        if "gain" in self.held:
            x = x * self.held["gain"]
        found: torch.Tensor = self.last(x)
        return found


class Attending(nn.Module):
    """Has a layer that attention reads and does not call, and one that is unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.unused = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)[:, None]
        found: torch.Tensor = self.last(self.attention(x, x, x)[0][:, 0])
        return found


def inner(side: Side, model: Any) -> Any:
    return model.module if side.size else model


def refresh(side: Side, model: Any) -> None:
    if side.size:
        model.refresh()


def shifted(side: Side) -> Any:
    model = Shifted()
    if not side.size:
        return model
    plan = side.plan(model, [(0, 1), (1, 1)])
    return BurstParallel(model, plan, example_inputs=(torch.zeros(2, 6),))


@contextlib.contextmanager
def no_sync(side: Side, model: Any, *, is_on: bool = True) -> Iterator[None]:
    with model.no_sync() if side.size and is_on else contextlib.nullcontext():
        yield


# Parameters.


def _set_later(side: Side, change: Any, gain: Any = None) -> None:
    model = Gained(gain)
    plan = side.plan(model, [(0, 1), (1, 1)])
    burst = BurstParallel(model, plan, example_inputs=(torch.zeros(2, 6),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(side, burst, optimizer, 1)
    change(model)
    train(side, burst, torch.optim.SGD(model.parameters(), lr=0.1), 1)


def _set_gain(model: Any) -> None:
    del model.gain
    model.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))


def parameter_for_none(side: Side) -> None:
    _set_later(side, _set_gain)


def parameter_for_a_number(side: Side) -> None:
    _set_later(side, _set_gain, 1.0)


def parameter_in_a_dictionary(side: Side) -> None:
    gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    _set_later(side, lambda model: model.held.update(gain=gain))


def module_of_a_parameter_added_to_a_layer(side: Side) -> None:
    def change(model: Any) -> None:
        del model.held
        model.held = nn.ParameterDict({"gain": nn.Parameter(torch.ones(8))})

    _set_later(side, change)


@torch.no_grad()
def clamp(model: Any, kind: str = "clamp") -> None:
    parameters = list(model.parameters())
    if kind == "foreach":
        torch._foreach_clamp_max_(parameters, 0.15)
    for i, p in enumerate(parameters):
        if kind == "clamp":
            p.clamp_(-0.2, 0.2)
        elif kind == "scale":
            p *= 0.9
        elif kind == "rows" and p.dim() == 2:
            p[: 1 + i % 2] = 0.1
        elif kind == "weights" and p.dim() == 2:
            p.clamp_(-0.2, 0.2)


def clamped_with_another_optimizer(side: Side) -> Any:
    """After `refresh`, with an optimizer that is not PyTorch's."""
    found = []
    for kind in ("clamp", "scale", "rows", "foreach", "weights"):
        model = apart(side, deep())
        optimizer = Lion(model.parameters(), lr=0.05)
        for _ in range(2):
            train(side, model, optimizer, 1)
            refresh(side, model)
            clamp(model, kind)
            # A read of current values, all of them.
            found.append([v.clone() for v in inner(side, model).state_dict().values()])
        found.append(side.state(model))
    return found


def clamped_after_a_skipped_step(side: Side) -> Any:
    """All ranks leave out a step, and drop the gradients or keep them for later."""
    found = []
    for kind in ("dropped", "zeroed", "kept"):
        model = apart(side, deep())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for step in range(4):
            x, y = side.data(step)
            cross(model(x), y).backward()
            if step % 2 == 0:
                optimizer.step()
            if kind != "kept" or step % 2 == 0:
                optimizer.zero_grad(set_to_none=kind == "dropped")
            refresh(side, model)
            clamp(model)
            found.append([v.clone() for v in inner(side, model).state_dict().values()])
        found.append(side.state(model))
    return found


def stepped_by_hand_after_refresh(side: Side) -> None:
    """A step of the program's own after `refresh`, then a read of all values."""
    _stepped_by_hand(side, lambda p: p.add_(p.grad, alpha=-0.1))


def decayed_and_stepped_by_hand(side: Side) -> None:
    """Also writes to layers that this rank does not run, but not as often."""
    model = apart(side, deep())
    _backward(side, model)
    model.refresh()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)
        for p in model.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.1)
    model.module.state_dict()


def stepped_by_hand_with_zeros(side: Side) -> None:
    """Subtracts zeros from the parameters of which this rank has no gradient."""

    def step(p: Any) -> None:
        p.sub_(torch.zeros_like(p) if p.grad is None else p.grad)

    _stepped_by_hand(side, step, every=True)


def _stepped_by_hand(side: Side, step: Any, *, every: bool = False) -> None:
    model = apart(side, deep())
    _backward(side, model)
    model.refresh()
    with torch.no_grad():
        for p in model.parameters():
            if every or p.grad is not None:
                step(p)
    model.module.state_dict()


def evaluated_then_clamped(side: Side) -> None:
    """An optimizer replaces this rank's parameters; then all are clamped."""
    model = apart(side, deep())
    optimizer = WithEvaluation(model.parameters(), lr=0.05)
    train(side, model, optimizer, 1)
    model.refresh()
    optimizer.eval()
    clamp(model)
    model.module.state_dict()


def changed_in_place_before_refresh(side: Side) -> None:
    """Change values as programs for DDP do that add stale ones over the ranks."""
    model = apart(side, deep())
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    with torch.no_grad():
        for p in model.parameters():
            p /= side.size


# Gradients of some layers.


def gradients_zeroed_in_part(side: Side) -> Any:
    """Zero one layer's gradients before each backward; accumulate the others."""
    found = []
    for kind in ("none", "zero_grad", "zero_", "optimizer"):
        model = apart(side, deep())
        last = inner(side, model)[-1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        of_last = torch.optim.SGD(last.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                if kind == "none":
                    for p in last.parameters():
                        p.grad = None
                elif kind == "zero_grad":
                    last.zero_grad()
                elif kind == "optimizer":
                    of_last.zero_grad()
                else:
                    for p in last.parameters():
                        if p.grad is not None:
                            p.grad.zero_()
                x, y = side.data(2 * step + part)
                cross(model(x), y).backward()
            optimizer.step()
        found.append(side.state(model))
    return found


def layers_in_turns(side: Side) -> Any:
    """A layer's gradients are dropped before each second step."""
    found = []
    for kind in range(2):
        model = apart(side, deep())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for step in range(6):
            optimizer.zero_grad()
            x, y = side.data(step)
            cross(model(x), y).backward()
            for i, part in enumerate(inner(side, model)):
                if kind and i // 2 % 2 == step % 2:
                    part.zero_grad()
                elif not kind and (i == 4) == bool(step % 2):
                    for p in part.parameters():
                        p.grad = None
            optimizer.step()
        found.append(side.state(model))
    return found


# Hooks.


def limit(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def double(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(2)


def double_in_place(grad: torch.Tensor) -> None:
    grad.mul_(2)


def hooks_see_each_gradient(side: Side) -> Any:
    """Hooks that are not linear, with backwards whose gradients are not sent."""
    found = []
    for widths in ([(0, 2)], [(0, 2), (1, 1)]):
        for kind in ("clamp", "after", "sign of one"):
            model = deep()
            if side.size:
                plan = side.plan(model, widths)
                model = BurstParallel(model, plan, example_inputs=(torch.zeros(2, 6),))  # type: ignore[assignment]
            for i, p in enumerate(model.parameters()):
                if kind == "after":
                    p.register_post_accumulate_grad_hook(limit)
                elif kind == "clamp":
                    p.register_hook(lambda grad: grad.clamp(-0.01, 0.02))
                elif i == 2:
                    p.register_hook(torch.sign)
            for step in range(2):
                model.zero_grad()
                for part in range(3):
                    with no_sync(side, model, is_on=part < 2):
                        x, y = side.data(3 * step + part)
                        cross(model(x), y).backward()
                found.append(side.grads(model))
    return found


def hooks_that_look_on_one_rank(side: Side) -> Any:
    """A logger of gradients and activations on the first rank."""
    model = apart(side, deep())
    seen = []
    if side.rank == 0:
        for p in model.parameters():
            p.register_hook(lambda grad: seen.append(float(grad.norm())))
        for part in inner(side, model):
            part.register_forward_hook(lambda _m, _i, o: seen.append(o.shape))
            part.register_full_backward_hook(lambda *_: seen.append(0))
        inner(side, model).register_forward_hook(lambda *_: seen.append(1))
    _train_in_parts(side, model)
    assert seen or side.rank
    return side.state(model)


def hook_of_all_modules_that_looks_on_one_rank(side: Side) -> Any:
    """A logger of all modules on the first rank, which runs some of each type."""
    model = apart(side, deep())
    seen = []
    handles = []
    if side.rank == 0:
        handles.append(register_module_forward_hook(lambda *_: seen.append(0)))
    _train_in_parts(side, model)
    for handle in handles:
        handle.remove()
    assert seen or side.rank
    return side.state(model)


def hooks_that_look_where_no_rank_calls_them(side: Side) -> Any:
    """Loggers of all modules that have no parts, on a rank that runs all layers."""
    model: Any = Attending()
    if side.size:
        plan = side.plan(model, [(0, 2)])
        model = BurstParallel(model, plan, example_inputs=(torch.zeros(2, 6),))
    if side.rank == 0:
        for part in inner(side, model).modules():
            if not list(part.children()):
                part.register_forward_hook(lambda *_: None)
    _train_in_parts(side, model)
    return side.state(model)


def _train_in_parts(side: Side, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            with no_sync(side, model, is_on=not part):
                x, y = side.data(2 * step + part)
                cross(model(x), y).backward()
        optimizer.step()


def _doubled(side: Side, place: str, layer: int = 2) -> None:
    """A hook that doubles something on the second rank, which runs layer 2."""
    module = deep()
    is_later = layer == 0  # no call of it finds that no capture has checked it
    model = apart(side, module) if is_later else None
    if side.rank == 1:
        part: Any = module[layer]
        if place == "parameter":
            part.weight.register_hook(lambda grad: grad * 2)
        elif place == "in place":
            part.weight.register_hook(double_in_place)
        elif place == "after":
            part.weight.register_post_accumulate_grad_hook(double)
        elif place == "forward":
            part.register_forward_hook(lambda _m, _i, o: o * 2)
        elif place == "model":
            module.register_forward_hook(lambda _m, _i, o: o * 2)
        else:
            part.register_full_backward_hook(lambda _m, i, _o: (i[0] * 2,))
    if model is None:
        model = apart(side, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(side, model, optimizer, 1 if place == "after" else 3)
    model.full_state_dict()


def gradient_hook_on_one_rank(side: Side) -> None:
    _doubled(side, "parameter")


def writing_hook_on_one_rank(side: Side) -> None:
    _doubled(side, "in place")


def later_hook_on_one_rank(side: Side) -> None:
    _doubled(side, "after")


def forward_hook_on_one_rank(side: Side) -> None:
    _doubled(side, "forward")


def backward_hook_on_one_rank(side: Side) -> None:
    _doubled(side, "backward")


def hook_of_the_model_on_one_rank(side: Side) -> None:
    _doubled(side, "model")


def gradient_hook_of_another_ranks_layer(side: Side) -> None:
    _doubled(side, "parameter", layer=0)


def later_hook_of_another_ranks_layer(side: Side) -> None:
    _doubled(side, "after", layer=0)


def forward_hook_of_another_ranks_layer(side: Side) -> None:
    _doubled(side, "forward", layer=0)


def backward_hook_of_another_ranks_layer(side: Side) -> None:
    _doubled(side, "backward", layer=0)


def hook_of_all_modules_on_one_rank(side: Side) -> None:
    """The second rank doubles what a layer returns that only the first one runs."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    handle = None
    if side.rank == 1:
        handle = register_module_forward_hook(
            lambda m, _i, o: o * 2 if isinstance(m, nn.Tanh) else None
        )
    try:
        model = apart(side, module)
        train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    finally:
        if handle is not None:
            handle.remove()


def later_hook_that_mixes_samples(side: Side) -> None:
    """All ranks register a hook on a layer of PyTorch's own, after building."""
    model: Any = deep()
    plan = side.plan(model, [(0, 2)])
    model = BurstParallel(model, plan, example_inputs=(torch.zeros(2, 6),))
    model.module[2].register_full_backward_hook(lambda _m, i, _o: (i[0] / i[0].norm(),))
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


class Own(nn.Module):
    """A module of the program's own, which is no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.inner(self.first(x)))
        return found


def hook_of_all_modules_of_the_model(side: Side) -> Any:
    """It asks for the class of the model that it is registered for, before building."""
    handle = register_module_forward_hook(
        lambda m, _i, o: o * 2 if isinstance(m, Own) else None
    )
    try:
        module: Any = Own()
        model = apart(side, module)
        train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
        return side.state(model)
    finally:
        handle.remove()


def later_hook_of_all_modules(side: Side) -> None:
    """It changes only what modules return that are no layers."""
    module: Any = Own()
    model = apart(side, module)
    handle = register_module_forward_hook(
        lambda m, _i, o: o * 2 if type(m) is nn.Sequential else None
    )
    try:
        train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    finally:
        handle.remove()


MIXED = {"share": 0.0}


def _mixing(_part: Any, grads: Any, _of_output: Any) -> Any:
    if not MIXED["share"]:  # zero times the mean would spread one sample's infinity
        return None
    return (grads[0] - MIXED["share"] * grads[0].mean(0),)


def backward_hook_that_begins_to_mix_samples(side: Side) -> None:
    _begins_to_mix(side, is_after_forward=False)


def backward_hook_changed_after_the_forward(side: Side) -> None:
    _begins_to_mix(side, is_after_forward=True)


def _begins_to_mix(side: Side, *, is_after_forward: bool) -> None:
    MIXED["share"] = 0.0
    module: Any = deep()
    module[2].register_full_backward_hook(_mixing)
    model = apart(side, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(side, model, optimizer, 1)
    x, y = side.data(1)
    if is_after_forward:
        loss = cross(model(x), y)
        MIXED["share"] = 0.5
    else:
        MIXED["share"] = 0.5
        loss = cross(model(x), y)
    loss.backward()


def hook_after_a_backward_in_no_sync(side: Side) -> None:
    model = apart(side, deep())
    with model.no_sync():
        _backward(side, model)
    for p in model.parameters():
        p.register_hook(torch.sign)
    _backward(side, model, 1)


def hook_before_a_backward_in_no_sync(side: Side) -> None:
    model = apart(side, deep())
    x, y = side.data(0)
    loss = cross(model(x), y)
    for p in model.parameters():
        p.register_hook(lambda grad: None if grad is None else grad.sign())
    with model.no_sync():
        loss.backward()


def _backward(side: Side, model: Any, step: int = 0) -> None:
    x, y = side.data(step)
    cross(model(x), y).backward()


# Buffers.


def buffers_changed_on_all_ranks(side: Side) -> Any:
    model = shifted(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        train(side, model, optimizer, 1)
        if step == 1:
            inner(side, model).shift.add_(0.1)
        elif step == 2:
            inner(side, model).mask.data[1] = 0
    return side.state(model)


def _changed_on_one_rank(side: Side, change: Any) -> None:
    model = shifted(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(side, model, optimizer, 1)
    if side.rank == 1:
        change(model.module)
    train(side, model, optimizer, 3)


def buffer_changed_on_one_rank(side: Side) -> None:
    _changed_on_one_rank(side, lambda module: module.shift.add_(0.1))


def buffer_changed_by_data_on_one_rank(side: Side) -> None:
    _changed_on_one_rank(side, lambda module: module.mask.data.fill_(2))


def buffer_changed_on_one_rank_then_saved(side: Side) -> None:
    model = shifted(side)
    train(side, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    if side.rank == 1:
        model.module.shift[2] = 7
    model.full_state_dict()


# Optimizers.


def optimizer_of_own_layers(side: Side) -> Any:
    """Each rank passes the parameters of which it has a gradient."""
    model = apart(side, deep())
    _backward(side, model)
    held = [p for p in model.parameters() if p.grad is not None]
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    optimizer.step()
    train(side, model, optimizer, 3)
    return side.state(model)


def optimizer_lacks_a_layer_on_one_rank(side: Side) -> None:
    model = apart(side, deep())
    held = list(model.parameters())
    optimizer = torch.optim.SGD(held[: 2 if side.rank else None], lr=0.1)
    train(side, model, optimizer)


def in_groups(side: Side, *options: dict[str, float]) -> tuple[Any, Any]:
    """A model, and its optimizer: with two groups on one rank, one group on others."""
    model = apart(side, deep())
    held = list(model.parameters())
    first, rest = options or ({}, {})
    groups = [{"params": held[:2]} | first, {"params": held[2:]} | rest]
    return model, torch.optim.SGD(groups if side.rank else held, lr=0.1)


def groups_with_another_rate_on_one_rank(side: Side) -> None:
    train(side, *in_groups(side, {"lr": 0.5}, {}))


def groups_with_another_decay_on_one_rank(side: Side) -> None:
    train(side, *in_groups(side, {}, {"weight_decay": 0.5}))


def groups_of_which_one_changes_later_on_one_rank(side: Side) -> None:
    model, optimizer = in_groups(side)
    train(side, model, optimizer)
    if side.rank:
        optimizer.param_groups[1]["lr"] = 0.2
    train(side, model, optimizer)


def the_same_options_in_other_groups(side: Side) -> Any:
    model, optimizer = in_groups(side)
    train(side, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    train(side, model, optimizer)
    return side.state(model)


RIGHT: list[Callable[[Side], Any]] = [
    the_same_options_in_other_groups,
    clamped_with_another_optimizer,
    clamped_after_a_skipped_step,
    gradients_zeroed_in_part,
    layers_in_turns,
    hooks_see_each_gradient,
    hooks_that_look_on_one_rank,
    hook_of_all_modules_that_looks_on_one_rank,
    hooks_that_look_where_no_rank_calls_them,
    hook_of_all_modules_of_the_model,
    buffers_changed_on_all_ranks,
    optimizer_of_own_layers,
]


def rank_of_right_uses(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    widths: Widths = [(0, 2), (1, 1), (0, 1)]
    found: dict[str, Any] = {}
    for use in RIGHT:
        if use.__name__ not in names:
            continue
        try:
            got = use(Side(rank, size, widths, "uneven"))
        except Exception as exc:  # noqa: BLE001
            found[use.__name__] = f"{type(exc).__name__}: {exc}"
            break  # the ranks are no longer in step
        found[use.__name__] = worst_of(got, use(Alone()))
    return found


@pytest.mark.parametrize("use", RIGHT, ids=lambda use: use.__name__)
def test_a_change_by_hand_gives_what_one_process_gives(
    ranks: Any, use: Callable[[Side], Any]
) -> None:
    for rank, found in enumerate(ranks(rank_of_right_uses, 2, [use.__name__])):
        value = found[use.__name__]
        assert isinstance(value, float), (rank, value)
        assert value < 1e-9, (rank, value)


# Refused, each on all ranks.

STALE = "full_state_dict(), or refresh()"
KINDS = {"StrettoError", "RankDisagreement", "SpecError", "PlanMismatch"}
ON_ONE_RANK = "is on rank 1 and missing on rank 0"

REFUSED = {
    stepped_by_hand_after_refresh: STALE,
    decayed_and_stepped_by_hand: STALE,
    stepped_by_hand_with_zeros: STALE,
    evaluated_then_clamped: "as an optimizer's eval() or train() does",
    changed_in_place_before_refresh: STALE,
    parameter_for_none: "'gain' was added after the burst model was built",
    parameter_for_a_number: "'gain' was added after the burst model was built",
    parameter_in_a_dictionary: "not a parameter of the model: register it",
    module_of_a_parameter_added_to_a_layer: "'held.gain' was added after the burst",
    gradient_hook_on_one_rank: ON_ONE_RANK,
    writing_hook_on_one_rank: ON_ONE_RANK,
    later_hook_on_one_rank: ON_ONE_RANK,
    forward_hook_on_one_rank: ON_ONE_RANK,
    backward_hook_on_one_rank: ON_ONE_RANK,
    hook_of_the_model_on_one_rank: ON_ONE_RANK,
    gradient_hook_of_another_ranks_layer: ON_ONE_RANK,
    later_hook_of_another_ranks_layer: ON_ONE_RANK,
    forward_hook_of_another_ranks_layer: ON_ONE_RANK,
    backward_hook_of_another_ranks_layer: ON_ONE_RANK,
    hook_of_all_modules_on_one_rank: "of all modules is on rank 1 and missing on rank",
    later_hook_that_mixes_samples: "of module '2' was registered after the burst model",
    later_hook_of_all_modules: "of all modules was registered after the burst model",
    backward_hook_that_begins_to_mix_samples: "it mixes samples in backward",
    backward_hook_changed_after_the_forward: "changed after the forward, so that it",
    hook_after_a_backward_in_no_sync: "register hooks on parameters before the forward",
    hook_before_a_backward_in_no_sync: "register hooks on parameters before the",
    buffer_changed_on_one_rank: "ranks 0, 1 hold different values of buffer 'shift'",
    buffer_changed_by_data_on_one_rank: "different values of buffer 'mask'",
    buffer_changed_on_one_rank_then_saved: "different values of buffer 'shift'",
    optimizer_lacks_a_layer_on_one_rank: "on rank 1 lack parameter '2.weight', which",
    groups_with_another_rate_on_one_rank: "'lr' of SGD 0.1 on rank 0 and 'lr' of SGD",
    groups_with_another_decay_on_one_rank: "'weight_decay' of SGD 0 on rank 0 and",
    groups_of_which_one_changes_later_on_one_rank: "'lr' of SGD 0.1 on rank 0 and",
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


def test_a_change_by_hand_is_refused_on_all_ranks(ranks: Any) -> None:
    wanted = {use.__name__: words for use, words in REFUSED.items()}
    for rank, found in enumerate(ranks(rank_of_refused_uses, 2, timeout_s=200)):
        for name, words in wanted.items():
            kind, text = found[name]
            assert kind in KINDS, (rank, name, text)
            assert words in text, (rank, name, text)
