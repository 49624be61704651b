"""Follow values that a script puts into its lists and dicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import Origin
from stretto.convert._tree import Scope, argument, dotted, found

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.convert._flow import ScriptFlow
    from stretto.convert._tree import ScriptTree

_ADDING = ("append", "appendleft", "add")
_JOINING = ("extend", "extendleft", "update")
_READING = ("get", "pop", "setdefault", "__getitem__")

_EMPTY = (
    "dict",
    "list",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.deque",
)
"""Calls that make containers which contain nothing yet, but for their arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredElement:
    """One place that puts something into a container."""

    container: cst.BaseExpression
    key: str | None
    """The key's text; ``None`` without a key, or for one that is not a literal."""
    origin: Origin
    moves: bool = False
    """Whether elements get other places in a list."""


def literal(node: cst.BaseExpression | None) -> str | None:
    """Return the text of a key that is a literal, as it is compared."""
    if isinstance(node, cst.SimpleString):
        return node.value.strip("\"'")
    return node.value if isinstance(node, cst.Integer) else None


def element_of(
    node: cst.BaseExpression,
) -> tuple[cst.BaseExpression, cst.BaseExpression | None] | None:
    """Return the container and the key of an expression that takes an element."""
    if isinstance(node, cst.Subscript):
        index = node.slice[0].slice
        return node.value, index.value if isinstance(index, cst.Index) else None
    if (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in _READING
        and dotted(node.func.value) is not None
    ):
        return node.func.value, argument(node, 0, "key")
    return None


@final
class Containers:
    """The stores of a script into containers.

    Args:
        tree: The script.
        flow: Its assignments and calls.
        relevant: Whether a value may be what is looked for.
    """

    def __init__(
        self, tree: ScriptTree, flow: ScriptFlow, relevant: Callable[[Origin], bool]
    ) -> None:
        self._tree, self._flow, self._relevant = tree, flow, relevant

    def put(
        self, container: cst.BaseExpression, scope: Scope, key: str | None
    ) -> list[Origin]:
        """Return the origins of what is put into a container, under one key or any."""
        out: list[Origin] = []
        for name, origins in self.put_by_key(container, scope):
            if key is None or name in (None, key):
                out += origins
        return list({o.key: o for o in out}.values())

    def put_by_key(
        self, container: cst.BaseExpression, scope: Scope
    ) -> list[tuple[str | None, list[Origin]]]:
        """Return the keys, if known, and the origins of what is put in."""
        return [
            (store.key, self._followed(store.origin))
            for store in self._into(container, scope)
        ]

    def moves(self, container: cst.BaseExpression, scope: Scope) -> bool:
        """Return whether what is put in gives others another place in a list."""
        return any(store.moves for store in self._into(container, scope))

    def _into(self, container: cst.BaseExpression, scope: Scope) -> list[StoredElement]:
        path = dotted(container)
        home = None if path is None else self._flow.home(path, scope)
        of = {o.key for o in self._flow.origins(container, scope)}
        out = []
        for store in self._stores:
            inner = store.origin.scope
            same = path is not None and dotted(store.container) == path
            if (same and self._flow.home(path or "", inner) is home) or any(
                o.key in of for o in self._flow.origins(store.container, inner)
            ):
                out.append(store)
        return out

    @cached_property
    def keys(self) -> set[tuple[int | None, int | None]]:
        """The keys of the origins of all that is put into containers."""
        return {o.key for s in self._stores for o in self._followed(s.origin)}

    def is_empty(self, made: cst.BaseExpression) -> bool:
        """Return whether a call makes a container without anything in it."""
        return (
            isinstance(made, cst.Call)
            and self._tree.called(made) in _EMPTY
            and not any(isinstance(a.value, cst.Call) or a.star for a in made.args)
            and not any(a.keyword is not None for a in made.args)
        )

    @cached_property
    def _stores(self) -> list[StoredElement]:
        return [
            store
            for store in self._every()
            if any(self._relevant(o) for o in self._followed(store.origin))
        ]

    def _followed(self, origin: Origin) -> list[Origin]:
        """Return where a stored value comes from; one part of a call's stays itself."""
        if origin.place is not None:
            return [origin]
        return self._flow.origins(origin.value, origin.scope)

    def _every(self) -> Iterator[StoredElement]:
        for line in found(self._tree.module, cst.Assign):
            for target in line.targets:
                yield from self._assigned(target.target, line.value, line, None)
        for changed in found(self._tree.module, cst.AugAssign):
            for key, part in self._elements(changed.value, self._scope(changed), 4):
                yield self._store(changed.target, key, part, changed)
        for call in self._tree.calls:
            if isinstance(call.func, cst.Attribute):
                yield from self._called(call, call.func)

    def _scope(self, node: cst.CSTNode) -> Scope:
        return self._tree.function(node)

    def _store(
        self,
        container: cst.BaseExpression,
        key: str | None,
        value: cst.BaseExpression,
        at: cst.CSTNode,
        place: int | None = None,
        path: str | None = None,
    ) -> StoredElement:
        origin = Origin(
            value=value,
            scope=self._scope(value),
            statement=self._tree.statement(at),
            path=path,
            place=place,
        )
        return StoredElement(container=container, key=key, origin=origin)

    def _assigned(
        self,
        target: cst.BaseExpression,
        value: cst.BaseExpression,
        line: cst.Assign,
        place: int | None,
    ) -> Iterator[StoredElement]:
        if isinstance(target, cst.Subscript):
            taken = element_of(target)
            key = literal(taken[1]) if taken is not None else None
            path = None if place is None else self._tree.text(target)
            yield self._store(target.value, key, value, line, place, path)
        elif isinstance(target, cst.Tuple | cst.List):
            parts = target.elements
            if isinstance(value, cst.Tuple | cst.List):
                if len(value.elements) == len(parts):
                    for part, given in zip(parts, value.elements, strict=True):
                        yield from self._assigned(part.value, given.value, line, None)
            elif place is None:
                for number, part in enumerate(parts):
                    yield from self._assigned(part.value, value, line, number)

    def _called(self, call: cst.Call, func: cst.Attribute) -> Iterator[StoredElement]:
        method, on = func.attr.value, func.value
        given = [a.value for a in call.args if a.keyword is None and not a.star]
        if method in _ADDING and len(given) == 1:
            store = self._store(on, None, given[0], call)
            yield replace(store, moves=method == "appendleft")
        elif method in ("insert", "setdefault", "__setitem__") and len(given) == 2:
            moves = method == "insert"
            key = None if moves else literal(given[0])
            yield replace(self._store(on, key, given[1], call), moves=moves)
        elif method in _JOINING:
            for value in given:
                for key, part in self._elements(value, self._scope(call), 4):
                    yield self._store(on, key, part, call)
            for a in call.args if method == "update" else ():
                if a.keyword is not None:
                    yield self._store(on, a.keyword.value, a.value, call)

    def _elements(
        self, value: cst.BaseExpression, scope: Scope, depth: int
    ) -> Iterator[tuple[str | None, cst.BaseExpression]]:
        """Yield the keys and the elements of a container that is written down."""
        if depth == 0:
            return
        if isinstance(value, cst.Dict):
            for element in value.elements:
                if isinstance(element, cst.DictElement):
                    yield literal(element.key), element.value
        elif isinstance(value, cst.List | cst.Tuple | cst.Set):
            for item in value.elements:
                if isinstance(item, cst.Element):
                    yield None, item.value
        elif isinstance(value, cst.ListComp | cst.GeneratorExp | cst.SetComp):
            yield None, value.elt
        elif isinstance(value, cst.DictComp):
            yield None, value.value
        elif self._tree.called(value) == "dict" and isinstance(value, cst.Call):
            for a in value.args:
                if a.keyword is not None:
                    yield a.keyword.value, a.value
        elif dotted(value) is not None:
            for origin in self._flow.assigned(dotted(value) or "", scope):
                if origin.value is not value:
                    yield from self._elements(origin.value, origin.scope, depth - 1)
