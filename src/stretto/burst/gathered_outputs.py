"""Refuse a loss on gathered outputs of ranks with other numbers of samples.

# Note [Gathered outputs]
Where a function with a gradient gathers outputs, such as for a contrastive loss, its
backward adds the gradients of all ranks' losses. The model then multiplies the sum by
its rank's share. That is correct if shares are equal. Otherwise each loss would need
the share of its own rank, but only the sum is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.burst.boundary import is_output
from stretto.burst.held_activations import start_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_CALLS = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all"),
        *("all_to_all_single", "reduce_scatter", "reduce_scatter_tensor"),
    )
)
"""Collectives of ``torch.distributed`` whose names nothing else has."""


def gathered_unevenly(losses: Iterable[Tensor]) -> str | None:
    """Return the name of a function through which a loss gets other ranks' gradients.

    The outputs behind it are of a forward in which ranks had other numbers of samples.
    """
    for node in _behind(map(start_of, losses)):
        name = _gathering(node)
        if name is not None and any(
            is_output(other) and other.is_uneven for other in _behind([node])
        ):
            return name
    return None


def _behind(starts: Iterable[Any]) -> list[Any]:
    """Return autograd nodes up to the outputs of burst models."""
    seen: set[Any] = set()
    found: list[Any] = []
    left = list(starts)
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.append(node)
        if not is_output(node):
            left += [behind for behind, _ in node.next_functions]
    return found


def _gathering(node: Any) -> str | None:
    """Return the name of a function whose backward is collective, or ``None``."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None:
        return None
    name = str(function.__name__)
    if "_c10d_functional" in name:
        return name.partition("_c10d_functional")[2].strip("_")
    if str(function.__module__).startswith("torch.distributed."):
        return name
    code = getattr(function.backward, "__code__", None)
    calls = () if code is None else _CALLS.intersection(code.co_names)
    return name if calls else None
