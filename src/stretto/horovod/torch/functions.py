"""Send parameters, optimizer state and objects to all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.torch.allgather import allgather
from stretto.horovod.torch.broadcast import broadcast_, broadcast_async_
from stretto.horovod.torch.submission import synchronize
from stretto.horovod.world import rank, size

if TYPE_CHECKING:
    from torch import nn


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Send parameters from one rank to all, in place.

    Args:
        params: A model's ``state_dict()`` or ``named_parameters()``, or a list of
            parameters.
        root_rank: The rank whose values are sent.

    Raises:
        ValueError: ``params`` has another type, or contains values other than tensors.
        HorovodInternalError: ranks have different parameters.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(  # noqa: TRY004
            "params must be a state_dict, named_parameters() or a list of parameters, "
            f"got a {type(params).__name__}"
        )
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(  # noqa: TRY004
                f"params must contain tensors, got {type(tensor).__name__} as {name}. "
                "Send it with broadcast_object()."
            )
    under_way = [
        broadcast_async_(tensor.detach(), root_rank, name) for name, tensor in pairs
    ]
    for operation in under_way:
        synchronize(operation)


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """Replaces a tensor in a state that is sent as an object."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None
) -> None:
    """Send an optimizer's state and options from one rank to all.

    Everything keeps its type. Ranks whose optimizer has not stepped yet get the root's
    state without stepping, so no parameter changes; if the root has no state either,
    missing gradients become zeros, as in Horovod.

    Args:
        optimizer: Any class in torch.optim except LBFGS, distributed or not.
        root_rank: The rank whose state is sent.
        model: Has no effect: no step is needed to create state.

    Raises:
        ValueError: the optimizer is LBFGS, or has different numbers of parameters on
            other ranks.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(  # noqa: TRY004
            "the state of torch.optim.LBFGS can't be broadcast: its history is nested. "
            "Send optimizer.state_dict() with broadcast_object(), or broadcast before "
            "the first step."
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    by_rank = allgather_object(sizes, name="optimizer.sizes")
    if any(theirs != by_rank[root_rank] for theirs in by_rank):
        raise ValueError(
            "ranks have optimizers with different numbers of parameters in their "
            f"groups, by rank: {by_rank}. Create the same optimizer on all ranks."
        )
    tensors: list[torch.Tensor] = []
    state = optimizer.state_dict()
    mine = rank() == root_rank
    plan = _without_tensors(state, tensors) if mine else None
    plan = broadcast_object(plan, root_rank, name="optimizer.state")
    if not mine:
        _new_tensors(plan, tensors)
    broadcast_parameters(
        [(f"optimizer.{i:06d}", tensor) for i, tensor in enumerate(tensors)], root_rank
    )
    if not mine:
        _load_in_place(optimizer, _with_tensors(plan, tensors))
    if not plan["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, requires_grad=False)


def _load_in_place(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Load a state into the groups that exist: schedulers may hold them.

    PyTorch's ``load_state_dict`` makes new ones, and a scheduler of the optimizer that
    `DistributedOptimizer` has wrapped would continue to change the old ones.
    """
    before = list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    for old, new in zip(before, optimizer.param_groups, strict=True):
        if old is not new:
            old.clear()
            old.update(new)
    optimizer.param_groups[:] = before


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` with each tensor replaced by its place in ``tensors``."""
    if isinstance(value, torch.Tensor):
        place = _Place(len(tensors), value.dtype, tuple(value.shape), value.device.type)
        tensors.append(value.detach().contiguous())
        return place
    return _mapped(value, lambda inner: _without_tensors(inner, tensors))


def _new_tensors(value: Any, tensors: list[torch.Tensor]) -> None:
    """Fill ``tensors`` with memory for each place in ``value``, in order."""
    if isinstance(value, _Place):
        device = value.device
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=device))
    else:
        _mapped(value, lambda inner: _new_tensors(inner, tensors))


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    return _mapped(value, lambda inner: _with_tensors(inner, tensors))


def _mapped(value: Any, change: Any) -> Any:
    """Return ``value`` with ``change`` applied inside its dicts, lists and tuples."""
    if type(value) is dict:
        return {key: change(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)([change(inner) for inner in value])
    return value


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the root rank, on every rank.

    Objects are pickled, and unpickled on the other ranks: only between the ranks of one
    job, which run the same program.

    Args:
        obj: Any picklable object; used only on the root rank.
        root_rank: The global rank whose object is sent.
        name: The same on all ranks; by default the name of the object's type, which
            then must be the same on all ranks.
        process_set: The participating ranks.

    Raises:
        HorovodInternalError: ranks have different names or roots.
        ValueError: a rank is not in the process set.
    """
    name = name or type(obj).__name__
    mine = rank() == root_rank
    packed = torch.empty(0, dtype=torch.uint8)
    if mine:
        packed = _pickled(obj)
    length = torch.tensor([packed.numel()])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if not mine:
        packed = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(packed, root_rank, f"{name}.bytes", process_set)
    return obj if mine else pickle.loads(packed.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's object, by rank.

    Objects are pickled, as in `broadcast_object`.

    Args:
        obj: Any picklable object.
        name: As in `broadcast_object`.

    Raises:
        HorovodInternalError: ranks have different names.
    """
    name = name or type(obj).__name__
    packed = _pickled(obj)
    lengths = allgather(torch.tensor([packed.numel()]), f"{name}.lengths").tolist()
    everything = allgather(packed, f"{name}.bytes")
    found = [pickle.loads(part.numpy().tobytes()) for part in everything.split(lengths)]
    if len(found) != size():
        raise AssertionError("an all-gather gives one part for each rank")
    return found


def _pickled(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
