"""Compare what a program has cached since a capture with what the layers compute.

A process that runs the module itself, such as one rank that evaluates, fills caches of
constants that were empty at capture. The capture holds while they contain what its
layers compute instead.

A module with hooks runs as it is, as one operation, and fills its caches itself. What
it keeps there has no node; its values are those that a check of the layers computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from stretto.burst.tracing.comparing import BATCHES, is_equal
from stretto.burst.tracing.sample_positions import (
    nodes_before,
    source_line_of,
    value_of,
)

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
        self._inside: dict[Entry, list[Tensor]] = {}
        """Values of entries that modules fill which run as one operation."""

    def note_inside(self) -> str | None:
        """Record what modules that run as one operation keep, after layers have run.

        Return the name of a cache that now has other values than after an earlier run.
        """
        for cache in self._caches:
            for key, tensors in cache.tensors().items():
                entry = id(cache.holder.of), key
                if None not in self._nodes.get(entry, ()):
                    continue
                values = [tensor.detach().clone() for tensor in tensors]
                known = self._inside.setdefault(entry, values)
                if len(known) != len(values) or not all(map(is_equal, known, values)):
                    return cache.holder.name_of(key)
        return None

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
        values = self._values_of(entry)
        if len(values) != len(tensors):
            return False
        for value, tensor in zip(values, tensors, strict=True):
            if value is None or not is_equal(value, tensor.detach()):
                return False
        self._known[entry] = now
        return True

    def name_of(self, entry: Entry) -> str:
        """Return the name of an entry in the program, and the line that computes it."""
        name = next(
            cache.holder.name_of(entry[1])
            for cache in self._caches
            if id(cache.holder.of) == entry[0]
        )
        places = [
            source_line_of(node) for node in self._nodes[entry] if node is not None
        ]
        return f"{name!r} of {places[-1]}" if places else repr(name)

    def values(self) -> dict[Entry, list[Tensor | None]]:
        """Return the tensors that layers would compute now for each named entry."""
        return {entry: self._values_of(entry) for entry in self._nodes}

    def _values_of(self, entry: Entry) -> list[Tensor | None]:
        if entry in self._inside:
            return list(self._inside[entry])
        return [
            None if node is None else self._value_of(node)
            for node in self._nodes.get(entry, ())
        ]

    def sources(self) -> list[tuple[int, int]]:
        """Return the buffers from which entries are computed, and their versions."""
        read: dict[str, None] = {}
        for nodes in self._nodes.values():
            for node in nodes:
                before = nodes_before(node) if node is not None else ()
                read |= {str(n.target): None for n in before if n.op == "get_attr"}
        found = []
        for target in read:
            path, _, last = target.rpartition(".")
            held = getattr(self._root.get_submodule(path), last)
            found.append((id(held), getattr(held, "_version", 0)))
        return found

    def _value_of(self, node: fx.Node) -> Tensor | None:
        return value_of(self._root, node, self._counts, BATCHES[0])


@final
class FirstValues:
    """The constants that forward caches, as the model's first call computes them.

    One process keeps these, whatever changes later; layers compute them in each step.
    """

    def __init__(self) -> None:
        self._known: dict[Entry, list[Tensor | None]] = {}
        self._sources: dict[CachedValues, list[tuple[int, int]]] = {}

    def changed(self, cached: CachedValues) -> str | None:
        """Return a cache for which layers now compute something else, or None.

        A tensor of another shape is one that a program would compute again.
        """
        sources = cached.sources()
        if self._sources.get(cached) == sources:
            return None
        for entry, values in cached.values().items():
            first = self._known.setdefault(entry, values)
            for one, other in zip(first, values, strict=False):
                if not _may_follow(one, other):
                    return cached.name_of(entry)
        self._sources[cached] = sources
        return None


def _may_follow(first: Tensor | None, later: Tensor | None) -> bool:
    if first is None or later is None or first.shape != later.shape:
        return True
    with torch.no_grad():
        return is_equal(first, later)
