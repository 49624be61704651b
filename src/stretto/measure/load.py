"""Computation to measure beside communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def convolutions(device: torch.device) -> Callable[[], None]:
    """Forward and backward of a small convolutional network, a few milliseconds."""
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
    ).to(device)
    images = torch.zeros(16, 8, 16, 16, device=device)

    def once() -> None:
        model.zero_grad(set_to_none=True)
        model(images).sum().backward()

    return once
