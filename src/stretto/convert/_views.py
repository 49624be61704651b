"""Find out whether an expression sees a model wrapped at a place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import Key, parameters
from stretto.convert._tree import Scope, dotted

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._flow import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A statement after which a model is wrapped under one of its names."""

    path: str
    scope: Scope
    at: cst.CSTNode
    last_line: int
    """The last line on which the model is not wrapped yet."""
    first_line: int = 0
    """The line from which the name means this model, if it meant another before."""
    values: frozenset[Key] = frozenset()
    """The model's values, as `ScriptFlow.reached` returns them."""
    others: frozenset[Key] = frozenset()
    """The values of the other trained models."""


@final
class Views:
    """Follows expressions back to where a model is wrapped."""

    def __init__(self, work: Work) -> None:
        self._tree, self._flow = work.tree, work.flow

    def wrapped(self, node: cst.BaseExpression, site: Site) -> bool:
        """Return whether an expression's object is the wrapped model."""
        scope = self._tree.function(node)
        return self._wrapped(node, scope, self._tree.line(node), site, set())

    def names(
        self, nodes: list[tuple[cst.BaseExpression, Scope]]
    ) -> list[tuple[str, Scope]]:
        """Return the names through which expressions get their object, last first."""
        out: list[tuple[str, Scope]] = []
        seen: set[tuple[int, int]] = set()
        for node, scope in nodes:
            waiting = [(node, scope)]
            while waiting:
                value, inner = waiting.pop(0)
                if (id(value), id(inner)) in seen:
                    continue
                seen.add((id(value), id(inner)))
                for origin in self._assigned(value, inner):
                    if origin.path is not None:
                        name = (origin.path, origin.scope)
                        if not any(n == name[0] and s is name[1] for n, s in out):
                            out.append(name)
                    waiting.append((origin.value, origin.scope))
                    waiting += self._same(origin.value, origin.scope, origin.place)
                waiting += self._same(value, inner, None)
                waiting += [
                    (v, self._tree.function(c)) for c, v in self._passed(value, inner)
                ]
        return out

    def _wrapped(
        self,
        node: cst.BaseExpression,
        scope: Scope,
        line: int,
        site: Site,
        seen: set[tuple[int, int]],
    ) -> bool:
        if (id(node), line) in seen:
            return True  # one round of a cycle: decided by its other members
        seen.add((id(node), line))
        path = dotted(node)
        if path is None:
            return self._of_result(node, scope, None, line, site, seen)
        if self._is_site(path, scope, site):
            here = scope is site.scope
            return not here or not site.first_line <= line <= site.last_line
        if self._is_of_object(node, scope, site):
            return True
        made = self._last(self._assigned(node, scope), scope, line)
        passed = self._passed(node, scope)
        first = min((self._tree.line(o.statement) for o in made), default=0)
        if made and not (passed and line <= first):
            return all(self._of_assigned(o, site, seen) for o in made)
        return all(
            self._wrapped(v, self._tree.function(c), self._tree.line(c), site, seen)
            for c, v in passed
            if self._may_be(v, self._tree.function(c), site)
        )

    def _may_be(self, node: cst.BaseExpression, scope: Scope, site: Site) -> bool:
        """Return whether an expression may be a site's model, not surely another."""
        reached = self._flow.reached(node, scope)
        return not site.values.isdisjoint(reached) or site.others.isdisjoint(reached)

    def _of_assigned(
        self, origin: Origin, site: Site, seen: set[tuple[int, int]]
    ) -> bool:
        line = self._tree.line(origin.statement)
        if origin.place is None and dotted(origin.value) is not None:
            return self._wrapped(origin.value, origin.scope, line, site, seen)
        return self._of_result(
            origin.value, origin.scope, origin.place, line, site, seen
        )

    def _of_result(
        self,
        node: cst.BaseExpression,
        scope: Scope,
        place: int | None,
        line: int,
        site: Site,
        seen: set[tuple[int, int]],
    ) -> bool:
        same = self._same(node, scope, place)
        return bool(same) and all(
            self._wrapped(
                value,
                inner,
                line if inner is scope else self._tree.line(value),
                site,
                seen,
            )
            for value, inner in same
        )

    def _is_site(self, path: str, scope: Scope, site: Site) -> bool:
        """Return whether a name is the one that is bound to the wrapper."""
        if path != site.path:
            return False
        here, there = self._home(path, scope), self._flow.home(site.path, site.scope)
        if here is there:
            return True
        return (
            isinstance(here, cst.ClassDef)
            and isinstance(there, cst.ClassDef)
            and there in self._tree.family(here)
        )

    def _is_of_object(self, node: cst.BaseExpression, scope: Scope, site: Site) -> bool:
        """Return whether ``gan.net`` is the ``self.net`` that a class's methods wrap.

        If ``__init__`` wraps it, every object has the wrapper once it is created.
        """
        if site.scope is None or site.scope.name.value != "__init__":
            return False
        made = self._flow.of_objects(node, scope)
        return bool(made) and all(
            o.path is not None and self._is_site(o.path, o.scope, site) for o in made
        )

    def _home(self, path: str, scope: Scope) -> cst.CSTNode | None:
        """Return the function, class or module that a name is a variable of."""
        if path.startswith("self."):
            return self._flow.home(path, scope)
        first = path.partition(".")[0]
        here = scope
        while here is not None:
            own = any(o.scope is here for o in self._flow.assigned(path, here))
            if own or first in parameters(here):
                return here
            here = self._tree.function(here)
        return None

    def _assigned(self, node: cst.BaseExpression, scope: Scope) -> list[Origin]:
        path = dotted(node)
        if path is None:
            return []
        if found := self._flow.assigned(path, scope):
            return found
        if isinstance(node, cst.Attribute) and dotted(node.value) != "self":
            return self._flow.of_objects(node, scope)
        return []

    def _last(self, made: list[Origin], scope: Scope, line: int) -> list[Origin]:
        """Return the assignments that may still be in effect on a line."""
        before = [
            o
            for o in made
            if o.scope is not scope or self._tree.line(o.statement) < line
        ]
        before = before or made
        for place in range(len(before) - 1, 0, -1):
            statement = before[place].statement
            block = self._tree.parent(statement)
            around = before[place].scope
            whole = self._tree.module if around is None else around.body
            if block is whole:
                return before[place:]
        return before

    def _same(
        self, node: cst.BaseExpression, scope: Scope, place: int | None
    ) -> list[tuple[cst.BaseExpression, Scope]]:
        return [
            (v, inner) for v, inner, _ in self._flow.same_object(node, scope, place)
        ]

    def _passed(
        self, node: cst.BaseExpression, scope: Scope
    ) -> list[tuple[cst.Call, cst.BaseExpression]]:
        """Return what calls pass for the parameter that a name is."""
        path = dotted(node)
        here = scope
        while here is not None and path is not None:
            if path in parameters(here):
                return list(self._flow.passed(here, path))
            here = self._tree.function(here)
        return []
