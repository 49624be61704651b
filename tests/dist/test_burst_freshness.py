"""Reads of a burst model after training in unusual ways are refused, or are right.

Every use runs on two ranks, by a plan without a shared layer and by one where rank 0
runs all layers, so that rank 1 holds nothing that trains.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.burst.executor import BurstParallel
from support.burst_ranks import plan_of
from support.nets import mlp

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.burst_sides import Widths

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

MIXED: Widths = [(0, 1), (0, 2), (1, 1)]
APART: Widths = [(0, 1), (1, 1)]
FIRST: Widths = [(0, 1)]


def net(seed: int = 0) -> nn.Sequential:
    return mlp(6, 8, 7, 4, between=nn.Tanh, seed=seed)


def plan(model: nn.Module, widths: Widths) -> Any:
    example = torch.zeros(2, 6)
    return plan_of(model, example, lambda i: widths[i % len(widths)], 2)


def wrap(model: nn.Module, widths: Widths, **more: Any) -> BurstParallel:
    given = {"example_inputs": (torch.zeros(2, 6),), **more}
    return BurstParallel(model, plan(model, widths), **given)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's samples, the same on both."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(4, 6, generator=draw)
    return x, torch.randint(0, 4, (4,), generator=draw)


def backward(model: nn.Module, step: int = 0) -> None:
    x, y = data(step)
    functional.cross_entropy(model(x), y).backward()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def said(act: Callable[[], Any]) -> str:
    """What was raised, or nothing."""
    try:
        act()
    except Exception as exc:  # noqa: BLE001
        return str(exc)
    return ""


# Each leaves the ranks with values that differ, so that a read must be refused.


def trained_in_evaluation(widths: Widths) -> BurstParallel:
    model = wrap(net(), widths).eval()
    optimizer = sgd(model)
    backward(model)
    optimizer.step()
    return model


def refreshed_before_the_step(widths: Widths) -> BurstParallel:
    model = wrap(net(), widths)
    optimizer = sgd(model)
    backward(model)
    model.refresh()
    optimizer.step()
    return model


def own_layers_frozen(widths: Widths) -> BurstParallel:
    model = wrap(net(), widths)
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(name.startswith("0"))
    optimizer = sgd(model)
    backward(model)
    model.refresh()
    optimizer.step()
    return model


def two_more_steps(widths: Widths) -> BurstParallel:
    model = wrap(net(), widths)
    optimizer = sgd(model)
    backward(model)
    optimizer.step()
    model.refresh()
    optimizer.step()
    optimizer.step()
    return model


def stepped_by_hand_in_evaluation(widths: Widths) -> BurstParallel:
    model = wrap(net(), widths).eval()
    model.refresh()
    backward(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(0.1 * parameter.grad)
    return model


STALE = (
    trained_in_evaluation,
    refreshed_before_the_step,
    own_layers_frozen,
    two_more_steps,
    stepped_by_hand_in_evaluation,
)


def rank_of_stale_reads(_rank: int, _size: int) -> dict[str, str]:
    found = {}
    for widths in (APART, FIRST):
        for use in STALE:
            model = use(widths)
            read = said(model.module.state_dict)
            found[f"{use.__name__} {widths}"] = read
            model.full_state_dict()
            model.module.state_dict()  # is whole now
    return found


def test_values_are_stale_after_any_step(ranks: Any) -> None:
    everyone = ranks(rank_of_stale_reads, 2, timeout_s=120, group_s=60)
    for rank, found in enumerate(everyone):
        for name, text in found.items():
            # By the second plan rank 0 runs all layers.
            wanted = "" if rank == 0 and name.endswith(str(FIRST)) else "refresh()"
            assert (wanted in text) if wanted else not text, (rank, name, text)


def rank_of_frozen_backward(_rank: int, _size: int) -> None:
    """A backward through a frozen model to its input changes nothing."""
    model = wrap(net(), APART).eval().requires_grad_(requires_grad=False)
    x = data(0)[0].requires_grad_()
    model(x).sum().backward()
    model.module.state_dict()


def test_a_frozen_model_stays_current(ranks: Any) -> None:
    ranks(rank_of_frozen_backward, 2, timeout_s=60, group_s=60)


def rank_of_copies(_rank: int, _size: int) -> dict[str, str]:
    found = {}
    for widths in (APART, FIRST):
        student, teacher = wrap(net(), widths), wrap(net(1), widths)
        teacher.requires_grad_(requires_grad=False)
        optimizer = sgd(student)
        backward(student)
        optimizer.step()
        pairs = list(zip(teacher.parameters(), student.parameters(), strict=True))

        @torch.no_grad()
        def change(how: str, pairs: Any = pairs) -> None:
            for mine, theirs in pairs:
                args = (0.5,) if how == "lerp_" else ()
                getattr(mine, how)(theirs, *args)

        for how in ("copy_", "lerp_"):
            found[f"{how} {widths}"] = said(lambda how=how: change(how))
        student.refresh()
        change("copy_")
        state = student.module.state_dict()
        for name, value in teacher.full_state_dict().items():
            assert torch.equal(value, state[name]), name
    return found


def test_a_copy_from_another_burst_model_is_guarded(ranks: Any) -> None:
    everyone = ranks(rank_of_copies, 2, timeout_s=60, group_s=60)
    for rank, found in enumerate(everyone):
        for name, text in found.items():
            if rank == 0 and name.endswith(str(FIRST)):
                assert not text, (rank, name, text)
            else:
                assert "refresh()" in text, (rank, name, text)


def rank_of_applied_plans(_rank: int, _size: int) -> list[str]:
    found = []
    for widths in (MIXED, APART):
        model = wrap(net(), MIXED)
        with model.no_sync():
            backward(model)
        given = plan(net(), widths)
        found.append(said(lambda m=model, p=given: m.apply_plan(p)))
        backward(model, 1)  # the old plan continues
        sgd(model).step()
        model.apply_plan(given)
        backward(model, 2)
    return found


def test_a_plan_waits_for_gradients_of_no_sync(ranks: Any) -> None:
    for found in ranks(rank_of_applied_plans, 2, timeout_s=60, group_s=60):
        assert all("apply_plan was called between" in text for text in found), found


def rank_of_plan_inside_no_sync(_rank: int, _size: int) -> bool:
    model = wrap(net(), MIXED)
    with model.no_sync():
        model.apply_plan(plan(net(), MIXED))
        assert model._parts.backward.sync is not None
        return model._parts.backward.sync.is_on


def test_a_plan_applied_inside_no_sync_sends_nothing(ranks: Any) -> None:
    assert ranks(rank_of_plan_inside_no_sync, 2, timeout_s=60, group_s=60) == [
        False,
        False,
    ]


def rank_of_inference(_rank: int, _size: int) -> None:
    """Evaluation in inference mode comes first, then training continues."""
    for example in (None, (torch.zeros(2, 6),)):
        reference = net()
        burst = wrap(copy.deepcopy(reference), MIXED, example_inputs=example)
        x, y = data(0)
        for step in range(2):
            burst.eval()
            with torch.inference_mode():
                assert torch.allclose(burst(x), reference(x), atol=1e-6), step
            burst.train()
            for each in (burst, reference):
                each.zero_grad()
                functional.cross_entropy(each(x), y).backward()
                sgd(each).step()
        state = burst.full_state_dict()
        for name, value in reference.state_dict().items():
            assert torch.allclose(state[name], value, atol=1e-6), name


def test_evaluation_in_inference_mode_comes_first(ranks: Any) -> None:
    ranks(rank_of_inference, 2, timeout_s=60, group_s=60)


def rank_of_lone_refresh(rank: int, _size: int) -> str:
    model = wrap(net(), MIXED, timeout_s=5.0)
    backward(model)
    sgd(model).step()

    def act() -> None:
        if rank == 0:
            model.full_state_dict()
        backward(model, 1)

    return said(act)


def test_a_refresh_on_one_rank_ends_in_an_error(ranks: Any) -> None:
    first, second = ranks(rank_of_lone_refresh, 2, timeout_s=60, group_s=20)
    assert "refresh" in first
    assert "different calls" in first
    assert "different calls" in second, second
