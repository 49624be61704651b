"""Find which assignments of a variable can reach a line that reads it.

A name in a step may be the loader's batch size on one line and the length of this
rank's batch on another, so the order of the lines, branches and loops counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._tree import (
    Scope,
    children,
    dotted,
    found,
    stored_names,
    targets_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._flow import ScriptFlow
    from stretto.convert._tree import ScriptTree


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Binding:
    """One place that sets a variable."""

    value: cst.BaseExpression | None
    """The value that it gets; ``None`` if no expression gives it (a loop target)."""
    node: cst.CSTNode | None
    """Where it is set; ``None`` if nothing in the file sets it."""
    scope: Scope
    parameter: str | None = None
    """The parameter's name, if a call sets it."""
    changed: bool = False
    """Whether the value changes what the variable was, as ``n //= 2`` does."""


State = frozenset[Binding]

_Home = cst.CSTNode | None


@final
class Bindings:
    """The bindings of a script's names and attributes, and what they reach."""

    def __init__(self, tree: ScriptTree, flow: ScriptFlow) -> None:
        self._tree, self._flow = tree, flow
        self._declared: dict[tuple[Scope, str], bool] = {}
        lines: Iterator[cst.Global | cst.Nonlocal]
        lines = found(tree.module, (cst.Global, cst.Nonlocal))
        for line in lines:
            for item in line.names:
                place = (tree.function(line), item.name.value)
                self._declared[place] = isinstance(line, cst.Global)
        self._made: dict[tuple[int, str], Binding] = {}
        self._walks: dict[tuple[Scope, _Home, str], _Walk] = {}
        self._entering: set[tuple[Scope, _Home, str]] = set()
        self._stores: dict[str, list[tuple[cst.CSTNode, cst.BaseExpression | None]]]
        self._stores = {}
        for node in found(tree.module, cst.CSTNode):
            for path, value in _bound(node):
                self._stores.setdefault(path, []).append((node, value))

    def reaching(self, node: cst.Name | cst.Attribute) -> State:
        """Return the bindings of a name or an attribute that reach a line."""
        path = dotted(node)
        if path is None:
            return frozenset([self._unset(None, self._tree.text(node))])
        if "." not in path:
            inner = self._inner(node, path)
            if inner is not None:
                return frozenset([inner])
        scope = self._tree.function(node)
        home = self._home(path, scope)
        return self._at(node, scope, home, path)

    def read_outside(self, block: cst.CSTNode) -> str | None:
        """Return a variable that a block may set for a line outside of it."""
        inside = {
            path
            for path, places in self._stores.items()
            if any(self._tree.within(node, block) for node, _ in places)
        }
        every: Iterator[cst.Name | cst.Attribute]
        every = found(self._tree.module, (cst.Name, cst.Attribute))
        for node in every:
            path = dotted(node)
            if (
                path in inside
                and not self._tree.is_label(node)
                and id(node) not in self._only_set
                and not self._tree.within(node, block)
                and any(
                    made.node is not None and self._tree.within(made.node, block)
                    for made in self.reaching(node)
                )
            ):
                return path
        return None

    @cached_property
    def _only_set(self) -> set[int]:
        """The names and attributes that a line sets without reading them."""
        out: set[int] = set()
        for node in found(self._tree.module, cst.CSTNode):
            if not isinstance(node, cst.AugAssign):
                waiting = targets_of(node)
                while waiting:
                    target = waiting.pop()
                    out.add(id(target))
                    if isinstance(target, cst.Tuple | cst.List):
                        waiting += [element.value for element in target.elements]
        return out

    def _inner(self, node: cst.CSTNode, name: str) -> Binding | None:
        """Return the comprehension or lambda around a name that sets it."""
        for above in self._tree.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                return None
            if isinstance(above, cst.Lambda) and name in {
                p.name.value for p in found(above.params, cst.Param)
            }:
                return self._binding(above, name, None, parameter=name)
            if isinstance(above, cst.BaseComp):
                first = above.for_in
                for part in found(first, cst.CompFor):
                    names = {n.value for n in stored_names(part.target)}
                    if name in names and not self._tree.within(node, first.iter):
                        return self._binding(part, name, None)
        return None

    def _home(self, path: str, scope: Scope) -> _Home:
        """Return what a variable belongs to: a function, a class or the module."""
        if "." in path:
            owner = self._tree.owner(scope) if path.startswith("self.") else None
            return owner or self._tree.module
        here = scope
        while here is not None:
            if (here, path) in self._declared:
                if self._declared[here, path]:
                    return None
            elif path in parameters(here) or self._sets(here, path):
                return here
            here = self._tree.function(here)
        return None

    def _sets(self, scope: Scope, path: str) -> bool:
        """Return whether a function itself sets a variable."""
        return any(
            self._tree.function(node) is scope and not self._in_class(node)
            for node, _ in self._stores.get(path, [])
        )

    def _in_class(self, node: cst.CSTNode) -> bool:
        """Return whether a line is of the body of a class, not of a function."""
        for above in self._tree.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                return False
            if isinstance(above, cst.ClassDef):
                return True
        return False

    def _all(self, home: _Home, path: str) -> list[Binding]:
        """Return all bindings of a variable."""
        out = []
        family = self._tree.family(home) if isinstance(home, cst.ClassDef) else [home]
        for node, value in self._stores.get(path, []):
            scope = self._tree.function(node)
            if "." not in path and self._in_class(node):
                continue
            if self._home(path, scope) in family:
                out.append(self._binding(node, path, value))
        if isinstance(home, cst.FunctionDef) and path in parameters(home):
            out.append(self._binding(home, path, None, parameter=path))
        attribute_outside = "." in path and not isinstance(home, cst.ClassDef)
        if attribute_outside or not out:
            out.append(self._unset(home, path))
        return out

    def _at(self, node: cst.CSTNode, scope: Scope, home: _Home, path: str) -> State:
        """Return the bindings that reach a node of a scope."""
        key = (scope, home, path)
        every = self._all(home, path)
        if key in self._entering or len(every) == 1:
            return frozenset(every)
        if key not in self._walks:
            self._entering.add(key)
            entry = self._entry(scope, home, path)
            self._entering.discard(key)
            self._walks[key] = _Walk(self, path, entry)
            self._walks[key].run(scope, self._tree.module)
        state = self._walks[key].at.get(id(node))
        if state is None:
            return frozenset(every)
        if scope is home or (scope is None and home is self._tree.module):
            return state | self._elsewhere(scope, home, path)
        return state

    def _elsewhere(self, scope: Scope, home: _Home, path: str) -> State:
        """Return the bindings that other functions make at any time."""
        return frozenset(
            b
            for b in self._all(home, path)
            if b.node is not None and b.parameter is None and b.scope is not scope
        )

    def _entry(self, scope: Scope, home: _Home, path: str) -> State:
        """Return the bindings that reach the beginning of a scope."""
        every = frozenset(self._all(home, path))
        if scope is None or scope is home:
            return frozenset(
                b for b in every if b.parameter is not None or b.node is None
            )
        if isinstance(home, cst.ClassDef):
            own = [b for b in every if b.scope is scope]
            begins = scope.name.value == "__init__"
            return every - frozenset(own) if begins else every
        calls = self._flow.calls_of(scope)
        reached: State = frozenset()
        for call in calls:
            reached |= self._at(call, self._tree.function(call), home, path)
        return reached if calls else every

    def _unset(self, home: _Home, path: str) -> Binding:
        return self._made.setdefault(
            (id(home), path), Binding(value=None, node=None, scope=None)
        )

    def _binding(
        self,
        node: cst.CSTNode,
        path: str,
        value: cst.BaseExpression | None,
        parameter: str | None = None,
    ) -> Binding:
        key = (id(node), path if parameter is None else f"({path})")
        if key not in self._made:
            is_parameter = parameter is not None and isinstance(node, cst.FunctionDef)
            scope = node if is_parameter else self._tree.function(node)
            self._made[key] = Binding(
                value=value,
                node=node,
                scope=scope if isinstance(scope, cst.FunctionDef) else None,
                parameter=parameter,
                changed=isinstance(node, cst.AugAssign),
            )
        return self._made[key]

    def made_by(self, node: cst.CSTNode, path: str) -> Binding | None:
        """Return the binding of a variable by one statement or part of it."""
        for name, value in _bound(node):
            if name == path:
                return self._binding(node, path, value)
        return None


def _bound(
    node: cst.CSTNode,
) -> Iterator[tuple[str, cst.BaseExpression | None]]:
    """Yield the variables that a statement or an expression sets, with the values."""
    if isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign | cst.NamedExpr):
        if node.value is None:
            return
        for target in targets_of(node):
            yield from _pairs(target, node.value)
    elif isinstance(node, cst.For | cst.WithItem):
        for target in targets_of(node):
            yield from ((path, None) for path, _ in _pairs(target, None))
    elif isinstance(node, cst.ImportAlias):
        name = node.asname.name if node.asname is not None else node.name
        yield (dotted(name) or "").partition(".")[0], None
    elif isinstance(node, cst.FunctionDef | cst.ClassDef):
        yield node.name.value, None
    elif isinstance(node, cst.ExceptHandler) and node.name is not None:
        yield dotted(node.name.name) or "", None
    elif isinstance(node, cst.MatchAs | cst.MatchStar) and node.name is not None:
        yield node.name.value, None


def _pairs(
    target: cst.BaseExpression, value: cst.BaseExpression | None
) -> Iterator[tuple[str, cst.BaseExpression | None]]:
    path = dotted(target)
    if path is not None:
        yield path, value
    elif isinstance(target, cst.StarredElement):
        yield from _pairs(target.value, None)
    elif isinstance(target, cst.Tuple | cst.List):
        parts = target.elements
        given: list[cst.BaseExpression | None] = [value] * len(parts)
        if isinstance(value, cst.Tuple | cst.List):
            same = len(value.elements) == len(parts)
            given = [e.value for e in value.elements] if same else [None] * len(parts)
        for part, inner in zip(parts, given, strict=True):
            starred = isinstance(part, cst.StarredElement)
            yield from _pairs(part.value, None if starred else inner)


@final
class _Walk:
    """Follow the statements of one scope with the bindings that reach each."""

    def __init__(self, bindings: Bindings, path: str, entry: State) -> None:
        self._bindings, self._path, self._entry = bindings, path, entry
        self.at: dict[int, State] = {}
        self._made: list[Binding] = []
        self._leaves: list[list[State]] = []
        """The states in which a loop is left, then those that continue it."""

    def run(self, scope: Scope, module: cst.Module) -> None:
        """Follow a function, or the module."""
        self._block(module if scope is None else scope.body, self._entry)

    def _block(self, block: cst.CSTNode, state: State | None) -> State | None:
        for line in children(block):
            state = self._statement(line, state)
        return state

    def _statement(self, line: cst.CSTNode, state: State | None) -> State | None:
        if state is None:
            return None  # not reached
        if isinstance(line, cst.SimpleStatementLine):
            return self._block(line, state)
        if isinstance(line, cst.If):
            state = self._expression(line.test, state)
            return _merged(
                self._block(line.body, state), self._other(line.orelse, state)
            )
        if isinstance(line, cst.For | cst.While):
            return self._loop(line, state)
        if isinstance(line, cst.Try | cst.TryStar):
            return self._try(line, state)
        if isinstance(line, cst.With):
            for item in line.items:
                state = self._set(item, self._expression(item.item, state))
            return self._block(line.body, state)
        if isinstance(line, cst.Match):
            return self._match(line, state)
        if isinstance(line, cst.FunctionDef | cst.ClassDef):
            for child in children(line):
                if child is not line.body:
                    self._expression(child, state)
            if isinstance(line, cst.ClassDef):
                self._expression(line.body, state)
            return self._set(line, state)
        return self._simple(line, state)

    def _simple(self, line: cst.CSTNode, state: State) -> State | None:
        if isinstance(line, cst.Break | cst.Continue) and self._leaves:
            self._leaves[-1 if isinstance(line, cst.Continue) else -2].append(state)
            return None
        state = self._expression(line, state)
        if isinstance(line, cst.Return | cst.Raise):
            return None
        if isinstance(line, cst.Import | cst.ImportFrom):
            for alias in found(line, cst.ImportAlias):
                state = self._set(alias, state)
        return self._set(line, state)

    def _other(self, orelse: cst.CSTNode | None, state: State) -> State | None:
        if isinstance(orelse, cst.Else | cst.Finally):
            return self._block(orelse.body, state)
        return state if orelse is None else self._statement(orelse, state)

    def _loop(self, line: cst.For | cst.While, state: State) -> State | None:
        if isinstance(line, cst.For):
            state = self._expression(line.iter, state)
        head = state
        while True:
            begin = head
            if isinstance(line, cst.While):
                begin = ended = self._expression(line.test, head)
            else:
                begin, ended = self._set(line, head), head
            breaks: list[State] = []
            continues: list[State] = []
            self._leaves += [breaks, continues]
            last = self._block(line.body, begin)
            del self._leaves[-2:]
            after = _merged(head, last, *continues) or head
            if after == head:
                return _merged(self._other(line.orelse, ended), *breaks)
            head = after

    def _try(self, line: cst.Try | cst.TryStar, state: State) -> State | None:
        before = len(self._made)
        done = self._block(line.body, state)
        during = state | frozenset(self._made[before:])
        if done is not None:
            done = self._other(line.orelse, done)
        ends = [self._block(h.body, self._set(h, during)) for h in line.handlers]
        out = _merged(done, *ends)
        if line.finalbody is None:
            return out
        during |= frozenset(self._made[before:])
        after = self._other(line.finalbody, during if out is None else out)
        return None if out is None else after

    def _match(self, line: cst.Match, state: State) -> State | None:
        state = self._expression(line.subject, state)
        ends: list[State | None] = [state]
        for case in line.cases:
            inner = state
            for part in found(case.pattern, (cst.MatchAs, cst.MatchStar)):
                inner = self._set(part, inner)
            ends.append(self._block(case.body, inner))
        return _merged(*ends)

    def _set(self, node: cst.CSTNode, state: State) -> State:
        made = self._bindings.made_by(node, self._path)
        if made is None:
            return state
        self._made.append(made)
        return frozenset([made])

    def _expression(self, node: cst.CSTNode, state: State) -> State:
        """Note what reaches each part of an expression; return what holds after it."""
        self.at[id(node)] = self.at.get(id(node), frozenset()) | state
        if isinstance(node, cst.BooleanOperation):
            left = self._expression(node.left, state)
            return left | self._expression(node.right, left)
        if isinstance(node, cst.IfExp):
            state = self._expression(node.test, state)
            first = self._expression(node.body, state)
            return first | self._expression(node.orelse, state)
        now = state
        for child in children(node):
            now = self._expression(child, now)
        if isinstance(node, cst.BaseComp | cst.Lambda):
            return state | now
        return self._set(node, now) if isinstance(node, cst.NamedExpr) else now


def _merged(*states: State | None) -> State | None:
    reached = [s for s in states if s is not None]
    return frozenset().union(*reached) if reached else None
