"""Bad input and lost ranks: one clear message on every rank, in bounded time."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.burst.executor import BurstParallel
from stretto.errors import StrettoError

sys.path.insert(0, str(Path(__file__).parent))
from burst_ranks import plan_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 2),
    )


def message(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        function(*args, **kwargs)
    except StrettoError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


EXAMPLE = torch.zeros(2, 4)


def rank_with_bad_input(rank: int, size: int) -> dict[str, tuple[str, str]]:
    def make(model: nn.Module, plan: Any, **options: Any) -> BurstParallel:
        options = {"example_inputs": (EXAMPLE,), **options}
        return BurstParallel(model, plan, **options)

    model = net()
    wide = plan_of(model, EXAMPLE, lambda _i: (0, size), size)
    narrow = plan_of(model, EXAMPLE, lambda i: (0, 1 + i % 2), size)
    larger = dataclasses.replace(wide, gpus=size + 1)
    other = plan_of(net(9), EXAMPLE, lambda _i: (0, 1), size)
    longer = plan_of(
        nn.Sequential(net(), nn.Linear(2, 2)), EXAMPLE, lambda _i: (0, 1), size
    )
    found = {
        "ranks": message(make, net(), larger),
        "sizes": message(make, net(), other),
        "layers": message(make, net(), longer),
        "plans": message(make, net(), wide if rank else narrow),
        "models": message(make, net() if rank else net(9), wide if rank else other),
        "settings": message(make, net(), wide, seed=rank),
        "norms": message(make, net(), wide, batch_norm="global"),
        "buckets": message(make, net(), wide, bucket_bytes=0),
        "lanes": message(make, net(), wide, lanes=0),
    }
    model = make(net(), narrow)
    found["sample"] = message(model, torch.zeros(2, 5))
    found["one rank's sample"] = message(model, torch.zeros(2, 4 + rank))
    found["type"] = message(model, torch.zeros(2, 4, dtype=torch.float64))
    found["empty"] = message(model, torch.zeros(0, 4))
    model.train(rank == 0)
    found["modes"] = message(model, torch.zeros(2, 4))
    model.train()
    with torch.set_grad_enabled(rank == 0):
        found["gradients"] = message(model, torch.zeros(2, 4))
    found["new plan"] = message(model.apply_plan, other)
    found["steps"] = message(model.measure, 0)
    found["norm type"] = message(model.clip_grad_norm_, 1.0, 0.0)
    # What was refused has changed nothing.
    assert model.plan is narrow
    model(torch.ones(3, 4)).sum().backward()
    return found


def test_what_can_not_be_carried_out_is_refused_on_every_rank(ranks: Any) -> None:
    everyone = ranks(rank_with_bad_input, 2)
    wanted = {
        "ranks": ("PlanMismatch", "the plan is for 3 ranks, here are 2"),
        "sizes": ("PlanMismatch", "sizes or edges differ"),
        "layers": ("PlanMismatch", "layer '0.0' is not in it"),
        "plans": ("RankDisagreement", "ranks hold different plans"),
        "models": ("RankDisagreement", "ranks hold different models"),
        "settings": ("RankDisagreement", "seed=1"),
        "norms": ("SpecError", "batch_norm must be one of sync, local"),
        "buckets": ("SpecError", "bucket_bytes must be >= 1, got 0"),
        "lanes": ("SpecError", "lanes must be >= 1, got 0"),
        "sample": ("SpecError", "must have shape (4,)"),
        "type": ("SpecError", "got (4,) and torch.float64"),
        "empty": ("SpecError", "no sample on any rank"),
        "modes": ("RankDisagreement", "rank 0 came with train mode"),
        "gradients": ("RankDisagreement", "rank 0 came with enabled gradients"),
        "new plan": ("PlanMismatch", "sizes or edges differ"),
        "steps": ("SpecError", "steps must be >= 1, got 0"),
        "norm type": ("SpecError", "norm_type must be > 0"),
    }
    for found in everyone:
        for case, (kind, words) in wanted.items():
            assert found[case][0] == kind, (case, found[case])
            assert words in found[case][1], (case, found[case])
    assert everyone[0]["one rank's sample"][0] == "RankDisagreement"
    assert "rank 1 passed" in everyone[0]["one rank's sample"][1]
    assert everyone[1]["one rank's sample"][0] == "SpecError"


def rank_of_a_death(rank: int, size: int, when: str) -> tuple[str, str, float]:
    model = net(64)
    plan = plan_of(model, EXAMPLE, lambda i: [(0, size), (1, 2), (0, 1)][i], size)
    burst = BurstParallel(model, plan, example_inputs=(EXAMPLE,))
    victim = 2
    for step in range(6):
        began_s = time.perf_counter()
        try:
            if rank == victim and step == 3:
                if when == "forward":
                    # After the shares were exchanged: others wait for its samples.
                    model[0].register_forward_pre_hook(lambda *_: os._exit(9))
                else:
                    model[2].weight.register_hook(lambda _grad: os._exit(9))
            burst(torch.randn(3, 4)).sum().backward()
        except Exception as exc:  # noqa: BLE001
            took_s = time.perf_counter() - began_s
            same = message(burst, torch.randn(3, 4)) == (type(exc).__name__, str(exc))
            return type(exc).__name__, str(exc) if same else "another error", took_s
    return "", "", 0.0


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_lost_between_layers_is_named_by_every_other(
    ranks: Any, when: str
) -> None:
    found = ranks(rank_of_a_death, 4, when, errors=True, group_s=600)
    assert found[2] is None
    for rank in (0, 1, 3):
        kind, text, took_s = found[rank]
        assert kind == "CommTimeout", text
        assert text.startswith(f"rank {rank}: the ")
        assert "rank 2 is gone" in text
        assert took_s < 30
    # The rank that waited for the lost one's samples or gradients says of which layer.
    assert any("the redistribution of layer " in found[rank][1] for rank in (0, 1, 3))


def rank_that_stalls(rank: int, size: int) -> tuple[str, str]:
    model = net()
    plan = plan_of(model, EXAMPLE, lambda i: (0, 1 + i % 2), size)
    burst = BurstParallel(model, plan, example_inputs=(EXAMPLE,), timeout_s=3)
    burst(torch.randn(4, 4)).sum().backward()
    if rank == 1:
        time.sleep(14)
        return "", ""
    return message(lambda: burst(torch.randn(4, 4)).sum().backward())


def test_a_wait_ends_at_its_timeout_and_names_who_is_stuck(ranks: Any) -> None:
    kind, text = ranks(rank_that_stalls, 2, group_s=600)[0]
    assert kind == "CommTimeout"
    assert "within 3 s" in text
    assert "rank 1 is gone or stuck" in text
