"""Synchronized batch norm on a CPU, where PyTorch has no kernels for it.

The same sums over all ranks in forward, and their gradients summed in backward, in
PyTorch's own operations: what DDP has to bear, collectives of the model's own between
its buckets, is the same. Ioffe and Szegedy, "Batch Normalization", algorithm 1, over
the batch of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel


def install() -> None:
    """Gives ``SyncBatchNorm`` a forward for the CPU, and lets DDP take it."""
    nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign, assignment]
    ddp: Any = DistributedDataParallel
    ddp._passing_sync_batchnorm_handle = lambda *_: None


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalized over the batches of all ranks; running statistics when evaluating."""
    if x.dim() < 2:
        raise ValueError(f"expected at least 2D input, got {x.dim()}D")
    by_batch = self.training or self.running_mean is None
    if not self.training:
        return nn.functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            by_batch,
            self.momentum,
            self.eps,
        )
    exact = x.double()
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    count = exact.new_tensor([x.numel() / x.size(1)])
    sums = torch.cat([exact.sum(dims), exact.square().sum(dims), count])
    group = self.process_group or dist.group.WORLD
    first, second, number = all_reduce(sums, group=group).split(
        [x.size(1), x.size(1), 1]
    )
    mean = first / number
    variance = second / number - mean.square()
    _remember(self, mean.detach(), (variance * number / (number - 1)).detach())
    out = (exact - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    if self.affine:
        out = out * self.weight.view(shape) + self.bias.view(shape)
    return out.to(x.dtype, memory_format=torch.preserve_format)


def _remember(norm: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    if norm.running_mean is None:
        return
    norm.num_batches_tracked.add_(1)
    share = norm.momentum
    if share is None:
        share = 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), share)
