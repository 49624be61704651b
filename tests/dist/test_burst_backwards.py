"""Backward passes that end on some ranks, have odd hooks, or reach no output.

As in `test_burst_uses`: each is one process's result, or refused in one sentence.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from stretto.burst.executor import BurstParallel
from support.burst_sides import (
    Alone,
    Side,
    Widths,
    WithTemperature,
    cross,
    train,
    worst_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

APART: Widths = [(0, 1), (1, 1)]


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    tanh = nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), tanh, nn.Linear(8, 8), tanh, nn.Linear(8, 4))


def built(side: Side, model: nn.Module, widths: Widths) -> Any:
    if not side.size:
        return model
    plan = side.plan(model, widths)
    return BurstParallel(model, plan, example_inputs=(torch.zeros(2, 6),), timeout_s=20)


def inner(side: Side, model: Any) -> Any:
    return model.module if side.size else model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@contextlib.contextmanager
def parts_of(side: Side, step: int) -> Iterator[None]:
    """Give the ranks other parts of the batch in each step."""
    before = side.shares
    if side.size:
        first = 1 + step % 3
        side.shares = [first, side.batch - first]
    yield
    side.shares = before


# Exceptions.


class Fails:
    """A hook that raises while it is on."""

    is_on = False

    def __call__(self, *_: Any) -> None:
        if self.is_on:
            raise ValueError("bad gradient")


def skips(side: Side, widths: Widths, register: Callable[[nn.Module, Any], Any]) -> Any:
    """A program that skips the second step, whose backward raises."""
    model = deep()
    wrapped = built(side, model, widths)
    fails = Fails()
    register(model, fails)
    optimizer = sgd(model)
    for step in range(4):
        fails.is_on = step == 1
        x, y = side.data(step)
        optimizer.zero_grad()
        with contextlib.suppress(ValueError):
            cross(wrapped(x), y).backward()
            optimizer.step()
    return side.state(wrapped)


def skipped_on_all_ranks(side: Side) -> Any:
    return skips(side, [(0, 2)], lambda m, hook: m[2].weight.register_hook(hook))


def exception_of_a_gradient_hook(side: Side) -> None:
    skips(side, APART, lambda m, hook: m[0].weight.register_hook(hook))


def exception_of_a_later_hook(side: Side) -> None:
    skips(
        side, APART, lambda m, hook: m[0].bias.register_post_accumulate_grad_hook(hook)
    )


def exception_of_a_module_hook(side: Side) -> None:
    skips(side, APART, lambda m, hook: m[0].register_full_backward_hook(hook))


def exception_of_a_wide_layer(side: Side) -> None:
    """All ranks run the layer, but only one's program registered the hook."""

    def register(model: nn.Module, hook: Any) -> None:
        if side.rank == 0:
            model[0].weight.register_hook(hook)  # type: ignore[index]

    skips(side, [(0, 2)], register)


def exception_then_another_backward(side: Side) -> None:
    """The rank runs another backward before the next forward."""
    model = deep()
    wrapped = built(side, model, APART)
    fails = Fails()
    model[0].weight.register_hook(fails)
    x, y = side.data(0)
    loss = cross(wrapped(x), y)
    for fails.is_on in (True, False):
        with contextlib.suppress(ValueError):
            loss.backward(retain_graph=True)
    wrapped(x)


def exception_then_saved(side: Side) -> None:
    model = deep()
    wrapped = built(side, model, APART)
    fails = Fails()
    model[0].weight.register_hook(fails)
    fails.is_on = True
    x, y = side.data(0)
    with contextlib.suppress(ValueError):
        cross(wrapped(x), y).backward()
    wrapped.full_state_dict()


def exception_of_another_models_hook(side: Side) -> None:
    """Two models in one backward; that of the first has ended on all ranks."""
    models = [deep(), deep()]
    first, second = [built(side, m, APART) for m in models]
    fails = Fails()
    models[1][0].weight.register_hook(fails)
    optimizers = [sgd(m) for m in models]
    for fails.is_on in (False, True, False):
        x, y = side.data(0)
        loss = cross(first(x), y) + cross(second(x), y)
        with contextlib.suppress(ValueError):
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()


def error_after_it_was_caught(side: Side) -> None:
    """The parameters are mixed: catching the error once does not help."""
    model = deep()
    wrapped = built(side, model, APART)
    fails = Fails()
    model[0].weight.register_hook(fails)
    x, y = side.data(0)
    optimizer = sgd(model)
    for fails.is_on in (True, False, False):
        with contextlib.suppress(Exception):
            cross(wrapped(x), y).backward()
            optimizer.step()
    wrapped(x)


class Picky(torch.optim.SGD):
    """Refuses gradients of a tensor."""

    picked: Any = None

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p is self.picked and p.grad is not None:
                    raise ValueError("bad gradient")
        return super().step(closure)


def exception_of_an_optimizer(side: Side) -> None:
    model = deep()
    wrapped = built(side, model, APART)
    optimizer = Picky(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.picked = model[0].weight if step == 2 else None
        x, y = side.data(step)
        optimizer.zero_grad()
        cross(wrapped(x), y).backward()
        with contextlib.suppress(ValueError):
            optimizer.step()


def backward_left_out(side: Side) -> Any:
    """A rank has no samples and runs no layer, so no gradient of it is missing."""
    model = deep()
    wrapped = built(side, model, [(0, 1)])
    side.shares = [side.batch, 0]
    optimizer = sgd(model)
    for step in range(3):
        x, y = side.data(step)
        optimizer.zero_grad()
        loss = cross(wrapped(x), y)
        if side.rank == 0:
            loss.backward()
        optimizer.step()
    return side.state(wrapped)


def exception_where_all_layers_are(side: Side) -> Any:
    """The other rank has nothing to step."""
    return skips(side, [(1, 1)], lambda m, hook: m[0].weight.register_hook(hook))


# Hooks of several gradients, and of nodes.


def ignores(*_: Any) -> None:
    pass


def hooked(side: Side, register: Callable[[nn.Module], Any], when: str) -> None:
    model = deep()
    kept = [register(model)] if when == "before building" else []
    wrapped = built(side, model, APART)
    if when == "before the forward":
        kept.append(register(model))
    x, y = side.data(0)
    loss = cross(wrapped(x), y)
    if when == "after the forward":
        kept.append(register(model))
    loss.backward()
    wrapped(x)


def several(model: nn.Module, mode: Any = "all") -> Any:
    held = list(model[0].parameters()) + list(model[2].parameters())  # type: ignore[index]
    return register_multi_grad_hook(held, ignores, mode=mode)


def of_a_node(model: nn.Module, kind: str = "register_hook") -> Any:
    parameter = model[0].weight  # type: ignore[index]
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[operator]
    getattr(node, kind)(ignores)
    return node


def hook_of_all_gradients(side: Side) -> None:
    hooked(side, several, "before the forward")


def hook_of_all_gradients_before(side: Side) -> None:
    hooked(side, several, "before building")


def hook_of_all_gradients_after(side: Side) -> None:
    hooked(side, several, "after the forward")


def hook_of_any_gradient(side: Side) -> None:
    hooked(side, lambda model: several(model, "any"), "before the forward")


def hook_of_a_node(side: Side) -> None:
    hooked(side, of_a_node, "before the forward")


def hook_of_a_node_before(side: Side) -> None:
    hooked(side, of_a_node, "before building")


def hook_of_a_node_after(side: Side) -> None:
    hooked(side, of_a_node, "after the forward")


def hook_before_a_node(side: Side) -> None:
    hooked(side, lambda m: of_a_node(m, "register_prehook"), "before the forward")


def hooks_removed(side: Side) -> Any:
    """Hooks that are gone before the forward."""
    model = deep()
    wrapped = built(side, model, APART)
    several(model).remove()
    node = of_a_node(model)
    handle = node.register_hook(ignores)
    handle.hooks_dict_ref().clear()
    train(side, wrapped, sgd(model))
    return side.state(wrapped)


def hook_of_two_outputs(side: Side) -> Any:
    """Outputs and inputs are the rank's own: autograd calls their hooks."""
    model = deep()
    wrapped = built(side, model, [(0, 2)])
    seen = []
    for step in range(2):
        x, y = side.data(step)
        out = wrapped(x)
        register_multi_grad_hook([out, out * 2], lambda grads: seen.append(len(grads)))
        cross(out, y).backward()
    assert seen == [2, 2]
    return side.grads(model)


# Parameters in losses without an output of their model.


def temperature_alone(side: Side, *, is_varied: bool = False) -> Any:
    model = WithTemperature()
    wrapped = built(side, model, [(0, 2)])
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with parts_of(side, step if is_varied else 0):
            x, y = side.data(step)
            cross(wrapped(x), y).backward()
        with parts_of(side, step + 1 if is_varied else 0):
            x, y = side.data(step)
            cross(x[:, :4] / model.temperature, y).backward()
        optimizer.step()
    return side.state(wrapped)


def temperature_alone_of_other_parts(side: Side) -> None:
    temperature_alone(side, is_varied=True)


def penalty_alone(side: Side) -> Any:
    """Its gradient is the same on all ranks, whatever their parts of the batch."""
    model = deep()
    wrapped = built(side, model, [(0, 2)])
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with parts_of(side, step):
            x, y = side.data(step)
            cross(wrapped(x), y).backward()
        sum(p.square().sum() for p in model.parameters()).backward()
        optimizer.step()
    return side.state(wrapped)


def temperature_in_another_models_loss(side: Side) -> Any:
    """The other model's outputs tell the weights."""
    model, other = WithTemperature(), deep()
    one, two = built(side, model, [(0, 2)]), built(side, other, [(0, 2)])
    optimizers = [sgd(m) for m in (model, other)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with parts_of(side, step):
            x, y = side.data(step)
            cross(one(x), y).backward()
        with parts_of(side, step + 1):
            x, y = side.data(step)
            cross(two(x) / model.temperature, y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return side.state(one), side.state(two)


def temperature_in_two_models_losses(side: Side) -> None:
    model, other = WithTemperature(), deep()
    one, two = built(side, model, [(0, 2)]), built(side, other, [(0, 2)])
    loss = torch.zeros(())
    for step, wrapped in enumerate((one, two)):
        with parts_of(side, step):
            x, y = side.data(0)
            loss = loss + cross(wrapped(x) / model.temperature, y)
    loss.backward()


def part_of_the_module(side: Side, call: Any = None) -> None:
    """A layer that all ranks run is called without the wrapper."""
    model = deep()
    wrapped = built(side, model, [(0, 2)])
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with parts_of(side, step):
            x, y = side.data(step)
            if step % 2 and call is None:
                model[0](x).square().mean().backward()
            elif step % 2:
                wrapped.refresh()
                cross(call(model, x), y).backward()
            else:
                cross(wrapped(x), y).backward()
        optimizer.step()
    wrapped.full_state_dict()


def module_itself(side: Side) -> None:
    part_of_the_module(side, lambda model, x: model(x))


def functional_call(side: Side) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> Any:
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,))

    part_of_the_module(side, call)


ON_RANK_1: Widths = [(1, 1)]


def gradients_of_parameters(side: Side, *, allow_unused: bool = False) -> None:
    """Rank 0 runs no layer with parameters."""
    wrapped = built(side, deep(), ON_RANK_1)
    x, y = side.data(0)
    parameters = list(wrapped.parameters())
    torch.autograd.grad(cross(wrapped(x), y), parameters, allow_unused=allow_unused)


def gradients_of_used_parameters(side: Side) -> None:
    gradients_of_parameters(side, allow_unused=True)


def temperature_before_the_first_forward(side: Side) -> None:
    model = WithTemperature()
    wrapped = built(side, model, [(0, 2)])
    with parts_of(side, 0):
        x, y = side.data(0)
        cross(x[:, :4] / model.temperature, y).backward()
        wrapped(x)


# Conversions.


def converted_to_the_same(side: Side) -> Any:
    model = deep()
    wrapped = built(side, model, APART)
    optimizer = sgd(model)
    for step in range(3):
        x, y = side.data(step)
        optimizer.zero_grad()
        cross(wrapped(x), y).backward()
        optimizer.step()
        for change in (
            lambda m: m.to("cpu"),
            lambda m: m.double(),
            lambda m: m.type(torch.float64),
            lambda m: m.to(memory_format=torch.channels_last),
            lambda m: m.share_memory(),
        ):
            change(inner(side, wrapped))
    return side.state(wrapped)


def converted(side: Side) -> None:
    model = deep()
    wrapped = built(side, model, APART)
    train(side, wrapped, sgd(model), 1)
    model.float()


RIGHT: list[Callable[[Side], Any]] = [
    skipped_on_all_ranks,
    exception_where_all_layers_are,
    backward_left_out,
    hooks_removed,
    hook_of_two_outputs,
    temperature_alone,
    penalty_alone,
    temperature_in_another_models_loss,
    converted_to_the_same,
]


def rank_of_right_uses(rank: int, size: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    for use in RIGHT:
        try:
            got = use(Side(rank, size, [], "even"))
        except Exception as exc:  # noqa: BLE001
            found[use.__name__] = f"{type(exc).__name__}: {exc}"
            break  # the ranks are no longer in step
        found[use.__name__] = worst_of(got, use(Alone()))
    return found


def test_a_backward_gives_what_one_process_gives(ranks: Any) -> None:
    for rank, found in enumerate(ranks(rank_of_right_uses, 2, timeout_s=200)):
        assert len(found) == len(RIGHT), found
        for name, value in found.items():
            assert isinstance(value, float), (rank, name, value)
            assert value < 1e-9, (rank, name, value)


# Refused, each on all ranks.

OF_RANK_0 = (
    "an exception ended the backward of rank 0 (ValueError: bad gradient), but not "
    "that of rank 1"
)
SEVERAL = "register_multi_grad_hook was called with parameter '0.weight'"
NODE = "ignores (line"
UNKNOWN = "the weights of these gradients"
NAMED = "can't be named in torch.autograd.grad"

REFUSED = {
    exception_of_a_gradient_hook: OF_RANK_0,
    exception_of_a_later_hook: OF_RANK_0,
    exception_of_a_module_hook: OF_RANK_0,
    exception_of_a_wide_layer: OF_RANK_0,
    exception_then_another_backward: OF_RANK_0,
    exception_then_saved: OF_RANK_0,
    exception_of_another_models_hook: OF_RANK_0,
    error_after_it_was_caught: OF_RANK_0,
    exception_of_an_optimizer: "one of which did not end (an error?)",
    hook_of_all_gradients: SEVERAL,
    hook_of_all_gradients_before: SEVERAL,
    hook_of_any_gradient: SEVERAL,
    hook_of_a_node: NODE,
    hook_of_a_node_before: NODE,
    hook_of_a_node_after: NODE,
    hook_before_a_node: NODE,
    temperature_alone_of_other_parts: UNKNOWN,
    temperature_in_two_models_losses: "give each rank the same part of both batches",
    part_of_the_module: UNKNOWN,
    module_itself: UNKNOWN,
    functional_call: UNKNOWN,
    temperature_before_the_first_forward: UNKNOWN,
    gradients_of_parameters: NAMED,
    gradients_of_used_parameters: NAMED,
    converted: "full_state_dict(), or refresh()",
}
KINDS = {"StrettoError", "RankDisagreement"}


def rank_of_refused_uses(rank: int, size: int) -> dict[str, tuple[str, str]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for use in REFUSED:
        try:
            use(Side(rank, size, [], "even"))
            found[use.__name__] = ("", "nothing was raised")
        except Exception as exc:  # noqa: BLE001
            found[use.__name__] = (type(exc).__name__, str(exc))
    return found


def test_a_backward_is_refused_on_all_ranks(ranks: Any) -> None:
    found = ranks(rank_of_refused_uses, 2, timeout_s=280, group_s=60)
    for use, words in REFUSED.items():
        for rank, texts in enumerate(found):
            kind, text = texts[use.__name__]
            late = use is error_after_it_was_caught
            assert kind in (KINDS | {"CommTimeout"} if late else KINDS), (
                rank,
                use.__name__,
                text,
            )
            assert words in text, (rank, use.__name__, text)


def rank_of_a_later_hook(rank: int, size: int) -> tuple[str, str]:
    torch.set_default_dtype(torch.float64)
    try:
        hook_of_all_gradients_after(Side(rank, size, [], "even"))
    except Exception as exc:  # noqa: BLE001
        return type(exc).__name__, str(exc)
    return "", "nothing was raised"


def test_a_hook_registered_after_the_forward_ends_the_step(ranks: Any) -> None:
    for kind, text in ranks(rank_of_a_later_hook, 2, group_s=60):
        assert kind in KINDS | {"CommTimeout"}, text
        assert SEVERAL.partition("'")[0] in text
