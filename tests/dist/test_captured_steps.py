"""Steps that a CUDA graph captures, where a stand-in says that one does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stretto
from stretto.runtime import ddp
from support.checks import Lines
from support.nets import mlp

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TorchDDP = nn.parallel.DistributedDataParallel
STEPS = 14


def trained(kind: Any, rank: int, captured: int | None = None) -> Any:
    """Train; a step says that a graph captures it."""
    model = kind(mlp(8, 64, 64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged = []
    for step in range(STEPS):
        ddp.is_captured = lambda _device, step=step: step == captured
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 8, generator=draw)).square().mean().backward()
        optimizer.step()
        logged.append(model.logger._get_ddp_logging_data().ints_map.get("iteration"))
    return [p.detach() for p in model.parameters()], logged


def rank_captures(rank: int, size: int) -> Any:
    theirs, _ = trained(TorchDDP, rank)
    lines = Lines()
    ours, logged = trained(stretto.DistributedDataParallel, rank, captured=4)
    said = [line for line in lines.lines if "CUDA graph" in line]
    return all(map(torch.equal, ours, theirs)), logged, said


def test_a_capture_ends_tuning_and_reads_no_events(ranks: Ranks) -> None:
    for rank, (equal, logged, said) in enumerate(ranks(rank_captures, 2)):
        assert equal
        assert len(set(logged[4:])) == 1, (
            logged
        )  # nothing is logged from the capture on
        assert len(said) == (rank == 0), said
