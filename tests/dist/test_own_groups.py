"""Process groups whose collectives a program has written itself.

stretto's DDP sends all buckets through such a group, with the gradients and the number
of all-reduces of PyTorch's DDP, logs once per model that it keeps DDP's rule, and
refuses a plan.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto import variable_names
from stretto.errors import PlanMismatch
from support.checks import Lines
from support.nets import mlp
from support.plans import plan_in_turn, reversed_names

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

STEPS = 12


class Counting(dist.ProcessGroup):
    """Counts its all-reduces, and passes everything on to another group."""

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        self.all_reduces = 0

    def allreduce(self, *arguments: Any) -> Any:
        self.all_reduces += 1
        return self.group.allreduce(*arguments)

    def allgather(self, *arguments: Any) -> Any:
        return self.group.allgather(*arguments)

    def broadcast(self, *arguments: Any) -> Any:
        return self.group.broadcast(*arguments)


class WithBackend(Counting):
    """Count, and know the other group's backend."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        device, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self._register_backend(device, gloo, group._get_backend(device))
        self._set_default_backend(gloo)


def trained(kind: Any, group: Any, rank: int) -> tuple[list[float], int]:
    model = kind(mlp(8, 9, 2, seed=3), process_group=group)
    draw = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(4, 8, generator=draw)).square().mean().backward()
        found.append(sum(float(p.grad.sum()) for p in model.parameters()))
    return found, group.all_reduces


def trains(rank: int, size: int) -> dict[str, Any]:
    lines = Lines(logging.WARNING)
    found: dict[str, Any] = {}
    for kind in (Counting, WithBackend):
        groups = [kind(dist.new_group()) for _ in range(2)]
        theirs = trained(nn.parallel.DistributedDataParallel, groups[0], rank)
        ours = trained(stretto.DistributedDataParallel, groups[1], rank)
        found[kind.__name__] = ours == theirs
    net = mlp(8, 9, 2, seed=3)
    plan = plan_in_turn([reversed_names(net)], ranks=size, lanes=1, slices=1)
    with pytest.raises(PlanMismatch, match="does not support plans on backend"):
        stretto.DistributedDataParallel(net, process_group=groups[0], plan=plan)
    found["lines"] = len([line for line in lines.lines if "DDP's rule is kept" in line])
    return found


def test_groups_of_a_program_s_own_reduce_all_buckets(
    ranks: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv(variable_names.TUNE_SCHEDULE, "forced")
    for rank, found in enumerate(ranks(trains, 2, timeout_s=100.0)):
        expected = {"Counting": True, "WithBackend": True, "lines": 0 if rank else 2}
        assert found == expected
