"""Lanes that no plan uses any longer are closed, and may be opened again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.runtime import DistributedDataParallel
from support.nets import mlp

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TorchDDP = nn.parallel.DistributedDataParallel

WAIT_S = 20.0


net = partial(mlp, 16, 32, 2, between=nn.Tanh)


def gradients(model: Any, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 * rank + step)
    model(torch.randn(4, 16, generator=generator)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def taken() -> tuple[int, int]:
    """Return how many threads and descriptors this process has."""
    threads, descriptors = (
        sum(1 for _ in Path("/proc/self", name).iterdir()) for name in ("task", "fd")
    )
    return threads, descriptors


def rank_changes_lanes(rank: int, size: int) -> dict[str, Any]:
    theirs = TorchDDP(net())
    model = DistributedDataParallel(net())
    found: dict[str, Any] = {"wrong": []}

    def train(steps: range) -> None:
        for step in steps:
            expected = gradients(theirs, rank, step)
            got = gradients(model, rank, step)
            if not all(map(torch.equal, got, expected)):
                found["wrong"].append(step)

    model.apply_plan(model.deferred_plan(1, planner="test"))
    train(range(3))
    found["one lane"] = taken()
    for lanes in (4, 2, 8):
        model.apply_plan(model.deferred_plan(lanes, planner="test"))
        train(range(3))
    found["many lanes"] = taken()
    model.apply_plan(model.deferred_plan(1, planner="test"))
    train(range(3))
    model.release_unused_lanes()
    train(range(3, 6))
    deadline = time.perf_counter() + WAIT_S
    while taken() > found["one lane"] and time.perf_counter() < deadline:
        gc.collect()
        time.sleep(0.05)
    found["released"] = taken()
    for lanes in (8, 2):
        model.apply_plan(model.deferred_plan(lanes, planner="test"))
        train(range(3))
    model.apply_plan(None)
    model.release_unused_lanes()
    train(range(3))
    found["python threads"] = threading.active_count()
    return found


@pytest.mark.filterwarnings("ignore")
def test_lanes_of_tried_plans_are_released_and_open_again(ranks: Any) -> None:
    for found in ranks(rank_changes_lanes, 2, timeout_s=100):
        assert found["wrong"] == []
        for one, many, released in zip(
            found["one lane"], found["many lanes"], found["released"], strict=True
        ):
            assert many > one
            assert released <= one


def rank_forks_and_drops(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Train, fork, and drop the model in the child, as a worker may."""
    theirs, model = TorchDDP(net()), DistributedDataParallel(net())
    wrong, ends = [], []
    for step, lanes in enumerate((1, 2, 1, 2)):
        model.apply_plan(model.deferred_plan(lanes, planner="test"))
        expected, got = gradients(theirs, rank, step), gradients(model, rank, step)
        if not all(map(torch.equal, got, expected)):
            wrong.append(step)
        child = os.fork()
        if child == 0:
            del model
            gc.collect()
            os._exit(5)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return wrong, ends


def test_a_forked_process_may_drop_its_parent_s_model(ranks: Any) -> None:
    """Gloo's end without its threads was a segmentation fault."""
    assert ranks(rank_forks_and_drops, 2, timeout_s=60) == [([], [5] * 4)] * 2


_FAKE = """
import logging
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import stretto

logging.basicConfig(format="%(message)s")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = stretto.DDP(torch.nn.Linear(4, 2))
# PyTorch's own DDP has no backward on this backend.
print(model(torch.ones(2, 4)).shape, model.plan)
"""


def test_a_backend_that_plans_do_not_know_is_left_to_ddp() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FAKE],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "torch.Size([2, 2]) None\n", done.stderr
    lines = [line for line in done.stderr.splitlines() if "DDP's rule is kept" in line]
    assert len(lines) == 1
    assert "uses fake and cpu" in lines[0]
