"""Hooks of all modules that come after the capture change nothing in other modules."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from stretto.burst.checks.hook_use import HookUse
from stretto.burst.checks.later_of_all import LaterHooksOfAllModules
from stretto.burst.graph import capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.errors import StrettoError

X = torch.randn(3, 6)
STATE = {"is_on": False, "calls": 0}
SEEN: list[Any] = []


class Block(nn.Module):
    """A module of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    STATE.update(is_on=False, calls=0)
    yield
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        getattr(modules, f"_global_{kind}_hooks").clear()
    SEEN.clear()


def tried(kind: str, hook: Callable[..., Any]) -> Callable[[], StrettoError | None]:
    """Return what tries a hook that is registered after a capture."""
    model = nn.Sequential(nn.Linear(6, 6), Block(), nn.Linear(6, 2))
    ranks: Any = SimpleNamespace()
    guard: Any = SimpleNamespace(opened=contextlib.nullcontext)
    hooks = HookUse(ranks, lambda _: [])
    graph = capture(model, (X,))
    hooks.note_checked(model, graph.proven)
    of_all = LaterHooksOfAllModules(model, hooks, guard)
    getattr(modules, f"register_module_{kind}")(hook)
    return lambda: of_all(graph, [X])


def doubles(part: Any, _args: Any, output: Any) -> Any:
    return output * 2 if isinstance(part, Block) else None


def doubles_inputs(part: Any, args: Any) -> Any:
    return (args[0] * 2,) if isinstance(part, Block) else None


def doubles_gradients(part: Any, grads: Any, _of_output: Any) -> Any:
    return (grads[0] * 2,) if isinstance(part, Block) else None


def doubles_gradients_of_outputs(part: Any, grads: Any) -> Any:
    return (grads[0] * 2,) if isinstance(part, Block) else None


def writes(part: Any, _args: Any, output: Any) -> None:
    if isinstance(part, Block):
        output.mul_(2)


CHANGE = [
    ("forward_hook", doubles),
    ("forward_pre_hook", doubles_inputs),
    ("full_backward_hook", doubles_gradients),
    ("full_backward_pre_hook", doubles_gradients_of_outputs),
    ("forward_hook", writes),
]


@pytest.mark.parametrize(
    ("kind", "hook"), CHANGE, ids=lambda x: getattr(x, "__name__", x)
)
def test_one_that_changes_something_is_refused_by_its_line(
    kind: str, hook: Callable[..., Any]
) -> None:
    error = tried(kind, hook)()
    line = hook.__code__.co_firstlineno  # type: ignore[attr-defined]
    assert str(error).startswith(f"{__file__}:{line}: the hook {hook.__name__} of all")


LOOK = [
    ("forward_hook", lambda _m, _a, output: SEEN.append(float(output.norm()))),
    ("full_backward_hook", lambda _m, _i, grads: SEEN.append(grads[0].norm())),
    ("forward_hook", lambda _m, _a, o: SEEN.append(o.register_hook(SEEN.append))),
]


@pytest.mark.parametrize(("kind", "hook"), LOOK)
def test_one_that_looks_is_accepted_and_tried_once(
    kind: str, hook: Callable[..., Any]
) -> None:
    look = tried(kind, hook)
    assert look() is None
    calls = len(SEEN)
    assert calls
    assert look() is None
    assert len(SEEN) == calls


def test_one_is_called_for_modules_that_are_no_layers_only() -> None:
    assert tried("forward_hook", lambda part, _a, _o: SEEN.append(type(part)))() is None
    assert set(SEEN) == {Block}


def test_one_that_begins_to_change_something_is_refused() -> None:
    look = tried(
        "forward_hook",
        lambda part, args, output: (
            doubles(part, args, output) if STATE["is_on"] else None
        ),
    )
    assert look() is None
    STATE["is_on"] = True
    assert "returned another value" in str(look())


def doubles_later(part: Any, args: Any, output: Any) -> Any:
    STATE["calls"] += 1
    return doubles(part, args, output) if STATE["calls"] > 1000 else None


def test_one_that_decides_by_what_it_changes_is_refused() -> None:
    assert "changes it in each call" in str(tried("forward_hook", doubles_later)())


def test_a_program_may_remove_one_that_was_refused() -> None:
    look = tried("forward_hook", doubles)
    assert look() is not None
    modules._global_forward_hooks.clear()  # type: ignore[attr-defined]
    assert look() is None


def test_parameters_get_no_gradients_meanwhile() -> None:
    look = tried("forward_hook", lambda *_: None)
    assert look() is None
    held = [p for p in SEEN if isinstance(p, nn.Parameter)]
    assert all(p.grad is None for p in held)
