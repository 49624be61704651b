"""Batch norm over all samples of a layer, which are on several ranks.

PyTorch's `SyncBatchNorm` runs only on accelerators, and on every rank of its group.
Here ranks may hold unequal numbers of samples, or none: mean and variance are those of
the whole batch, as one process would compute them, and so are the running ones.

With n_r values of a channel on rank r, their mean m_r and squared deviations M_r (Chan,
Golub and LeVeque, 1979): m = sum n_r m_r / n, M = sum M_r + n_r (m_r - m)^2.
Backward: dx = w / s (dy - mean(dy) - x^ mean(dy x^)), x^ = (x - m) / s, means over the
whole batch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from stretto.burst.tracing.one_row import normalized, plain_row
from stretto.burst.tracing.torch_modules import batch_norm
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from stretto.burst.rank_groups import GroupLanes, RankGroups
    from stretto.burst.timings import StepClock

KINDS = ("sync", "local")
"""Over all samples of the layer, or over those of each rank separately."""


@final
class NormSync:
    """Replaces the ``forward`` of one batch norm of a layer on several ranks."""

    def __init__(
        self,
        norm: Any,
        *,
        layer: str,
        rank_groups: RankGroups,
        group: GroupLanes,
        clock: StepClock,
    ) -> None:
        self.norm = norm
        self.place = f"the batch norm of layer {layer!r}"
        self.rank_groups = rank_groups
        self.group = group
        self.clock = clock

    @property
    def is_synced(self) -> bool:
        """Whether statistics of the batch are used now."""
        return bool(self.norm.training or self.norm.running_mean is None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm's output, as one process with all samples computes it."""
        norm = self.norm
        if not self.is_synced:
            return normalized(partial(type(norm).forward, norm), x)
        norm._check_input_dim(x)  # noqa: SLF001
        out: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            x, norm.weight, norm.bias, self
        )
        return out

    def absent(self, device: torch.device) -> None:
        """Take part without samples; the other ranks' statistics wait for it."""
        if self.is_synced:
            self.statistics(None, self._kind(), device)

    def absent_back(self, device: torch.device) -> None:
        """Take part in backward without samples."""
        zeros = torch.zeros(
            2 * self.norm.num_features, dtype=self._kind(), device=device
        )
        self.add(zeros)

    def _kind(self) -> torch.dtype:
        held = (self.norm.weight, self.norm.running_mean)
        kinds = (tensor.dtype for tensor in held if tensor is not None)
        return accumulate_type(next(kinds, torch.get_default_dtype()))

    def statistics(
        self, x: Tensor | None, kind: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, int]:
        """Return mean and variance by channel over all ranks, and the value count."""
        channels = self.norm.num_features
        mine = torch.zeros(2 * channels + 1, dtype=kind, device=device)
        if x is not None:
            dims = [0, *range(2, x.dim())]
            var, mean = torch.var_mean(x.to(kind), dims, correction=0)
            mine[:channels] = mean
            mine[channels:-1] = var
            # There may be more rows than samples if a model folds other dimensions in.
            mine[-1] = x.numel() // channels
        rows = [torch.empty_like(mine) for _ in range(self.group.size)]
        with self.rank_groups.guard(self.place):
            work = self.group.norms.allgather([rows], [mine])
            self.clock.wait("batch norm", work.wait)
        every = torch.stack(rows)
        counts = every[:, -1:]
        means, variances = every[:, :channels], every[:, channels:-1]
        total = round(float(counts.sum()))
        share = self._count()
        if total < 2 and self.norm.training:
            raise ValueError(
                f"{self.place} needs more than one value per channel to train, got one"
            )
        mean = (counts * means).sum(0) / total
        var = (counts * (variances + (means - mean) ** 2)).sum(0) / total
        if self._tracks:
            self._keep(mean, var, total, share)
        return mean, var, total

    @property
    def _tracks(self) -> bool:
        """Whether this forward updates buffers; a program may turn that off."""
        return bool(self.norm.training and self.norm.track_running_stats)

    def _count(self) -> float:
        """Count a batch, as torch's norm does, and return its share of the mean."""
        norm = self.norm
        share = norm.momentum
        if self._tracks and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(norm.num_batches_tracked)
        return 0.0 if share is None else float(share)

    def _keep(self, mean: Tensor, var: Tensor, total: int, share: float) -> None:
        norm = self.norm
        if norm.running_mean is None:
            return
        unbiased = var * (total / max(total - 1, 1))
        running = norm.running_mean
        running.mul_(1 - share).add_(mean.to(running.dtype), alpha=share)
        running = norm.running_var
        running.mul_(1 - share).add_(unbiased.to(running.dtype), alpha=share)

    def add(self, sums: Tensor) -> None:
        """Add sums over the layer's ranks in place."""
        with self.rank_groups.guard(self.place):
            work = self.group.norms.allreduce([sums])
            self.clock.wait("batch norm", work.wait)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        sync: NormSync,
    ) -> Tensor:
        kind = accumulate_type(x.dtype if weight is None else weight.dtype)
        mean, var, total = sync.statistics(x, kind, x.device)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.sync, ctx.total = sync, total
        # Of half precision with the statistics' precision, as kernels take them.
        gain, shift = (v if v is None else v.to(mean.dtype) for v in (weight, bias))
        return batch_norm(x, sync.norm, (mean, var), (gain, shift))

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        sync, total = ctx.sync, ctx.total
        grad = plain_row(grads[0])
        scaled, plain = _sums(
            grad,
            plain_row(x),
            torch.ones_like(mean) if weight is None else weight.to(mean.dtype),
            (mean, var),
            sync.norm.eps,
            as_batch=x.is_cuda,
        )
        sums = torch.cat((plain, scaled)).to(mean.dtype)
        sync.add(sums)
        to_x = None
        if ctx.needs_input_grad[0]:
            sum_dy, sum_scaled = sums.chunk(2)
            inverse = torch.rsqrt(var + sync.norm.eps)
            gain = inverse if weight is None else inverse * weight
            slope = -gain * inverse * sum_scaled / total
            offset = -gain * sum_dy / total - slope * mean
            shape = (1, -1, *(1 for _ in range(x.dim() - 2)))
            to_x = torch.addcmul(offset.view(shape), x, slope.view(shape))
            to_x = torch.addcmul(to_x, grad, gain.view(shape)).to(x.dtype)
        to_weight = to_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            to_weight = scaled.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            to_bias = plain if weight is None else plain.to(weight.dtype)
        return to_x, to_weight, to_bias, None


def _sums(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, Tensor],
    eps: float,
    *,
    as_batch: bool,
) -> tuple[Tensor, Tensor]:
    """Return this rank's sums of dy x^ and of dy for each channel, natively.

    CPU kernels take mean and variance as running statistics; CUDA kernels take them as
    those of the batch only, ``as_batch``. The sums are the same.
    """
    mean, var = statistics
    _, scaled, plain = torch.ops.aten.native_batch_norm_backward(
        grad,
        x,
        weight,
        mean,
        var,
        mean if as_batch else None,
        torch.rsqrt(var + eps) if as_batch else None,
        as_batch,
        eps,
        [False, True, True],
    )
    return scaled, plain


def accumulate_type(kind: torch.dtype) -> torch.dtype:
    """Return the type in which statistics are computed."""
    return torch.float64 if kind == torch.float64 else torch.float32
