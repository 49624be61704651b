"""Hooks that no capture has checked may look, and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stretto.burst.checks.later_hooks import LaterHook, ObservedHook
from stretto.burst.graph import check_hooks
from stretto.burst.hooks import count_registered
from stretto.errors import SpecError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

KEPT: list[Any] = []


def looks(_part: Any, _args: Any, output: Tensor) -> None:
    KEPT.append(output.detach().norm())
    output.retain_grad()


def looks_at_gradients(_part: Any, _args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: KEPT.append(grad.norm()))


def returns_the_output(_part: Any, _args: Any, output: Tensor) -> Tensor:
    return output


def scales(_part: Any, _args: Any, output: Tensor) -> Tensor:
    return output / len(output)


def returns_the_input(_part: Any, args: Any, _output: Tensor) -> Tensor:
    found: Tensor = args[0]
    return found


def writes(_part: Any, _args: Any, output: Tensor) -> None:
    with torch.no_grad():
        output.mul_(2)


def writes_unseen(_part: Any, _args: Any, output: Tensor) -> None:
    output.data.mul_(2)


def scales_gradients(_part: Any, _args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: grad / grad.norm())


def writes_gradients(_part: Any, _args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: KEPT.append(grad.mul_(2)))


def hooks_a_node(_part: Any, _args: Any, output: Tensor) -> None:
    node: Any = output.grad_fn
    node.register_hook(lambda grads, _: (grads[0] / grads[0].norm(), *grads[1:]))


def returns_the_arguments(_part: Any, args: Any) -> Any:
    return (*args,)


def changes_the_arguments(_part: Any, args: Any) -> Any:
    return args[0] * 2


def returns_the_gradients(_part: Any, grads: Any, _of_output: Any) -> Any:
    return (*grads,)


def changes_the_gradients(_part: Any, grads: Any, _of_output: Any) -> Any:
    return (grads[0] * 2,)


def changes_the_outputs_gradients(_part: Any, grads: Any) -> Any:
    return (grads[0] * 2,)


def train(kind: str, hook: Callable[..., Any]) -> Tensor:
    """Return a parameter's gradient behind a layer with a hook that came later."""
    count_registered()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    layer = model[1]
    getattr(layer, f"register_{kind}")(hook)
    name = f"_{kind}s".replace("full_", "")
    held = getattr(layer, name)
    later = LaterHook(hook, f"the hook {hook.__name__}")
    for number in held:
        held[number] = ObservedHook(hook, name, lambda *_: None, later)
    model(torch.ones(4, 3)).square().sum().backward()
    grad = model[0].weight.grad  # type: ignore[union-attr]
    assert isinstance(grad, torch.Tensor)
    return grad


LOOK = [
    ("forward_hook", looks),
    ("forward_hook", looks_at_gradients),
    ("forward_hook", returns_the_output),
    ("forward_pre_hook", returns_the_arguments),
    ("full_backward_hook", returns_the_gradients),
]

CHANGE = [
    ("forward_hook", scales, "returned another value"),
    ("forward_hook", returns_the_input, "returned another value"),
    ("forward_hook", writes, "wrote into a tensor"),
    ("forward_hook", writes_unseen, "wrote into a tensor"),
    ("forward_hook", scales_gradients, "changed the gradient of a tensor"),
    ("forward_hook", writes_gradients, "changed the gradient of a tensor"),
    ("forward_hook", hooks_a_node, "registered a hook of an autograd node"),
    ("forward_pre_hook", changes_the_arguments, "returned another value"),
    ("full_backward_hook", changes_the_gradients, "returned another value"),
    ("full_backward_pre_hook", changes_the_outputs_gradients, "returned another"),
]


@pytest.mark.parametrize(
    ("kind", "hook"), LOOK, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_later_hook_that_looks_is_called(kind: str, hook: Callable[..., Any]) -> None:
    torch.testing.assert_close(
        train(kind, hook), train("forward_hook", lambda *_: None), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("kind", "hook", "words"), CHANGE, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_later_hook_that_changes_something_is_refused_by_its_line(
    kind: str, hook: Callable[..., Any], words: str
) -> None:
    line = f"{__file__}:{hook.__code__.co_firstlineno}: the hook {hook.__name__} was "  # type: ignore[attr-defined]
    with pytest.raises(StrettoError, match=words) as found:
        train(kind, hook)
    assert str(found.value).startswith(line)


def hooked(kind: str, hook: Callable[..., Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    getattr(model, f"register_{kind}")(hook)
    return model


def counts(_part: Any, _args: Any, output: Tensor) -> Tensor:
    KEPT.append(0)
    return output * len(KEPT)


MIX = [
    ("forward_hook", scales, "mixes samples"),
    ("forward_hook", lambda _part, _args, out: out - out.mean(0), "'mean' in it"),
    ("forward_pre_hook", lambda _part, args: args[0] - args[0].mean(0), "'mean' in it"),
    ("forward_hook", counts, "changes"),
]


@pytest.mark.parametrize(("kind", "hook", "words"), MIX)
def test_a_hook_of_the_whole_model_that_mixes_samples_is_refused(
    kind: str, hook: Callable[..., Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        check_hooks(hooked(kind, hook), (torch.ones(2, 3),), {})


def test_a_hook_of_the_whole_model_may_change_each_sample() -> None:
    model = hooked("forward_hook", lambda _part, _args, out: out * 2)
    check_hooks(model, (torch.ones(2, 3),), {})
