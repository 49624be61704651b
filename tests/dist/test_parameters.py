"""Parameters that DDP ignores, delays, shares, or finds frozen, against DDP."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import variable_names
from stretto.errors import PlanMismatch
from stretto.runtime import DistributedDataParallel
from stretto.tune import TuneOptions
from stretto.tune.forced import FORCED
from stretto.tune.initial_profile import deferred_plan
from support.checks import Lines, differing_steps

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

TorchDDP = nn.parallel.DistributedDataParallel

STEPS = 50
TUNE = TuneOptions(steps=10, lost_ratio=100.0, watch=False, plan_cache=False)


class Net(nn.Module):
    """A tied layer, a frozen one, and some that cases ignore or delay."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.own = nn.Linear(8, 8)
        self.shared = self.first
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.again(torch.tanh(self.first(x))))
        x = torch.tanh(self.own(self.frozen(x)))
        return self.last(self.shared(x))


def plain(kind: Any, **more: Any) -> Any:
    return kind(net(), **more)


def ignoring(kind: Any, **more: Any) -> Any:
    module = net()
    names = ["own.weight", "own.bias", "first.weight"]
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, names)
    return kind(module, **more)


def delaying(kind: Any, **more: Any) -> Any:
    module = net()
    return kind(
        module,
        delay_all_reduce_named_params=[("own.weight", module.own.weight)],
        param_to_hook_all_reduce=module.first.bias,
        **more,
    )


def skipping(kind: Any, **more: Any) -> Any:
    return kind(
        net(), find_unused_parameters=True, skip_all_reduce_unused_params=True, **more
    )


CASES = {
    "plain": plain,
    "views": lambda kind, **more: plain(kind, gradient_as_bucket_view=True, **more),
    "ignoring": ignoring,
    "delaying": delaying,
    "skipping": skipping,
}


def net() -> Net:
    torch.manual_seed(6)
    return Net()


def train(model: Any, rank: int, steps: int, frozen: dict[int, str]) -> list[Any]:
    """Gradients of every step; ``frozen`` says which layer is frozen from when."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(steps):
        if step in frozen:
            for name, layer in model.module.named_children():
                if name not in ("frozen", "shared", "again", "first"):
                    layer.requires_grad_(name != frozen[step])
            model.module.frozen.requires_grad_(frozen[step] == "thaw")
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        seen.append(
            [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        )
        optimizer.step()
    return seen


def rank_trains_all_cases(rank: int, size: int) -> dict[str, Any]:
    lines = Lines(logging.WARNING)
    found = {}
    for name, make in CASES.items():
        expected = train(make(TorchDDP), rank, STEPS, {})
        settled: list[Any] = []
        lines.lines.clear()
        auto = make(stretto.DDP, tune=TUNE, on_settled=settled.append)
        found[name] = {
            "auto": differing_steps(train(auto, rank, STEPS, {}), expected),
            "settled": len(settled),
            "warnings": [line for line in lines.lines if "DDP's rule is kept" in line],
        }
        if name in ("skipping", "delaying"):
            try:
                make(DistributedDataParallel, plan=deferred_plan(auto))
            except PlanMismatch as exc:
                found[name]["refused"] = str(exc)
            continue
        plan = deferred_plan(auto)
        explicit = make(DistributedDataParallel, plan=plan)
        steps = differing_steps(train(explicit, rank, 6, {}), expected[:6])
        found[name]["explicit"] = steps
        found[name]["planned"] = sorted(t for b in plan.buckets for t in b.tensors)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["", FORCED])
def test_tuning_serves_whatever_parameters_ddp_reduces(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setenv(variable_names.TUNE_SCHEDULE, schedule)
    all_names = sorted(n for n, p in net().named_parameters() if p.requires_grad)
    # The tied weight is ignored under its first name only, so DDP reduces it.
    reduced = {
        "plain": all_names,
        "views": all_names,
        "ignoring": sorted(
            {*all_names, "again.weight"} - {"own.weight", "own.bias", "first.weight"}
        ),
    }
    found_by_rank = ranks(rank_trains_all_cases, 2, timeout_s=200, group_s=120.0)
    for found in found_by_rank:
        for name, names in reduced.items():
            one = found[name]
            assert one["auto"] == [], name
            assert one["explicit"] == [], name
            # Without a schedule, a busy machine's tuning may take more steps.
            assert one["settled"] == 1 or not schedule, name
            assert one["planned"] == names
        for name, words in {
            "skipping": "skip_all_reduce_unused_params=True",
            "delaying": "delay_all_reduce_named_params",
        }.items():
            one = found[name]
            # DDP does not wait for what it delays, so not even its own runs are equal.
            assert one["auto"] == [] or name == "delaying"
            assert one["settled"] == 0, name
            assert words in one["refused"]
    for name, words in {"skipping": "skip_all", "delaying": "delay_all"}.items():
        (line,) = found_by_rank[0][name]["warnings"]
        assert words in line
        assert found_by_rank[1][name]["warnings"] == []


def rank_freezes(rank: int, size: int) -> dict[str, list[int]]:
    found = {}
    # Within the profiled steps, the search, and after it.
    frozen = {4: "own", 9: "thaw", 14: "last", 30: "own", 44: "none"}
    for name, settings in {
        "unused": {"find_unused_parameters": True},
        "views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    }.items():
        expected = train(TorchDDP(net(), **settings), rank, STEPS, frozen)
        model = stretto.DDP(net(), tune=TUNE, **settings)
        found[name] = differing_steps(train(model, rank, STEPS, frozen), expected)
    return found


@pytest.mark.filterwarnings("ignore")
def test_layers_frozen_and_thawed_while_tuning_are_reduced_as_by_ddp(
    ranks: Any,
) -> None:
    for found in ranks(rank_freezes, 2, timeout_s=200, group_s=120.0):
        assert found == {"unused": [], "views": []}
