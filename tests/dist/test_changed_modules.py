"""Modules whose tree changes after they were wrapped: DDP's Reducer does not notice."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import prune

import stretto

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

TorchDDP = nn.parallel.DistributedDataParallel
STEPS = 34


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 6)
        self.last = nn.Linear(6, 4)
        self.aside = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        out = self.last(h)
        return out + self.aside(x) if hasattr(self, "aside") else out


def renamed_by_pruning(net: Net) -> None:
    prune.random_unstructured(net.first, "weight", amount=0.3)


def pruned_and_back(net: Net) -> None:
    prune.random_unstructured(net.second, "weight", amount=0.3)
    prune.remove(net.second, "weight")


def removed(net: Net) -> None:
    if hasattr(net, "aside"):
        del net.aside


def reordered(net: Net) -> None:
    rows = list(net._modules.items())[::-1]
    net._modules.clear()
    net._modules.update(rows)


def added(net: Net) -> None:
    net.more = nn.Linear(3, 3)


def moved(net: Net) -> None:
    first = net.first
    del net.first
    net.first = first


def frozen_as_integers(net: Net) -> None:
    net.aside.requires_grad_(requires_grad=False)
    for parameter in net.aside.parameters():
        parameter.data = (50 * parameter.data).round().to(torch.int8)
    weight, bias = net.aside.weight, net.aside.bias
    net.aside.forward = lambda x: x @ (weight / 50).t() + bias / 50  # type: ignore[method-assign]


def frozen_and_emptied(net: Net) -> None:
    """Free the memory of a module that is not used any more."""
    net.aside.requires_grad_(requires_grad=False)
    for parameter in net.aside.parameters():
        parameter.data = torch.empty(0)
    net.aside.forward = lambda x: x[:, :4]  # type: ignore[method-assign]


CHANGES: list[tuple[Callable[[Net], None], bool]] = [
    (renamed_by_pruning, False),
    (pruned_and_back, True),
    (removed, True),
    (reordered, False),
    (added, False),
    (moved, False),
    (frozen_as_integers, True),
    (frozen_and_emptied, True),
]


def losses(rank: int, kind: Any, change: Any, at: int, unused: bool) -> list[float]:
    net = Net()
    model = kind(net, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(rank)
    found = []
    for step in range(STEPS):
        if step == at:
            torch.manual_seed(step)
            change(net)
        optimizer.zero_grad()
        loss = model(torch.randn(5, 8, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def changes(rank: int, size: int) -> dict[str, bool]:
    os.environ["STRETTO_TUNE_SCHEDULE"] = "forced"
    os.environ["STRETTO_PLAN_CACHE"] = "off"
    found = {}
    for change, unused in CHANGES:
        for at in (1, 4, 9, 16):
            ours = losses(rank, stretto.DistributedDataParallel, change, at, unused)
            theirs = losses(rank, TorchDDP, change, at, unused)
            found[f"{change.__name__} at {at}"] = ours == theirs
    return found


def test_a_module_that_changes_after_wrapping_trains_as_with_ddp(ranks: Any) -> None:
    for found in ranks(changes, 2, timeout_s=200.0):
        assert len(found) == 4 * len(CHANGES)
        assert [name for name, same in found.items() if not same] == []


def hooked(rank: int, size: int, at: int) -> tuple[bool, int]:
    """Register a hook before step ``at``; return whether losses are DDP's."""
    os.environ["STRETTO_TUNE_SCHEDULE"] = "forced"
    os.environ["STRETTO_PLAN_CACHE"] = "off"
    found = []
    buckets: list[int] = []

    def counted(state, bucket):  # type: ignore[no-untyped-def]
        buckets.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    for kind in (stretto.DistributedDataParallel, TorchDDP):
        net = Net()
        model = kind(net)
        draw = torch.Generator().manual_seed(rank)
        rows = []
        for step in range(STEPS):
            if step == at:
                model.register_comm_hook(None, counted)
            model.zero_grad()
            loss = model(torch.randn(5, 8, generator=draw)).square().mean()
            loss.backward()
            rows.append(sum(float(p.grad.sum()) for p in model.parameters()))
        found.append(rows)
    return found[0] == found[1], max(buckets)


@pytest.mark.parametrize("at", [0, 3, 12, 30])
def test_a_hook_gets_ddp_s_buckets_whenever_it_is_registered(
    ranks: Any, at: int
) -> None:
    for same, last_bucket in ranks(hooked, 2, at, timeout_s=60.0):
        assert same
        assert last_bucket == 0  # DDP has one bucket here
