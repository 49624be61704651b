"""Models and optimizers for overlap with the next forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from stretto.optim import AdamSGD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SHAPE = (4, 1, 8, 8)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.more = nn.Conv2d(4, 5, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        return self.head(torch.tanh(self.more(x)).mean((2, 3)))


class Attention(nn.Module):
    """Reads ``out_proj`` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, dim_feedforward=12, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.squeeze(1)
        x = self.attend(x, x, x, need_weights=False)[0]
        return self.head(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.words = nn.Embedding(8, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.squeeze(1)
        return self.last(
            torch.tanh(self.first(x)) + self.words((x[..., 0] * 3).long().abs() % 8)
        )


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norms = nn.utils.parametrizations
        self.first = norms.weight_norm(nn.Linear(8, 6))
        self.second = norms.orthogonal(nn.Linear(6, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x.squeeze(1))))))


class Inner(nn.Module):
    """Uses parameters of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 6)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x.squeeze(1), self.inner.weight, self.inner.bias)
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return self.head(x)


class _Penalty(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other[0].weight.square().mean()


class ReadsOther(nn.Module):
    """Its first layer reads the last one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.penalty = _Penalty(self.last)
        self.first = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.penalty(x.squeeze(1)))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Convolutions,
        Attention,
        Recurrent,
        Tied,
        Parametrized,
        Inner,
        ReadsOther,
    )
}

Optimizers = list[Any]


def _one(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizers]:
    return lambda net: [kind(net.parameters(), **options)]


def _two_groups(net: nn.Module) -> Optimizers:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    return [
        torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1},
                {"params": others, "lr": 0.02, "weight_decay": 0.0},
            ],
            lr=0.01,
        )
    ]


def _muon(net: nn.Module) -> Optimizers:
    optim: Any = torch.optim
    matrices: Iterable[Any] = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim != 2]
    return [optim.Muon(matrices, lr=0.01), torch.optim.SGD(others, lr=0.01)]


def _tensor_rate(net: nn.Module) -> Optimizers:
    return [torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01), foreach=False)]


_o = torch.optim
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "SGD": _one(_o.SGD, lr=0.05),
    "SGD momentum": _one(_o.SGD, lr=0.05, momentum=0.9),
    "SGD Nesterov": _one(
        _o.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "SGD fused": _one(_o.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adam": _one(_o.Adam, lr=0.01),
    "Adam tensor rate": _tensor_rate,
    "AdamW amsgrad": _one(_o.AdamW, lr=0.01, amsgrad=True),
    "AdamW fused": _one(_o.AdamW, lr=0.01, fused=True),
    "AdamW foreach": _one(_o.AdamW, lr=0.01, foreach=True),
    "AdamW groups": _two_groups,
    "NAdam": _one(_o.NAdam, lr=0.01),
    "RAdam": _one(_o.RAdam, lr=0.01),
    "Adamax": _one(_o.Adamax, lr=0.01),
    "RMSprop": _one(_o.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": _one(_o.Adagrad, lr=0.01),
    "Adadelta": _one(_o.Adadelta, lr=0.5),
    "ASGD": _one(_o.ASGD, lr=0.05, t0=2),
    "Rprop": _one(_o.Rprop, lr=0.01),
    "Adafactor": _one(_o.Adafactor, lr=0.01),
    "Muon": _muon,
    "AdamSGD": _one(AdamSGD, lr=0.01, switch_at=3),
}
"""Optimizers whose step treats each parameter separately."""
