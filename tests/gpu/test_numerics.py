"""NaN finding on a device, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.errors import NumericsError
from stretto.runtime import DistributedDataParallel
from support.plans import plan_in_turn

DEVICE = torch.device("cuda", 0)


def rank_finds(rank: int, size: int) -> str:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(DEVICE)
    groups = (("1.bias", "1.weight"), ("0.bias", "0.weight"))
    plan = plan_in_turn(groups, ranks=size, lanes=2)
    model = DistributedDataParallel(module, device_ids=[0], plan=plan, nan="raise")
    try:
        for step in range(30):
            x = torch.ones(4, 8, device=DEVICE)
            if step == 3 and rank == 1:
                x[0, 0] = float("nan")
            model.zero_grad()
            model(x).sum().backward()
            torch.cuda.synchronize()  # the copy of the flags has ended by then
    except NumericsError as error:
        return str(error)
    return "nothing found"


def test_a_nan_is_named_with_its_rank_and_parameter(gpu_ranks: Any) -> None:
    for said in gpu_ranks(rank_finds, 2):
        assert ".weight" in said
        assert "rank 1" in said
