"""Views of a tensor, where forward writes in place.

# Note [Writes through views]
Layers pass values, not memory. After a write through a view, such as ``h[:, 0] += 1``,
the tensor that owns the memory is recorded again, as a copy in which this part is
replaced. Its other views are taken from it again when they are next read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stretto.burst.tracing.records import Record

    Step = tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...]]
    """A method that gives a view, its arguments, and the place in its result."""

    Steps = tuple[Step, ...]

_VIEWS = frozenset(
    {
        "__getitem__",
        "chunk",
        "diagonal",
        "flatten",
        "movedim",
        "narrow",
        "permute",
        "reshape",
        "select",
        "split",
        "squeeze",
        "swapaxes",
        "swapdims",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
    }
)
"""Methods whose results may be views, and do nothing else then."""


def step_of(record: Record, path: tuple[Any, ...]) -> Step | None:
    """Return the step by which an operation made one of its results, if it is known."""
    name = str(getattr(record.target, "__name__", record.target))
    if name not in _VIEWS:
        return None
    is_function = record.kind == "call_function"
    if is_function and getattr(torch, name, None) is not record.target:
        return None
    return name, record.args[1:], record.kwargs, path


def viewed(owner: Tensor, steps: Steps) -> Tensor:
    """Return a view of a tensor."""
    for name, args, kwargs, path in steps:
        found = getattr(owner, name)(*args, **kwargs)
        for key in path:
            found = found[key]
        owner = found
    return owner


def written_through(owner: Tensor, value: Tensor, steps: Steps) -> Tensor:
    """Return a copy of a tensor in which a view of it has a value."""
    made = owner.clone()
    viewed(made, steps).copy_(value)
    return made
