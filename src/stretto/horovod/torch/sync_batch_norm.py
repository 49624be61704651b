"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm` whose statistics are those of all ranks' batches."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002
        track_running_stats: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        raise NotImplementedError
