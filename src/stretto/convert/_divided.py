"""Find what goes through the batches of a loader that is divided among ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._batch_loops import WRAPPERS
from stretto.convert._tree import Scope, dotted, found, stored_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stretto.convert._edit import Work
    from stretto.convert._loaders import Loaders


@final
class DividedIterables:
    """Expressions that may go through a divided loader, also under other names.

    ``events`` are the loops, assignments and calls of each function by its ``id``; it
    may be filled later.
    """

    def __init__(
        self,
        work: Work,
        loaders: Loaders,
        events: Mapping[int, Sequence[cst.CSTNode]],
    ) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._loaders, self._events = loaders, events
        self._dividing: dict[int, bool] = {}

    def is_divided(self, node: cst.BaseExpression, depth: int = 4) -> bool:
        """Return whether an expression may go through batches of a divided loader."""
        above = self._tree.parent(node)
        if isinstance(above, cst.Arg):
            above = self._tree.parent(above)
        if above in self._work.whole:
            return False  # what a loop or `next` goes through
        key = id(node)
        if key not in self._dividing:
            self._dividing[key] = False
            self._dividing[key] = self._may_divide(node, depth)
        return self._dividing[key]

    def _may_divide(self, node: cst.BaseExpression, depth: int) -> bool:
        scope = self._tree.function(node)
        if self._loaders.has_divided(self._work.job.batches.taken(node, scope)):
            return True
        while isinstance(node, cst.Call) and self._tree.called(node) in WRAPPERS:
            if not node.args:
                return False
            node = node.args[0].value
        path = dotted(node)
        if path is None or depth == 0:
            return False
        for origin in self._flow.assigned(path, scope):
            if self._tree.called(origin.value) in WRAPPERS and self.is_divided(
                origin.value, depth - 1
            ):
                return True
        if any(
            self._loaders.has_divided(self._work.job.batches.put(around.iter, scope))
            for around in self._events.get(id(scope), [])
            if isinstance(around, cst.For | cst.CompFor)
            and any(n.value == path for n in stored_names(around.target))
        ):
            return True
        return any(
            self.is_divided(part, depth - 1)
            for around in self._events.get(id(scope), [])
            if isinstance(around, cst.For | cst.CompFor)
            and any(n.value == path for n in stored_names(around.target))
            for part in self._elements(around.iter, scope)
        )

    def _elements(
        self, node: cst.BaseExpression, scope: Scope
    ) -> Iterator[cst.BaseExpression]:
        """Yield the names in a tuple, a list or a dict that a loop goes through."""
        on = node
        if isinstance(node, cst.Call):
            given = self._tree.method_called(node, "items", "values")
            on = given if given is not None else node
        values = [on]
        if (path := dotted(on)) is not None:
            values = [o.value for o in self._flow.assigned(path, scope)]
        for value in values:
            if isinstance(value, cst.Tuple | cst.List | cst.Dict):
                yield from found(value, (cst.Name, cst.Attribute, cst.Call))
