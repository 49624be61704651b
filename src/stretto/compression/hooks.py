"""The hooks themselves.

Without postponed annotations: DDP compares a hook's annotations with types.
"""

import torch
import torch.distributed as dist

from stretto.compression.power_sgd import PowerSGD
from stretto.compression.top_k import TopK


def top_k_hook(
    state: TopK,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over ranks by their largest values.

    A DDP communication hook: ``model.register_lane_hook(TopK(0.01), top_k_hook)``, or
    ``register_comm_hook`` of PyTorch's class. Sparse gradients, and those that are not
    real floating-point numbers, are averaged whole.

    Args:
        state: Options and residuals.
        bucket: The gradients; its buffer gets their means.

    Returns:
        A future of the bucket's buffer (1-d).
    """
    return state.average(bucket)


def power_sgd_hook(
    state: PowerSGD,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over ranks by matrices of low rank.

    A DDP communication hook, PyTorch's ``powerSGD_hook`` with errors that survive a
    change of buckets: ``model.register_lane_hook(PowerSGD(1), power_sgd_hook)``. On
    Gloo, with PyTorch's class and several buckets, it hangs as PyTorch's hook does.

    Args:
        state: Options and state.
        bucket: The gradients; its buffer gets their means.

    Returns:
        A future of the bucket's buffer (1-d).
    """
    return state.average(bucket)
