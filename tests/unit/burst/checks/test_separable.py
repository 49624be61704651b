"""Optimizers that read several parameters together are distinguished from others."""

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


def by_own_values(_own: Any, _group: Any, p: Any, _held: Any) -> Any:
    """Skip a parameter whose own gradient is rare."""
    is_usual = bool(p.grad.isfinite().all()) and 1e-8 < float(p.grad.norm()) < 1e4
    return float(is_usual)


def by_factorization(own: Any, group: Any, p: Any, held: Any) -> Any:
    """Raise an error for a gradient that is not finite."""
    if p.dim() < 2:
        return 1.0
    values, vectors = torch.linalg.eigh(p.grad @ p.grad.T)
    return (vectors @ vectors.T).sum() + values.sum() * 0


def total_norm(held: Any) -> float:
    return float(torch.stack([q.grad.norm() for q in held]).norm())


def if_all_are_finite(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    return float(all(bool(q.grad.isfinite().all()) for q in held))


def if_none_is_nan(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    return float(not any(bool(q.grad.isnan().any()) for q in held))


def if_none_is_infinite(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    return float(not any(bool(q.grad.isinf().any()) for q in held))


def if_the_norm_is_finite(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    return float(torch.tensor(total_norm(held)).isfinite())


def if_most_is_finite(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    bad = sum(int((~q.grad.isfinite()).sum()) for q in held)
    return float(bad < 0.2 * sum(q.numel() for q in held))


def if_below(limit: float) -> Any:
    def rule(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
        return float(total_norm(held) <= limit)

    return rule


def if_above(limit: float) -> Any:
    def rule(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
        return float(total_norm(held) >= limit)

    return rule


def by_largest(limit: float) -> Any:
    def rule(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
        return 1.0 if max(float(q.grad.abs().max()) for q in held) < limit else 0.5

    return rule


def if_sum_is_positive(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    return float(sum(float(q.grad.sum()) for q in held) > 0)


def if_none_is_zero(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    return float(all(bool(q.grad.any()) for q in held))


def by_weights(limit: float) -> Any:
    def rule(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
        return 0.5 if torch.stack([q.norm() for q in held]).norm() > limit else 1.0

    return rule


def if_smallest_weights(_own: Any, _group: Any, _p: Any, held: Any) -> Any:
    return 0.5 if min(float(q.norm()) for q in held) < 1e-4 else 1.0


SEPARATE = (alone, orthogonal, with_state, by_own_values, by_factorization)
TOGETHER = (by_global_norm, by_a_high_limit, by_distance, by_first_size)
RARE = {
    "all finite": if_all_are_finite,
    "no nan": if_none_is_nan,
    "no infinity": if_none_is_infinite,
    "finite norm": if_the_norm_is_finite,
    "most finite": if_most_is_finite,
    "sum": if_sum_is_positive,
    "zero": if_none_is_zero,
    "smallest weights": if_smallest_weights,
    **{f"below {v:g}": if_below(v) for v in (0.1, 1.0, 10.0, 1e2, 1e4, 1e7)},
    **{f"above {v:g}": if_above(v) for v in (1e-9, 1e-5, 1e-2, 1.0, 1e2)},
    **{f"largest {v:g}": by_largest(v) for v in (1.0, 1e2, 1e3, 1e6)},
    **{f"weights {v:g}": by_weights(v) for v in (0.1, 10.0, 1e3)},
}
"""Decisions that change nothing in usual steps."""


@pytest.mark.parametrize("rule", SEPARATE)
def test_an_optimizer_of_separate_parameters_is_found(rule: Any) -> None:
    optimizer = Own(parameters(), rule)
    assert why_together(optimizer) is None
    assert not optimizer.state


@pytest.mark.parametrize("rule", TOGETHER)
@pytest.mark.parametrize("rate", [0.1, 1e-6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_optimizer_that_reads_together_is_found(
    rule: Any, rate: float, dtype: torch.dtype
) -> None:
    held = [nn.Parameter(p.to(dtype)) for p in parameters()]
    found = why_together(Own(held, rule, lr=rate))
    assert found is not None
    assert "Own reads the gradients of several parameters together" in found


@pytest.mark.parametrize("rule", RARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_decision_over_all_gradients_by_rare_values_is_found(
    rule: str, dtype: torch.dtype
) -> None:
    held = [nn.Parameter(p.to(dtype)) for p in parameters()]
    found = why_together(Own(held, RARE[rule]))
    assert found is not None
    assert "Own reads the gradients of several parameters together" in found


@pytest.mark.parametrize("kind", [1, 2])
def test_a_decision_by_one_kind_of_parameters_is_found(kind: int) -> None:
    def rule(own: Any, _group: Any, _p: Any, _held: Any) -> Any:
        every = (q for group in own.param_groups for q in group["params"])
        some = [q.grad for q in every if q.grad is not None and q.dim() == kind]
        return float(all(bool(grad.isfinite().all()) for grad in some))

    held = parameters()
    groups = [{"params": held[i : i + 2]} for i in (0, 2, 4)]
    assert "Own reads the gradients" in str(why_together(Own(groups, rule)))


class Restoring(torch.optim.SGD):
    """Restores all parameters, also those without a gradient, after one not finite."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in every):
            return super().step(closure)
        with torch.no_grad():
            for p in every:
                p.zero_()
        return None


def test_an_optimizer_that_rarely_writes_to_all_parameters_is_found() -> None:
    held = [nn.Parameter(torch.ones(3, 4)) for _ in range(9)]
    assert "Restoring reads the gradients" in str(why_together(Restoring(held, lr=0.1)))


class Guarded(torch.optim.SGD):
    """Takes no step if a gradient is not finite."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        every = (p for group in self.param_groups for p in group["params"])
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in every):
            super().step(closure)


def test_a_guard_around_a_known_optimizer_is_found() -> None:
    found = why_together(Guarded(parameters(), lr=0.1, momentum=0.9))
    assert "Guarded reads the gradients" in str(found)


VARIANTS = [
    ("ASGD", {}),
    ("Adadelta", {"foreach": True}),
    ("Adafactor", {}),
    ("Adagrad", {"foreach": False}),
    ("Adagrad", {"fused": True}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"fused": True}),
    ("Adam", {"foreach": True, "weight_decay": 0.1}),
    ("Adam", {"foreach": False, "maximize": True}),
    ("AdamW", {"fused": True}),
    ("Adamax", {"foreach": True}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("RAdam", {"foreach": True}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "foreach": True}),
    ("Rprop", {"foreach": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"fused": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_classes_of_pytorch_pass_a_trial(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    base = getattr(torch.optim, name)
    kind: Any = type(f"Own{name}", (base,), {"__module__": __name__})
    held = [nn.Parameter(p.to(dtype)) for p in parameters()]
    groups = [{"params": held[:3]}, {"params": held[3:], "lr": 0.05}]
    assert why_together(kind(groups, lr=0.01, **options)) is None


def test_muon_passes_a_trial() -> None:
    kind: Any = type("OwnMuon", (torch.optim.Muon,), {"__module__": __name__})
    held = [p for p in parameters() if p.dim() == 2]
    assert why_together(kind(held, lr=0.01)) is None


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


class ByLoss(torch.optim.Optimizer):
    """Steps in proportion to the loss, of a closure or passed."""

    def __init__(self, params: Any, *, is_used: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.is_used = is_used

    @torch.no_grad()
    def step(self, closure: Any = None, loss: Any = 1.0) -> Any:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = float(loss) if self.is_used else 1.0
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= 0.1 * factor * p.grad
        return loss


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((lambda: torch.ones(()),), {}),
        ((), {"closure": lambda: torch.ones(())}),
        ((None, 2.0), {}),
        ((), {"loss": torch.ones(())}),
    ],
)
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("is_used", [True, False])
def test_a_step_that_reads_a_rank_s_loss_is_found(
    args: Any, kwargs: Any, count: int, is_used: bool
) -> None:
    optimizer = ByLoss(parameters()[:count], is_used=is_used)
    assert why_together(optimizer, (optimizer,)) is None
    found = why_together(optimizer, (optimizer, *args), kwargs)
    assert ("reads the loss" in str(found)) == is_used


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
