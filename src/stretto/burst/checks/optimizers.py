"""Find what an optimizer keeps outside its ``state``, which must be equal on all ranks.

`BurstParallel` sends the entries of ``optimizer.state`` from rank to rank. Values that
an optimizer keeps elsewhere, in its parameter groups or its own attributes, stay on
each rank. Nothing is lost as long as they are the same everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.burst.memory import bytes_of
from stretto.burst.tracing.freezing import ATOMS

if TYPE_CHECKING:
    from collections.abc import Iterable

_DEPTH = 4
_LATER = frozenset(("state", "param_groups", "defaults"))


def kept_outside(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Return digests of what optimizers keep outside their state, by place.

    Functions, hooks and the standard attributes of ``torch.optim`` are left out.
    """
    found: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        place = f"{name} {number}" if number else name
        index = {
            id(p): f"parameter {i}"
            for i, p in enumerate(
                p for group in optimizer.param_groups for p in group["params"]
            )
        }
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    where = f"entry {key!r} of {place}'s parameter group {i}"
                    found[where] = _digest(value, index)
        plain = _PLAIN | _private_of_torch(type(optimizer))  # type: ignore[arg-type]
        for key, value in vars(optimizer).items():
            if key in plain or key in _LATER or callable(value):
                continue
            found[f"attribute {key!r} of {place}"] = _digest(value, index)
    return found


@functools.cache
def _private_of_torch(kind: type[Optimizer]) -> frozenset[str]:
    """Return private names in the code of a class's bases that PyTorch brings.

    Such as whether tensors were checked for a fused step, which only a step with
    gradients does. Trained values are in ``state``.
    """
    return frozenset(
        name
        for base in kind.__mro__
        if base.__module__.partition(".")[0] == "torch"
        for method in vars(base).values()
        if inspect.isfunction(method)
        for name in inspect.unwrap(method).__code__.co_names
        if name.startswith("_")
    )


def first_difference(rows: Sequence[Mapping[str, str]]) -> tuple[str, int] | None:
    """Return where ranks' digests differ, and the first rank that differs from 0."""
    for key in sorted({key for row in rows for key in row}):
        for rank, row in enumerate(rows):
            if row.get(key) != rows[0].get(key):
                return key, rank
    return None


def _digest(value: Any, index: Mapping[int, str]) -> str:
    sha = hashlib.sha256()
    for part in _parts(value, index, _DEPTH):
        sha.update(part)
        sha.update(b"\0")
    return sha.hexdigest()[:16]


def _parts(value: Any, index: Mapping[int, str], depth: int) -> Iterable[bytes]:
    if id(value) in index:
        yield index[id(value)].encode()
    elif isinstance(value, ATOMS):
        yield f"{type(value).__name__} {value!r}".encode()
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if value.layout == torch.strided:
            yield bytes(bytes_of(value))
    elif depth == 0 or callable(value):
        yield type(value).__name__.encode()
    elif isinstance(value, Mapping):
        yield f"{type(value).__name__} {len(value)}".encode()
        for key, held in value.items():
            yield from _parts(key, index, depth - 1)
            yield from _parts(held, index, depth - 1)
    elif isinstance(value, Set):
        every = [b" ".join(_parts(held, index, depth - 1)) for held in value]
        yield from sorted(every)
    elif isinstance(value, Sequence):
        yield f"{type(value).__name__} {len(value)}".encode()
        for held in value:
            yield from _parts(held, index, depth - 1)
    else:
        yield type(value).__name__.encode()
        if isinstance(value, Optimizer):
            yield repr(kept_outside([value])).encode()
            return
        for key, held in getattr(value, "__dict__", {}).items():
            yield key.encode()
            yield from _parts(held, index, depth - 1)


_PLAIN = frozenset(
    vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
) | frozenset(("_step_count", "_opt_called"))
"""Attributes of every optimizer, and those that schedulers set."""
