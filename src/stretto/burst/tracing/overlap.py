"""Find tensors that overlap in memory, in one storage or in several.

# Note [Memory that layers share]
A buffer may be a part of a weight, and two tensors made from one array have storages of
their own at one address. An optimizer or a norm that writes through one of them changes
the others, but only on ranks that run its layer. So what overlaps belongs to one layer,
as a parameter that two modules share does.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    _Range = tuple[str, int, int, int]


def regions_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return a number for each tensor's id, equal for those that overlap.

    Between a tensor's first and last element there may be others that are not its own:
    these count as shared.
    """
    held = {id(tensor): tensor for tensor in tensors}
    ranges = sorted(r for t in held.values() if (r := _range_of(t)) is not None)
    found = {key: -1 - i for i, key in enumerate(held)}
    end, before = 0, ""
    for number, (device, first, last, key) in enumerate(ranges):
        if device != before or first >= end:
            region, end, before = number, last, device
        end = max(end, last)
        found[key] = region
    return found


def _range_of(tensor: Tensor) -> _Range | None:
    """Return a tensor's device, first and last byte, and id; ``None``: no memory."""
    try:
        first = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # of a class without storage
        return None
    if not first or not tensor.numel():
        return None
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in sides)
    return str(tensor.device), first, first + count * tensor.itemsize, id(tensor)


def shared_with(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether a tensor overlaps with another one of some."""
    regions = regions_of((tensor, *others))
    mine = regions.pop(id(tensor))
    return mine in regions.values()


def plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in attributes of a module, of those in it, and in hooks."""
    for part in module.modules():
        leaves = pytree.tree_leaves(dict(vars(part)))
        for leaf in leaves:
            for held in (leaf, *_bound_in(leaf)):
                if isinstance(held, Tensor):
                    yield held


def _bound_in(value: Any) -> list[Any]:
    """Return what a function closes over, or what a partial one was given."""
    bound: list[Any] = []
    if isinstance(value, functools.partial):
        bound += [value.args, value.keywords, *_bound_in(value.func)]
    for cell in getattr(value, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not yet filled
            bound.append(cell.cell_contents)
    return pytree.tree_leaves(bound)
