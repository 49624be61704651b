"""``plan="auto"`` on a device, against DDP."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from support.checks import Lines
from support.nets import mlp

DEVICE = torch.device("cuda", 0)
TorchDDP = nn.parallel.DistributedDataParallel
STEPS, LIMIT = 120, 1600


def net() -> nn.Module:
    return mlp(64, 600, 600, 4, seed=2).to(DEVICE)


def train(
    model: nn.Module, rank: int, steps: int, settled: list[Any] | None = None
) -> list[float]:
    """Losses of some steps, and of more until tuning has ``settled`` on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps if settled is None else LIMIT):
        if settled is not None and step >= steps and step % 20 == 0:
            done = torch.tensor(len(settled), device=DEVICE)
            dist.all_reduce(done, dist.ReduceOp.MIN)
            if done:
                break
        generator = torch.Generator().manual_seed(step * 10 + rank)
        optimizer.zero_grad()
        inputs = torch.randn(16, 64, generator=generator).to(DEVICE)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def rank_settles(rank: int, size: int) -> dict[str, Any]:
    lines = Lines()
    settled: list[Any] = []
    begin = time.perf_counter()
    model = stretto.DistributedDataParallel(
        net(), device_ids=[0], on_settled=settled.append
    )
    ours = train(model, rank, STEPS, settled)
    ours_s = time.perf_counter() - begin
    theirs = train(TorchDDP(net(), device_ids=[0]), rank, len(ours))
    return {
        "equal": ours == theirs,
        "steps": len(ours),
        "s": ours_s,
        "settled": bool(settled),
        "plan": settled and settled[0].plan and settled[0].plan.digest,
        "status": settled and str(settled[0])[:300],
        "lines": lines.lines,
    }


@pytest.mark.parametrize(
    ("group", "overlap"), [("nccl", ""), ("nccl", "auto"), ("cpu:gloo,cuda:nccl", "")]
)
def test_an_automatic_run_trains_as_ddp_bit_for_bit(
    gpu_ranks: Any, group: str, overlap: str
) -> None:
    more = {"STRETTO_OVERLAP": overlap} if overlap else {}
    found = gpu_ranks(rank_settles, 2, timeout_s=240, group=group, **more)
    print(found)
    for one in found:
        assert one["equal"]
    # A device that others use as well may make the network too slow to measure.
    gave_up = any("DDP's own rule stays" in line for line in found[0]["lines"])
    assert all(one["settled"] for one in found) or gave_up, found
    assert found[0]["plan"] == found[1]["plan"]


def rank_on_gloo(rank: int, size: int) -> dict[str, Any]:
    torch.cuda.set_device(0)
    lines = Lines()
    ours = train(stretto.DistributedDataParallel(net(), device_ids=[0]), rank, 40)
    theirs = train(TorchDDP(net(), device_ids=[0]), rank, 40)
    return {"equal": ours == theirs, "lines": lines.lines}


def test_gloo_with_a_model_on_a_device_is_left_to_ddp(gpu_ranks: Any) -> None:
    first, second = gpu_ranks(rank_on_gloo, 2, group="gloo")
    assert first["equal"]
    assert second["equal"]
    assert "DDP's rule is kept" in first["lines"][0]
    assert "uses gloo and cuda" in first["lines"][0]
