"""A model's environment: its process group, backend and compiler."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from stretto.runtime.agreement import Ranks

PLANNED_BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""Supported backends of plans, each with its device type."""

_F = TypeVar("_F", bound="Callable[..., Any]")

_log = logging.getLogger(__name__)

WHOLE_COMPILE = (
    "%s: the whole model is compiled: PyTorch computes its backward in few pieces, and "
    "all gradients of a piece become ready at its end, so a plan has little to "
    "overlap with. Compile each block (`for block in model.blocks: block.compile()`) "
    "before the model is wrapped."
)


def without_dynamo(function: _F) -> _F:
    """Keep TorchDynamo out of a function called below a compiled forward.

    Dynamo inspects every frame there, and can't inspect a process group. Unlike
    ``torch.compiler.disable`` this imports nothing until the function is called.
    """
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("_F", disable(function))


def arguments_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments given to DDP, by name."""
    signature = inspect.signature(TorchDDP.__init__)
    return signature.bind_partial(None, module, *args, **kwargs).arguments


def process_group_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dist.ProcessGroup:
    """Return the process group that DDP will use with these arguments."""
    arguments = arguments_of(module, args, kwargs)
    given = arguments.get("process_group")
    mesh = arguments.get("device_mesh")
    if given is not None:
        return cast("dist.ProcessGroup", given)
    if mesh is not None and mesh.ndim == 1:
        return cast("dist.ProcessGroup", mesh.get_group(mesh_dim=0))
    return dist.distributed_c10d._get_default_group()  # noqa: SLF001


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend for tensors on a device: ``gloo``, ``nccl``, ..."""
    name: str = group._get_backend(device).name()  # noqa: SLF001
    return name


def is_compiled_whole(module: nn.Module) -> bool:
    """Return whether the whole module was compiled, rather than its blocks."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def warn_of_whole_compile(module: nn.Module, ranks: Ranks, *, around: bool) -> None:
    """Warn on the first rank that a plan has little to overlap with.

    ``around``: DDP's own forward is compiled, and the module's with it.
    """
    if ranks.rank == 0 and ranks.size > 1 and (around or is_compiled_whole(module)):
        _log.warning(WHOLE_COMPILE, ranks.name(0))
