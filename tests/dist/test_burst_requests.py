"""Ranks that follow the plans which a cluster requests, against one process."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from stretto import variable_names
from stretto.burst import requested_plans
from stretto.burst.executor import BurstParallel
from stretto.plan_requests import CHANGE, MEASURE, PlanRequest, RequestFolder
from stretto.schema import codec
from support.burst_ranks import random_plan, worst

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

Facts = dict[str, Any]


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return nn.Sequential(*sizes)


def rank_that_follows(rank: int, size: int, folder: str) -> Facts:
    torch.set_default_dtype(torch.float64)
    os.environ[variable_names.PLAN_REQUESTS] = str(Path(folder) / "r")
    # The ranks look in every call, so that the test has no clock.
    requested_plans._INTERVAL_S = 0.0  # type: ignore[misc]
    requests = RequestFolder(Path(folder) / "r")
    example = torch.zeros(2, 4)
    model = layers()
    reference = copy.deepcopy(model)
    first, other = (random_plan(model, example, size, seed) for seed in (0, 5))
    burst = BurstParallel(model, first, example_inputs=(example,))
    made = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (burst, reference)]
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    y = torch.randn(6, 2, generator=torch.Generator().manual_seed(4))
    mine = slice(6 * rank // size, 6 * (rank + 1) // size)
    changes: list[int] = []
    reports: list[dict[str, Any]] = []

    def request(number: int, kind: str, **fields: Any) -> None:
        if rank == 0:
            requests.create()
            requests.write(PlanRequest(number=number, kind=kind, **fields))
        dist.barrier()

    for step in range(40):
        if step == 8:
            request(1, MEASURE, steps=3)
        elif step == 16:
            request(2, CHANGE, plan=codec.encode(other).decode())
        elif step == 24:
            request(3, CHANGE, plan="{}")  # no plan
        for optimizer in made:
            optimizer.zero_grad()
        mse_loss(burst(x[mine]), y[mine]).backward()
        mse_loss(reference(x), y).backward()
        for optimizer in made:
            optimizer.step()
        if burst.follow_requests():
            changes.append(step)
        reports += requests.reports()
    burst.refresh()
    states = burst.module.state_dict()
    names = {each.layer for each in first.layers}
    timed = {t["layer"] for r in reports for t in r.get("timings", ())}
    return {
        "changes": changes,
        "follows": burst.plan == other,
        "worst": max(worst(states[n], v) for n, v in reference.state_dict().items()),
        "kinds": [r["kind"] for r in reports],
        "all timed": json.dumps(sorted(timed)) == json.dumps(sorted(names)),
    }


def test_ranks_follow_a_requested_plan_after_the_same_step(
    ranks: Any, tmp_path: Path
) -> None:
    everyone = ranks(rank_that_follows, 2, str(tmp_path), timeout_s=60, group_s=30)
    assert [len(found["changes"]) for found in everyone] == [1, 1]
    assert everyone[0]["changes"] == everyone[1]["changes"]
    assert everyone[0]["kinds"] == ["measured", "changed", "refused"]
    assert everyone[0]["all timed"]
    for found in everyone:
        assert found["follows"]
        assert found["worst"] < 1e-10
