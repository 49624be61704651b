"""Forwards and functions of PyTorch that a program replaces between steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.burst_sides import Alone, Side, cross, worst_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


class Shifted(nn.Linear):
    """Calls the forward of PyTorch's class."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), Shifted(8, 7)
        self.norm, self.c = nn.BatchNorm1d(7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(functional.relu(self.a(x)))
        found: Tensor = self.c(self.norm(h.mul(h)).tanh())
        return found


REPLACED: list[tuple[Any, str]] = [
    (nn.BatchNorm1d, "forward"),
    (nn.Linear, "forward"),
    (functional, "relu"),
    (Tensor, "mul"),
]


def halved(old: Any) -> Any:
    @functools.wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs) * 0.5

    return call


def trained(side: Side) -> list[Tensor]:
    wrapped = side.wrap(Net())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(2 * len(REPLACED) + 1):
        with pytest.MonkeyPatch.context() as patch:
            if step % 2:
                space, name = REPLACED[step // 2]
                patch.setattr(space, name, halved(getattr(space, name)))
            x, y = side.data(step)
            optimizer.zero_grad()
            cross(wrapped(x), y).backward()
            optimizer.step()
    return side.state(wrapped)


def rank_of_replaced(rank: int, size: int) -> float:
    torch.set_default_dtype(torch.float64)
    found = trained(Side(rank, size, [(0, 2), (1, 1)], "uneven"))
    return worst_of(found, trained(Alone()))


def test_what_is_replaced_between_steps_trains_as_in_one_process(ranks: Any) -> None:
    for worst in ranks(rank_of_replaced, 2, timeout_s=120, group_s=60):
        assert worst < 1e-9
