"""A use of a burst model on all ranks, and on one process with the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from stretto.burst.executor import BurstParallel
from support.burst_ranks import part, plan_of, shares_of

if TYPE_CHECKING:
    from collections.abc import Callable

Widths = list[tuple[int, int]]
"""The first rank and the number of ranks of each layer in turn."""


def net(inputs: int = 6, outputs: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, 8),
        nn.Tanh(),
        nn.Linear(8, 7, bias=False),  # a bias would have no gradient but rounding
        nn.BatchNorm1d(7),
        nn.Sigmoid(),
        nn.Linear(7, outputs),
    )


class WithTemperature(nn.Module):
    """Has a parameter that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def example_of(model: nn.Module) -> torch.Tensor:
    return torch.zeros(2, next(p for p in model.parameters() if p.dim() > 1).shape[1])


class Side:
    """The ranks' side of a use, or one process's."""

    batch = 7

    def __init__(self, rank: int, size: int, widths: Widths, shares: str) -> None:
        self.rank, self.size, self.widths = rank, size, widths
        self.shares = shares_of(self.batch, size, shares)

    def wrap(self, model: nn.Module) -> Any:
        if not self.size:
            return model
        plan = self.plan(model, self.widths)
        return BurstParallel(model, plan, example_inputs=(example_of(model),))

    def start(self, model: nn.Module | None = None) -> tuple[Any, Any, Any, Any]:
        """A model, the same wrapped, and this side's samples of the first step."""
        model = net() if model is None else model
        wrapped = self.wrap(model)
        return model, wrapped, *self.data(0)

    def plan(self, model: nn.Module, widths: Widths) -> Any:
        example = example_of(model)
        return plan_of(model, example, lambda i: widths[i % len(widths)], self.size)

    def data(self, step: int, features: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(100 + step)
        x = torch.randn(self.batch, features, generator=draw)
        y = torch.randint(0, 4, (self.batch,), generator=draw)
        return self.mine(x), self.mine(y)

    def mine(self, rows: torch.Tensor) -> torch.Tensor:
        return part(rows, self.shares, self.rank) if self.size else rows

    def grads(self, model: Any) -> list[torch.Tensor | None]:
        """Gradients that this rank holds; one process holds all."""
        return [
            None if p.grad is None else p.grad.detach().clone()
            for p in model.parameters()
        ]

    def state(self, model: Any) -> list[torch.Tensor]:
        full = model.full_state_dict() if self.size else model.state_dict()
        return [value.detach().clone() for value in full.values()]


class Alone(Side):
    """One process with the whole batch."""

    def __init__(self) -> None:
        super().__init__(0, 0, [], "even")
        self.shares = []


def cross(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss over a rank's samples; 0 where it has none."""
    total = functional.cross_entropy(out, y, reduction="sum")
    return total / max(1, len(y))


def train(side: Side, model: Any, optimizer: Any, steps: int = 3, **more: Any) -> None:
    after: Callable[[], Any] = more.get("after", lambda: None)
    for step in range(steps):
        x, y = side.data(step)
        optimizer.zero_grad()
        cross(model(x), y).backward()
        after()
        optimizer.step()


def worst_of(got: Any, wanted: Any) -> float:
    """Largest relative difference; what this rank does not hold is ``None``."""
    if got is None:
        return 0.0
    if isinstance(got, torch.Tensor):
        scale = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
        apart = (got.to(wanted.dtype) - wanted).detach().abs()
        return float(apart.max()) / max(scale, 1e-6) if apart.numel() else 0.0
    assert len(got) == len(wanted)
    pairs = zip(got, wanted, strict=True)
    return max((worst_of(a, b) for a, b in pairs), default=0.0)
