"""Optimizers that read several parameters together are told from others."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from stretto.burst.checks.separable import why_together

if TYPE_CHECKING:
    from collections.abc import Callable


def parameters() -> list[nn.Parameter]:
    shapes = [(3, 4), (4,), (4, 5), (5,), (5, 2), (2,)]
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


class Own(torch.optim.Optimizer):
    """Multiplies each gradient by a factor that ``rule`` computes."""

    def __init__(self, params: Any, rule: Any, **more: Any) -> None:
        super().__init__(params, {"lr": 0.1, "d": 1e-3, **more})
        self.rule = rule
        self.kept: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                p -= group["lr"] * self.rule(self, group, p, held) * p.grad


def alone(_own: Any, _group: Any, p: Any, _held: Any) -> Any:
    return p.norm() / p.grad.norm()


def orthogonal(_own: Any, _group: Any, p: Any, _held: Any) -> Any:
    if p.dim() < 2:
        return 1.0
    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
    return u @ v


def with_state(own: Any, _group: Any, p: Any, _held: Any) -> Any:
    own.state[p]["mean"] = own.state[p].get("mean", 0) + p.grad
    return own.state[p]["mean"]


def by_global_norm(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    total = torch.stack([q.grad.norm() for q in held]).norm()
    return 1 / max(1.0, float(total))


def by_a_high_limit(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    total = torch.stack([q.grad.norm() for q in held]).norm()
    return 1 / max(1.0, float(total) / 100)


def by_distance(own: Any, group: Any, p: Any, held: Any) -> Any:
    """An estimate of the distance, as D-Adaptation makes."""
    if p is held[0]:
        for q in held:
            own.state[q].setdefault("start", q.clone())
        there = sum(float(((own.state[q]["start"] - q) * q.grad).sum()) for q in held)
        size = sum(float(q.grad.abs().sum()) for q in held)
        group["d"] = max(group["d"], there / size)
    return group["d"]


def by_first_size(own: Any, _group: Any, p: Any, _held: Any) -> Any:
    """Kept in an attribute, from whatever parameter comes first."""
    if not own.kept:
        own.kept.append(p.grad.norm())
    return 1 / own.kept[0]


def silent(_own: Any, _group: Any, _p: Any, _held: Any) -> Any:
    return 0.0


SEPARATE = (alone, orthogonal, with_state)
TOGETHER = (by_global_norm, by_a_high_limit, by_distance, by_first_size)


@pytest.mark.parametrize("rule", SEPARATE)
def test_an_optimizer_of_separate_parameters_is_found(rule: Any) -> None:
    optimizer = Own(parameters(), rule)
    assert why_together(optimizer) is None
    assert not optimizer.state


@pytest.mark.parametrize("rule", TOGETHER)
@pytest.mark.parametrize("rate", [0.1, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_optimizer_that_reads_together_is_found(
    rule: Any, rate: float, dtype: torch.dtype
) -> None:
    held = [nn.Parameter(p.to(dtype)) for p in parameters()]
    found = why_together(Own(held, rule, lr=rate))
    assert found is not None
    assert "Own reads the gradients of several parameters together" in found


def test_a_trial_changes_nothing() -> None:
    held = parameters()
    optimizer = Own(held, by_distance)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])  # noqa: NPY002
    why_together(optimizer, (optimizer, lambda: calls.append("closure")))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()  # noqa: NPY002
    assert not calls
    assert not optimizer.state
    assert optimizer.param_groups[0]["d"] == 1e-3
    assert all(p.grad is None and bool((p == 1).all()) for p in held)


class Around(torch.optim.Optimizer):
    """Wraps an optimizer, and does not initialize its own base class."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups = base.param_groups
        self.state = base.state
        self.defaults = base.defaults

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.base.step(closure)


@pytest.mark.parametrize(
    ("make", "is_separate"),
    [
        (lambda: torch.optim.SGD(parameters(), lr=0.1, momentum=0.9), True),
        (lambda: Own(parameters(), alone), True),
        (lambda: Own(parameters(), by_global_norm), False),
    ],
)
def test_a_wrapper_is_tried_with_what_it_wraps(
    make: Callable[[], Any], is_separate: bool
) -> None:
    assert (why_together(Around(make())) is None) == is_separate


def test_an_optimizer_that_can_not_be_tried_is_refused() -> None:
    found = why_together(Own(parameters(), silent))
    assert found is not None
    assert "changed none of some copied parameters" in found
    optimizer = Own(parameters(), alone)
    optimizer.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    found = why_together(optimizer)
    assert found is not None
    assert "could not be tried" in found


def test_known_and_single_optimizers_are_not_tried() -> None:
    assert why_together(torch.optim.Adam(parameters())) is None
    assert why_together(Own(parameters()[:1], by_global_norm)) is None
    assert "LBFGS" in str(why_together(torch.optim.LBFGS(parameters())))


def test_a_state_from_a_file_is_tried_too() -> None:
    held = parameters()
    optimizer = Own(held, with_state)
    for p in held:
        optimizer.state[p]["mean"] = torch.full_like(p, 2.0)
    assert why_together(optimizer) is None
    assert all(bool((optimizer.state[p]["mean"] == 2).all()) for p in held)
