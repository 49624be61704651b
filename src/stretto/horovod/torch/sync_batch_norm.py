"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.horovod.reduce_ops import Sum
from stretto.horovod.torch.allreduce import allreduce
from stretto.horovod.world import size
from stretto.runtime.torch_compat import without_dynamo


class SyncBatchNorm(_BatchNorm):
    r"""`torch.nn.BatchNorm` with statistics over all ranks' batches.

    Batches may differ in size between ranks, and a rank's may be empty. In evaluation,
    and on one rank, it behaves as PyTorch's. With $n$ values per channel over all
    ranks, $\mu = \sum x / n$ and $\sigma^2 = \sum (x - \mu)^2 / n$, the latter from all
    ranks' means and squared deviations (Chan et al., 1979), which loses no digits if
    the mean is large.

    Args:
        num_features: Number of channels, the input's second dimension.
        eps: Constant added to the variance.
        momentum: Share of the new statistics in the running ones; ``None`` means the
            mean of all so far.
        affine: Whether it scales and shifts by parameters.
        track_running_stats: Whether it keeps running statistics for evaluation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002
        track_running_stats: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input, got {input.dim()}D input")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Return the normalized input, with its shape: batch, channels, ..."""
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            return super().forward(input)
        if size() == 1:
            return super().forward(input)
        factor = self._factor()
        normalized, mean, var, count = _normalize(
            input, self.weight, self.bias, self.eps
        )
        if self.training and self.track_running_stats:
            self._track(mean, var, count, factor)
        result: torch.Tensor = normalized
        return result

    def _factor(self) -> float:
        if not (self.training and self.track_running_stats):
            return 0.0
        seen = self.num_batches_tracked
        if seen is not None:
            seen.add_(1)
        if self.momentum is None:
            return 1.0 / float(seen) if seen is not None else 0.0
        return self.momentum

    @torch.no_grad()
    def _track(
        self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor, factor: float
    ) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        # Running variances are unbiased, as in BatchNorm.
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> Any:
        across = [d for d in range(values.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(values.dim())]
        exact = values.to(torch.promote_types(values.dtype, torch.float32))
        channels = exact.shape[1]
        mine = exact.new_full((1,), exact.numel() / channels)
        total = torch.cat([exact.sum(across), mine])
        # Unnamed: layers run in the same order on every rank.
        total = allreduce(total, op=Sum)
        count = total[-1:]
        mean = total[:-1] / count
        off = exact - mean.view(shape)
        var = allreduce((off * off).sum(across), op=Sum) / count
        inverse = (var + eps).rsqrt()
        straight = off * inverse.view(shape)
        result = straight
        if weight is not None:
            result = result * weight.view(shape)
        if bias is not None:
            result = result + bias.view(shape)
        ctx.save_for_backward(straight, inverse, count, weight)
        ctx.layout = (across, shape, values.dtype, bias is not None)
        ctx.mark_non_differentiable(mean, var, count)
        return result.to(values.dtype), mean, var, count

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        straight, inverse, count, weight = ctx.saved_tensors
        across, shape, dtype, has_bias = ctx.layout
        gradient = gradients[0].to(straight.dtype)
        along, with_values = gradient.sum(across), (gradient * straight).sum(across)
        # Only this rank's share: DistributedOptimizer reduces parameters' gradients.
        of_weight = None if weight is None else with_values.to(weight.dtype)
        of_bias = along.to(weight.dtype if weight is not None else dtype)
        both = torch.cat([along, with_values])
        both = allreduce(both, op=Sum) / count
        mean, mean_with = both.chunk(2)
        scale = inverse if weight is None else inverse * weight
        of_values = scale.view(shape) * (
            gradient - mean.view(shape) - straight * mean_with.view(shape)
        )
        return of_values.to(dtype), of_weight, of_bias if has_bias else None, None


_normalize: Any = _Normalize.apply
