"""Compare what a program has cached since a capture with what the layers compute.

A process that runs the module itself, such as one rank that evaluates, fills caches of
constants that were empty at capture. The capture holds while they contain what its
layers compute instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from stretto.burst.tracing.comparing import BATCHES, is_equal
from stretto.burst.tracing.places import value_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, fx

    from stretto.burst.tracing.caches import Cache

Entry = tuple[int, Any]
"""The id of what holds a cached value, and the key."""


@final
class CachedValues:
    """The tensors that a recorded forward kept in caches.

    Args:
        root: Holds all operations.
        counts: Nodes that are a number of samples, with its value for one.
        caches: With their entries at capture.
        nodes: The nodes of the tensors in each entry.
    """

    def __init__(
        self,
        root: fx.GraphModule,
        counts: Mapping[fx.Node, int],
        caches: Sequence[Cache],
        nodes: Mapping[Entry, Sequence[fx.Node | None]],
    ) -> None:
        self._root, self._counts, self._caches = root, counts, caches
        self._nodes = nodes
        self._known: dict[Entry, list[tuple[Tensor, int]]] = {}
        """Entries that were compared: their tensors and versions."""

    def hold(self) -> bool:
        """Return whether caches are as they were, or as the layers compute them."""
        for cache in self._caches:
            filled = cache.filled()
            if filled is None:
                return False
            for key, tensors in filled.items():
                if tensors and not self._is_equal((id(cache.holder.of), key), tensors):
                    return False
        return True

    def _is_equal(self, entry: Entry, tensors: list[Tensor]) -> bool:
        now = [(tensor, tensor._version) for tensor in tensors]  # noqa: SLF001
        known = self._known.get(entry, [])
        if [(id(t), v) for t, v in now] == [(id(t), v) for t, v in known]:
            return True
        nodes = self._nodes.get(entry, ())
        if len(nodes) != len(tensors):
            return False
        for node, tensor in zip(nodes, tensors, strict=True):
            if node is None:
                return False
            value = value_of(self._root, node, self._counts, BATCHES[0])
            if value is None or not is_equal(value, tensor.detach()):
                return False
        self._known[entry] = now
        return True
