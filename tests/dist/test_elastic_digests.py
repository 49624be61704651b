"""A rank whose parameters differ is named, and repaired if that is wanted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stretto

if TYPE_CHECKING:
    from support.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(100)]


def train(rank: int, size: int, repair: bool) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [(torch.ones(4) * i, i % 2) for i in range(72)]
    model = stretto.DistributedDataParallel(net, plan="ddp")
    run = stretto.Elastic(model, optimizer, batch="rank:2", repair=repair)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stretto").addHandler(handler)
    for _ in range(2):
        for inputs, targets in run.batches(data):
            with run.step():
                nn.functional.cross_entropy(run.model(inputs), targets).backward()
                optimizer.step()
            if run.steps == 2 and rank == 1:
                with torch.no_grad():
                    net[2].weight[1, 3] += 1.0
    logging.getLogger("stretto").removeHandler(handler)
    named = [text for text in said if "not equal on all ranks" in text]
    return named, [p.tolist() for p in net.parameters()]


@pytest.mark.parametrize("repair", [False, True])
def test_a_rank_that_differs_is_named(ranks: Ranks, repair: bool) -> None:
    (named, first), (_, second), (_, third) = ranks(train, 3, repair)
    assert len(named) == 1
    assert "after step 4: rank 1 differs" in named[0]  # changed after step 2
    assert first == third
    assert (first == second) is repair
