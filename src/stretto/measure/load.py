"""Computation to measure beside communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def convolutions(device: torch.device) -> Callable[[], None]:
    """Return forward and backward of a small convolutional network, a few ms long."""
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


def backward(device: torch.device) -> Callable[[], None]:
    """Return backward of a transformer block and a convolution, large enough for a GPU.

    Forward runs once, and backward over its graph repeatedly: LIBRA's contention is
    that of backward's kernels. Not yet run on a GPU.
    """
    block = nn.TransformerEncoderLayer(
        512, 8, 2048, dropout=0.0, batch_first=True, device=device
    )
    convolution = nn.Conv2d(64, 128, 3, padding=1, device=device)
    words = torch.zeros(16, 128, 512, device=device)
    images = torch.zeros(16, 64, 56, 56, device=device)
    out = block(words).square().mean() + convolution(images).square().mean()
    parameters = [*block.parameters(), *convolution.parameters()]

    def once() -> None:
        torch.autograd.grad(out, parameters, retain_graph=True)

    return once
