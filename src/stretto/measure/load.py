"""Computation to measure beside communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


def convolutions(device: torch.device) -> Callable[[], None]:
    """Return forward and backward of a small convolutional network, a few ms long.

    It may run within a training step, of which it changes nothing: it draws no random
    numbers, calls no module that a hook could see, and depends neither on the default
    type and device nor on whether gradients are enabled.
    """

    def filled(*shape: int, value: float) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=device)

    images = filled(16, 8, 16, 16, value=0.5)
    layers = [
        tuple(
            tensor.requires_grad_()
            for tensor in (
                filled(32, channels, 3, 3, value=0.01),
                filled(32, value=0.0),
                filled(32, value=1.0),
                filled(32, value=0.0),
            )
        )
        for channels in (8, 32)
    ]
    parameters = [tensor for layer in layers for tensor in layer]

    @torch.enable_grad()
    def once() -> None:
        out = images
        for weight, bias, scale, shift in layers:
            out = functional.conv2d(out, weight, bias, padding=1)
            out = functional.batch_norm(out, None, None, scale, shift, training=True)
            out = functional.relu(out)
        torch.autograd.grad(out.sum(), parameters)

    return once


def backward(device: torch.device) -> Callable[[], None]:
    """Return backward of a transformer block and a convolution, large enough for a GPU.

    Forward runs once, and backward over its graph repeatedly: LIBRA's contention is
    that of backward's kernels.
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
