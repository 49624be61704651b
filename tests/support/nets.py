"""Small networks whose initial values depend on nothing but a seed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def mlp(
    *widths: int, between: Callable[[], nn.Module] = nn.SiLU, seed: int = 1
) -> nn.Sequential:
    """Linear layers of these widths, with an activation between each two."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), between()]
    return nn.Sequential(*layers[:-1])


class Given(nn.Module):
    """Parameters whose gradients are exactly what forward is given."""

    def __init__(self, *sizes: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.zeros(n, dtype=dtype) for n in sizes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=gradients[0].dtype)
        for parameter, gradient in zip(self.w, gradients, strict=True):
            total = total + (parameter * gradient).sum()
        return total
