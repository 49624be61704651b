"""State that forward reads: every change of it is noticed, and nothing else."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import itertools
import logging
import os
import random
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stretto.burst.graph import capture
from stretto.burst.tracing.freezing import (
    MAX_BYTES,
    MAX_ITEMS,
    Freezer,
    may_read_users,
)
from stretto.burst.tracing.reads import Reads
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Slots:
    v: float = 1.0
    __hidden: float = 1.0

    def hide(self, value: float) -> None:
        self.__hidden = value


class Scheduled:
    def __init__(self) -> None:
        self.v = 1.0

    def __call__(self) -> float:
        return self.v


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"v": 1.0}
    for _ in range(depth):
        made = {"inner": made}
    return made


def set_nested(made: dict[str, Any]) -> None:
    while "inner" in made:
        made = made["inner"]
    made["v"] = 2.0


def generator() -> Any:
    yield from range(100)


def ring() -> list[Any]:
    made: list[Any] = [1.0]
    made.append(made)
    return made


class Held:
    def __init__(self, v: Any) -> None:
        self.v = v


VARIABLE = contextvars.ContextVar("variable", default=1.0)


def set_item(index: Any) -> Callable[[Any], None]:
    return lambda value: value.__setitem__(index, 2.0)


def set_v(value: Any) -> None:
    value.v = 2.0


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1.0] * 9, set_item(8)),
    "a long list": (lambda: [1.0] * 5000, set_item(4999)),
    "a list in itself": (ring, set_item(0)),
    "dict": (lambda: {"a": 1.0}, set_item("a")),
    "a deep dict": (lambda: nested(12), set_nested),
    "counter": (lambda: collections.Counter("a"), set_item("a")),
    "deque": (lambda: collections.deque([1.0]), set_item(0)),
    "set": (lambda: {1.0}, lambda s: s.add(2.0)),
    "a dict's list": (lambda: {"a": [1.0]}, lambda d: d["a"].append(1.0)),
    "userdict": (lambda: collections.UserDict(a=1.0), set_item("a")),
    "slots": (Slots, set_v),
    "a private slot": (Slots, lambda s: s.hide(2.0)),
    "namespace": (lambda: types.SimpleNamespace(v=1.0), set_v),
    "an object that is called": (Scheduled, set_v),
    "a bound method": (lambda: Scheduled().__call__, lambda m: set_v(m.__self__)),
    "partial": (lambda: functools.partial(print, [1.0]), lambda p: p.args[0].append(1)),
    "a module elsewhere": (lambda: Held(Held(1.0)), lambda h: set_v(h.v)),
    "numpy": (lambda: np.ones(3), set_item(1)),
    "a long array": (lambda: np.ones(9000), set_item(8999)),
    "a very long array": (lambda: np.ones(MAX_BYTES // 4), lambda a: a.fill(2.0)),
    "an array of objects": (
        lambda: np.array([None, [1.0]], dtype=object),
        lambda a: a[1].append(1),
    ),
    "array": (lambda: array.array("d", [1.0]), set_item(0)),
    "bytearray": (lambda: bytearray(b"a"), lambda b: b.append(3)),
    "random": (lambda: random.Random(5), lambda r: r.random()),
    "RandomState": (lambda: np.random.RandomState(5), lambda r: r.rand()),
    "a NumPy generator": (lambda: np.random.default_rng(5), lambda r: r.random()),
    "a torch generator": (torch.Generator, lambda g: torch.rand(1, generator=g)),
    "count": (itertools.count, next),
    "cycle": (lambda: iter([1.0, 2.0]), next),
    "zip": (lambda: zip([1, 2], [3, 4], strict=True), next),
    "generator": (generator, next),
    "context": (lambda: VARIABLE, lambda c: c.set(2.0)),
    "environment": (lambda: os.environ, lambda e: e.update(STRETTO_NEW="1")),
    "a tensor in an object": (lambda: Held(torch.ones(1)), lambda h: set_v(h)),
    "a function's attribute": (lambda: set_marked(), set_v),
}


def set_marked() -> Callable[[], None]:
    def marked() -> None: ...

    marked.v = 1.0  # type: ignore[attr-defined]
    return marked


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ)
    make, change = CASES[name]
    freeze = Freezer({"v", "_Slots__hidden"}, ())
    value = make()
    before = freeze(value)
    assert freeze(value) == before
    context = contextvars.copy_context()
    try:
        after = context.run(lambda: (change(value), freeze(value))[1])
    finally:
        os.environ.pop("STRETTO_NEW", None)
    assert after != before


QUICK: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "hooks": (collections.OrderedDict, lambda h: h.update({1: print})),
    "a list": (list, lambda items: items.append(1)),
    "a set": (set, lambda items: items.add(1)),
    "a dictionary": (dict, lambda items: items.update(v=1)),
    "a function": (lambda: lambda: None, lambda f: setattr(f, "v", 2.0)),
}


def look_at(held: Any) -> Any:
    return getattr(held, "v", None)


@pytest.mark.parametrize("name", QUICK)
def test_a_value_is_copied_again_only_where_it_may_have_changed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, change = QUICK[name]
    module = Decides(iter(()))
    module.held = value = make()  # type: ignore[assignment]
    reads = Reads(module)
    with reads.noted():
        look_at(module.held)
    watch = reads.watch()
    copied = []
    monkeypatch.setattr(Freezer, "__call__", lambda _, found: copied.append(found))
    assert watch.changed() is None
    assert not copied
    monkeypatch.undo()
    change(value)
    assert watch.changed() == "held"


def test_names_that_no_function_contains_are_not_followed() -> None:
    held = types.SimpleNamespace(v=1.0, step=0)
    freeze = Freezer({"v"}, ())
    before = freeze(held)
    held.step = 1
    assert freeze(held) == before


def test_a_value_without_end_is_compared_as_far_as_it_is_followed() -> None:
    held = [float(i) for i in range(10)]
    many = [[value] for value in range(2 * MAX_ITEMS)]
    freeze = Freezer((), ())
    before = freeze([held, many])
    assert freeze([held, many]) == before
    held[3] = -1.0
    assert freeze([held, many]) != before


class Decides(nn.Module):
    """Skip a layer by something that is not a plain attribute."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        draw = self.source.random if hasattr(self.source, "random") else None
        value = next(self.source) if draw is None else draw()
        return self.two(self.one(x)) if value < 0.3 else self.one(x)


@pytest.mark.parametrize(
    "source",
    [
        random.Random(5),
        np.random.RandomState(1),
        np.random.default_rng(3),
        itertools.count(),
        iter([0.1] * 100),
        (0.1 for _ in range(100)),
    ],
    ids=lambda source: type(source).__name__,
)
def test_a_decision_that_every_call_draws_again_is_refused(source: Any) -> None:
    with pytest.raises(SpecError, match=r"in each call|from call to call"):
        capture(Decides(source), (torch.randn(4, 8),))


def test_a_method_that_is_replaced_is_noticed() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * 2

    graph = capture(Doubles(), (torch.randn(4, 8),))
    assert graph.outdated() is None
    Doubles.forward = lambda self, x: self.linear(x)  # type: ignore[method-assign]
    assert graph.outdated() == (
        "test_a_method_that_is_replaced_is_noticed.<locals>.Doubles.forward"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: logging.getLogger("stretto_test_freezing"),
        random.Random,
        lambda: functools.partial(len, [1]),
    ],
)
@pytest.mark.parametrize("left", [0, 1, 2, 20])
def test_a_state_behind_many_values_stays_equal_to_itself(make, left):
    value = [[[] for _ in range(MAX_ITEMS - left)], make()]
    freeze = Freezer(None, ())
    assert freeze(value) == freeze(value)


def test_a_module_name_may_be_any_object():
    assert may_read_users(["torch"])
