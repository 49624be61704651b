"""Require a module, a plan and a call that burst training supports."""

from __future__ import annotations

import contextlib
import itertools
import numbers
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from stretto.boolean_options import bool_option
from stretto.burst.norm import KINDS
from stretto.errors import SpecError, StrettoError
from stretto.schema.burst import BurstPlan

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.burst.parts import BurstSettings
    from stretto.burst.tracing.layers import LayerGraph

_PARALLEL = frozenset(
    (
        *("BurstParallel", "DistributedDataParallel", "DataParallel"),
        *("FullyShardedDataParallel", "FSDPModule"),
    )
)
"""Classes that can't be inside a burst model."""


def require_module(module: Any, arguments: Any, named: Any) -> None:
    """Require a module and its example inputs.

    Raises:
        SpecError: one is something else.
    """
    if not isinstance(module, nn.Module):
        raise SpecError(f"the model must be a torch.nn.Module, got {_kind(module)}")
    if not isinstance(arguments, tuple | list | None):
        hint = ": pass (x,) for one tensor x" if isinstance(arguments, Tensor) else ""
        raise SpecError(
            "example inputs must be a tuple of forward's positional arguments, got "
            f"{_kind(arguments)}{hint}"
        )
    if not isinstance(named, Mapping | None):
        raise SpecError(
            "keyword arguments of forward must be a dictionary of example inputs by "
            f"name, got {_kind(named)}"
        )
    for name, tensor in itertools.chain(
        module.named_parameters(), module.named_buffers()
    ):
        if is_lazy(tensor):
            raise SpecError(
                f"{name!r} has no shape yet, because a lazy module makes it in its "
                "first forward: call the module once with a batch before"
            )


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def loaded(plan: BurstPlan | str | Path) -> BurstPlan:
    """Return a plan, which may be given as the path of its file.

    Raises:
        SpecError: it is something else, or the file is invalid.
    """
    if isinstance(plan, BurstPlan):
        return plan
    if not isinstance(plan, str | os.PathLike):
        raise SpecError(
            "the plan must be a BurstPlan, from stretto.plan_layers, or the path of "
            f"its file, got {_kind(plan)}"
        )
    return BurstPlan.load(plan)


def checked_plan(
    module: nn.Module,
    plan: BurstPlan | str | Path,
    examples: tuple[Any, Any],
    settings: BurstSettings,
    trouble: SpecError | None,
) -> BurstPlan:
    """Return the plan, if the model's arguments are valid.

    Args:
        module: the user's module.
        plan: for it, or its file.
        examples: the example's arguments, positional and named.
        settings: the other arguments.
        trouble: the error of an argument that was found invalid before.

    Raises:
        SpecError: an argument is invalid.
    """
    if trouble is not None:
        raise trouble
    require_module(module, *examples)
    if settings.batch_norm not in KINDS:
        raise SpecError(
            f"batch_norm must be one of {', '.join(KINDS)}, got {settings.batch_norm!r}"
        )
    _require_integer("seed", settings.seed)
    require_count("bucket_bytes", settings.bucket_bytes)
    require_count("lanes", settings.lanes)
    bool_option("verify", settings.verify)
    _refuse_nested(module)
    _refuse_overlaps(module)
    return loaded(plan)


def require_count(name: str, value: Any) -> int:
    """Return a whole number that is at least 1.

    Raises:
        SpecError: it is something else.
    """
    _require_integer(name, value)
    if int(value) < 1:
        raise SpecError(f"{name} must be >= 1, got {value}")
    return int(value)


def _require_integer(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Integral):
        raise SpecError(f"{name} must be an integer, got {value!r}")


def number(name: str, value: Any) -> float:
    """Return a number as a float, infinity included.

    Raises:
        SpecError: it is something else.
    """
    # A text may be "inf", as for PyTorch's own functions.
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        return float(value)
    raise SpecError(f"{name} must be a number, got {value!r}")


def require_group(group: Any) -> None:
    """Require a process group of which this rank is a member.

    Raises:
        SpecError: it is something else.
    """
    if isinstance(group, dist.ProcessGroup | None):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise SpecError(
            "this rank is not a member of process_group: build the model on the "
            "group's ranks only"
        )
    raise SpecError(
        "process_group must be a group from torch.distributed.new_group, or None for "
        f"all ranks, got {_kind(group)}"
    )


def require_optimizers(optimizers: tuple[Any, ...]) -> None:
    """Require optimizers, or wrappers of them.

    Raises:
        SpecError: one is something else.
    """
    for found in optimizers:
        if not hasattr(found, "param_groups"):
            hint = (
                ": pass each of them as an argument of its own"
                if isinstance(found, list | tuple)
                else ""
            )
            raise SpecError(
                "only optimizers can be passed here, whose states move with the "
                f"parameters, got {_kind(found)}{hint}"
            )


def _refuse_nested(module: nn.Module) -> None:
    for name, part in module.named_modules():
        kinds = {kind.__name__ for kind in type(part).__mro__}
        if "OptimizedModule" in kinds:
            where = f"its submodule {name!r}" if name else "the module"
            raise SpecError(
                f"{where} was compiled by torch.compile(...), whose operations can't "
                "be seen: pass the module as it was before"
            )
        if found := sorted(kinds & _PARALLEL):
            where = f"its submodule {name!r}" if name else "the module"
            raise SpecError(
                f"{where} is a {found[0]}, which moves gradients between ranks itself: "
                "pass the plain module to BurstParallel"
            )


def _refuse_overlaps(module: nn.Module) -> None:
    """Refuse parameters that share memory: each would be updated by its own ranks."""
    rows = sorted(
        (p.device.type, p.untyped_storage().data_ptr(), *_extent(p), name)
        for name, p in module.named_parameters()
        if p.numel() and p.layout == torch.strided and not p.is_meta
    )
    for one, two in itertools.pairwise(rows):
        if one[:2] == two[:2] and two[2] < one[3]:
            raise SpecError(
                f"parameters {one[4]!r} and {two[4]!r} share memory, which ranks that "
                "run one of them can't keep the same: use one nn.Parameter in both "
                "places, or compute one from the other in forward"
            )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    first = int(tensor.storage_offset())
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((int(side) - 1) * int(stride) for side, stride in sides)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def refuse_sparse(graph: LayerGraph) -> None:
    """Refuse layers whose gradients are sparse.

    Raises:
        SpecError: naming the layer.
    """
    for node in graph.nodes:
        for part in node.module.modules():
            if getattr(part, "sparse", False) is True:
                raise SpecError(
                    f"layer {node.name!r} has sparse gradients, which can't be added "
                    f"over ranks: pass sparse=False to {type(part).__name__}"
                )


def refuse_callers(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse wrappers and transforms around a model.

    Raises:
        StrettoError: naming the wrapper or transform.
    """
    outer = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if outer is not None and any(part is model for part in outer.modules()):
        raise StrettoError(
            "a BurstParallel inside DistributedDataParallel would have its "
            "gradients averaged twice: call the burst model itself"
        )
    in_forward_mode = torch.autograd.forward_ad._current_level >= 0  # noqa: SLF001
    # A transform may pass ordinary inputs, and wrap the parameters.
    in_transform = torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and (
            in_forward_mode or in_transform or _is_transformed(value)
        ):
            raise StrettoError(
                "torch.func transforms (grad, vmap, jacrev, jvp) and forward-mode "
                "differentiation can't pass through a burst model, whose layers "
                "run on several ranks: call it with ordinary tensors and "
                "backward(), or transform a model that is not burst parallel"
            )


def _is_transformed(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))  # noqa: SLF001
