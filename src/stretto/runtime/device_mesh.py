"""Data parallelism beside tensor and pipeline parallelism.

DDP replaces a DTensor parameter by this rank's part of it, if it gets one dimension of
a larger mesh. Plans, and what ranks compare before DDP's constructor, need that table.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stretto.errors import SpecError
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from torch import nn

_log = get_logger(__name__)


_SPLIT = (
    "this pipeline schedule computes gradients of weights apart from those of inputs "
    "(zero bubble), by torch.autograd.grad, which DDP does not see: they are not "
    "averaged. Use Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS or "
    "ScheduleGPipe, or average the gradients after the schedule's step without DDP."
)


def split_backward(caller: FrameType) -> str | None:
    """Return why a pipeline stage's gradients are not averaged, or ``None``.

    ``caller`` is the frame that enters DDP's ``no_sync``: PyTorch's stages do that
    around the backward of each micro-batch but the last, which has a kind there.
    """
    if caller.f_code.co_name != "backward_maybe_with_nosync":
        return None
    kind = caller.f_locals.get("backward_type")
    return _SPLIT if kind in ("input", "weight") else None


def _is_part_of_mesh(mesh: Any) -> bool:
    """Return whether DDP will replace DTensors: a mesh of one dimension of a larger."""
    return (
        mesh is not None and mesh.ndim == 1 and bool(mesh._get_root_mesh() != mesh)  # noqa: SLF001
    )


def _dtensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if "torch.distributed.tensor" not in sys.modules:
        return
    # Importing it takes long, and DTensors exist only if it was imported.
    from torch.distributed.tensor import DTensor

    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            yield name, parameter


def _is_sharded_over(parameter: Any, group: dist.ProcessGroup) -> bool:
    mesh = parameter.device_mesh
    return any(
        placement.is_shard() and mesh.get_group(dimension) is group
        for dimension, placement in enumerate(parameter.placements)
    )


def take_local_shards(
    module: nn.Module, arguments: Mapping[str, Any], group: dist.ProcessGroup
) -> SpecError | None:
    """Replace DTensor parameters by this rank's shards, as DDP does a moment later.

    Args:
        module: The module to be wrapped.
        arguments: DDP's arguments, by name.
        group: The process group that DDP will use.

    Returns:
        The error if DDP can't train these parameters, else ``None``.
    """
    found = list(_dtensors(module))
    if not found:
        return None
    if not _is_part_of_mesh(arguments.get("device_mesh")):
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        sent = arguments.get("init_sync", True)
        for name, parameter in found:
            if name not in ignored and (sent or parameter.requires_grad):
                return _not_trainable(name, parameter.device_mesh)
        return None
    for name, parameter in found:
        if dist.get_rank(group) == 0 and _is_sharded_over(parameter, group):
            _log.warning(
                "parameter %r is sharded over the same ranks whose gradients DDP "
                "averages: they are gradients of different shards. Pass the "
                "device_mesh of the dimension that shares the batch.",
                name,
            )
            break
    # Takes long to import, and only models with DTensors need it.
    from torch.distributed.tensor.parallel.ddp import (
        _localize_dtensor,
    )

    # DDP calls it again, which finds nothing more to do, and registers the hooks that
    # need what the first call noted at each parameter.
    _localize_dtensor(module)
    return None


def _not_trainable(name: str, mesh: object) -> SpecError:
    return SpecError(
        f"parameter {name!r} is a DTensor on {mesh}, which DDP can train only over "
        "another dimension of the same mesh: pass device_mesh=mesh['data'], with the "
        "name of the dimension that shares the batch, instead of a process group."
    )
