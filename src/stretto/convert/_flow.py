"""Trace where a variable's value comes from: names, attributes and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import Scope, ScriptTree, argument, dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterator

_INIT = "__init__"
_CALL = "__call__"

_DEPTH = 4
"""Number of calls, of functions with several callers, through which an object is
followed.
"""

Key = tuple[int | None, ...]
"""Identity of a value: its expression, its place, and the calls on the way to it."""

SAME_OBJECT = (
    "to",
    "cuda",
    "cpu",
    "half",
    "float",
    "double",
    "bfloat16",
    "train",
    "eval",
    "requires_grad_",
    "apply",
    "share_memory",
    "type",
    "to_empty",
)
"""Methods of a module that return the module."""

WRAPPING = (
    "torch.compile",
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
)
"""Functions whose result runs the module that they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An expression that first created a variable's value."""

    value: cst.BaseExpression
    scope: Scope
    statement: cst.CSTNode
    path: str | None
    """The variable assigned here; ``None`` if the value is passed on directly."""
    place: int | None = None
    """Index of the variable, if a call's result is unpacked into several."""

    @property
    def key(self) -> tuple[int | None, int | None]:
        """Return what distinguishes this value from others."""
        return id(self.value), self.place


@final
class ScriptFlow:
    """Assignments and calls of one script."""

    def __init__(self, tree: ScriptTree) -> None:
        self._tree = tree
        self._callers: dict[cst.FunctionDef, list[cst.Call]] = {}
        self._searching: set[cst.FunctionDef] = set()
        self._resolving: set[cst.Attribute] = set()
        self._callees: dict[cst.Call, list[cst.FunctionDef]] | None = None
        self._assigned: dict[tuple[cst.CSTNode | None, str], list[Origin]] = {}
        for line in found(tree.module, cst.Assign):
            for target in line.targets:
                self._note(target.target, line.value, line)
        for annotated in found(tree.module, cst.AnnAssign):
            if annotated.value is not None:
                self._note(annotated.target, annotated.value, annotated)
        for walrus in found(tree.module, cst.NamedExpr):
            self._note(walrus.target, walrus.value, walrus)
        for item in found(tree.module, cst.WithItem):
            if item.asname is not None:
                self._note(item.asname.name, item.item, item)

    def _note(
        self, target: cst.BaseExpression, value: cst.BaseExpression, at: cst.CSTNode
    ) -> None:
        pairs: list[tuple[cst.BaseExpression, cst.BaseExpression, int | None]]
        pairs = [(target, value, None)]
        if isinstance(target, cst.Tuple | cst.List):
            pairs = _unpacked(target, value)
        for part, made, place in pairs:
            if (path := dotted(part)) is None:
                continue
            scope = self._tree.function(at)
            home = self.home(path, scope)
            origin = Origin(
                value=made,
                scope=scope,
                statement=self._tree.statement(at),
                path=path,
                place=place,
            )
            self._assigned.setdefault((home, path), []).append(origin)

    def home(self, path: str, scope: Scope) -> cst.CSTNode | None:
        """Return the class that ``self.x`` belongs to, else the function."""
        if path.startswith("self."):
            return self._tree.owner(scope)
        return scope

    def assigned(self, path: str, scope: Scope) -> list[Origin]:
        """Return the assignments to a variable that a scope sees, in text order."""
        if path.startswith("self."):
            return self.of_class(self._tree.owner(scope), path)
        here: Scope = scope
        first = path.partition(".")[0]
        while True:
            found_here = self._assigned.get((here, path), [])
            if found_here or here is None or first in parameters(here):
                return found_here
            here = self._tree.function(here)

    def of_class(self, owner: cst.ClassDef | None, path: str) -> list[Origin]:
        """Return assignments to ``self.x`` in a class, its bases and subclasses."""
        return [
            origin
            for kind in (self._tree.family(owner) if owner is not None else [None])
            for origin in self._assigned.get((kind, path), [])
        ]

    def calls_of(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Return the calls of a function, a method or (for ``__init__``) its class.

        Those of ``__call__`` are the calls of the objects of its class.
        """
        if function in self._callers:
            return self._callers[function]
        if function in self._searching:
            return []  # a cycle: found by the search in progress
        self._searching.add(function)
        calls = self._find_calls(function)
        self._searching.remove(function)
        if not self._searching:
            self._callers[function] = calls
        return calls

    def _find_calls(self, function: cst.FunctionDef) -> list[cst.Call]:
        name, owner = function.name.value, self._tree.owner(function)
        if owner is not None and name == _INIT:
            name = owner.name.value
            return [c for c in self._tree.calls if dotted(c.func) == name]
        if owner is None:
            return [c for c in self._tree.calls if dotted(c.func) == name]
        if name == _CALL:
            kinds = {kind.name.value for kind in self._tree.family(owner)}
            return [c for c in self._tree.calls if self._is_object(c.func, kinds)]
        return [
            c
            for c in self._tree.calls
            if self._tree.method_called(c, name) is not None
            and not self._tree.called(c).startswith("torch.")
        ]

    def _is_object(self, node: cst.BaseExpression, kinds: set[str]) -> bool:
        """Return whether an expression is an object of one of the script's classes."""
        if isinstance(node, cst.Call):
            return dotted(node.func) in kinds
        if dotted(node) is None or dotted(node) in kinds:
            return False
        return any(
            isinstance(origin.value, cst.Call) and dotted(origin.value.func) in kinds
            for origin in self.origins(node, self._tree.function(node))
        )

    def passed(
        self, function: cst.FunctionDef, parameter: str
    ) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
        """Return what the calls of a function pass for one of its parameters."""
        names = parameters(function)
        place = names.index(parameter)
        if names and names[0] in ("self", "cls") and self._tree.owner(function):
            place -= 1
        for call in self.calls_of(function):
            if (value := argument(call, place, parameter)) is not None:
                yield call, value

    def origins(self, node: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return where the value of an expression comes from.

        Plain names are followed to their assignments, parameters to every call, and
        attributes of ``self`` to their class. Any other expression is an origin itself.
        """
        out: dict[Key, Origin] = {}
        self._follow(node, scope, None, out, set())
        return list(out.values())

    def _follow(
        self,
        node: cst.BaseExpression,
        scope: Scope,
        via: Origin | None,
        out: dict[Key, Origin],
        seen: set[tuple[int, str]],
    ) -> None:
        path = dotted(node)
        if path is not None and (id(scope), path) in seen:
            return
        reached = False
        if path is not None:
            seen.add((id(scope), path))
            for origin in self.assigned(path, scope):
                reached = True
                self._follow(origin.value, origin.scope, origin, out, seen)
            reached = self._through_parameter(path, scope, out, seen) or reached
            if not reached:
                reached = self._through_object(node, scope, out, seen)
        if not reached:
            found_here = via or Origin(
                value=node,
                scope=scope,
                statement=self._tree.statement(node),
                path=None,
            )
            out.setdefault(found_here.key, found_here)

    def _through_parameter(
        self,
        path: str,
        scope: Scope,
        out: dict[Key, Origin],
        seen: set[tuple[int, str]],
    ) -> bool:
        reached = False
        here: Scope = scope
        while here is not None:
            if path in parameters(here):
                for call, value in self.passed(here, path):
                    reached = True
                    self._follow(value, self._tree.function(call), None, out, seen)
                break
            here = self._tree.function(here)
        return reached

    def _through_object(
        self,
        node: cst.BaseExpression,
        scope: Scope,
        out: dict[Key, Origin],
        seen: set[tuple[int, str]],
    ) -> bool:
        """Map ``trainer.loader`` to ``self.loader`` in the class of ``trainer``."""
        made = self.of_objects(node, scope)
        for origin in made:
            self._follow(origin.value, origin.scope, origin, out, seen)
        return bool(made)

    def of_objects(self, node: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return the assignments to ``self.x`` that ``trainer.x`` reads."""
        if not isinstance(node, cst.Attribute) or dotted(node.value) == "self":
            return []
        if node in self._resolving:  # net = net.inner
            return []
        self._resolving.add(node)
        out: list[Origin] = []
        for base in self.origins(node.value, scope):
            made = base.value
            name = dotted(made.func) if isinstance(made, cst.Call) else None
            inside = self._tree.classes.get(name or "")
            if inside is not None:
                out += self.of_class(inside, f"self.{node.attr.value}")
        self._resolving.discard(node)
        return out

    # Objects, also through calls

    def reached(self, node: cst.BaseExpression, scope: Scope) -> set[Key]:
        """Return the keys of every value that an expression's object may be.

        In addition to `origins` this looks through calls that return the same object:
        methods such as ``to``, wrappers such as ``torch.compile``, and the script's
        functions by what they return.
        """
        out: set[Key] = set()
        waiting: list[tuple[cst.BaseExpression, Scope, tuple[int, ...]]] = [
            (node, scope, ())
        ]
        seen: set[tuple[int, tuple[int, ...]]] = set()
        while waiting:
            value, inner, sites = waiting.pop()
            for origin in self.origins(value, inner):
                key = (*origin.key, *sites)
                if (id(origin.value), sites) in seen and key in out:
                    continue
                seen.add((id(origin.value), sites))
                out.add(key)
                for more, where, site in self.same_object(
                    origin.value, origin.scope, origin.place
                ):
                    at = sites if site is None else (*sites, site)
                    if len(at) <= _DEPTH:
                        waiting.append((more, where, at))
        return out

    def same_object(
        self, value: cst.BaseExpression, scope: Scope, place: int | None
    ) -> list[tuple[cst.BaseExpression, Scope, int | None]]:
        """Return expressions whose object a call or conditional returns.

        Each comes with its scope. For a function with several callers it also comes
        with the call in question.
        """
        if isinstance(value, cst.IfExp):
            return [(value.body, scope, None), (value.orelse, scope, None)]
        if not isinstance(value, cst.Call):
            return []
        on = self._tree.method_called(value, *SAME_OBJECT)
        if on is not None and place is None:
            return [(on, scope, None)]
        if self._tree.called(value) in WRAPPING and value.args and place is None:
            return [(value.args[0].value, scope, None)]
        out: list[tuple[cst.BaseExpression, Scope, int | None]] = []
        for function in self.local(value):
            several = len(self.calls_of(function)) > 1
            for given in self.returned(function):
                part: cst.BaseExpression = given
                if place is not None:
                    if not isinstance(given, cst.Tuple | cst.List):
                        continue
                    elements = given.elements
                    if place >= len(elements):
                        continue
                    part = elements[place].value
                elif isinstance(given, cst.Tuple):
                    continue
                out.append((part, function, id(value) if several else None))
        return out

    def local(self, call: cst.Call) -> list[cst.FunctionDef]:
        """Return the functions of this script that a call may call."""
        if self._callees is None:
            self._callees = {}
            for function in self._tree.functions:
                if function.name.value != _INIT:
                    for caller in self.calls_of(function):
                        self._callees.setdefault(caller, []).append(function)
        return self._callees.get(call, [])

    def returned(self, function: cst.FunctionDef) -> list[cst.BaseExpression]:
        """Return the values that a function may return."""
        return [
            line.value
            for line in found(function.body, cst.Return)
            if line.value is not None and self._tree.function(line) is function
        ]


def _unpacked(
    target: cst.Tuple | cst.List, value: cst.BaseExpression
) -> list[tuple[cst.BaseExpression, cst.BaseExpression, int | None]]:
    """Return what each of several targets gets: an expression, or a place in one."""
    parts = [e.value for e in target.elements]
    star = next(
        (i for i, e in enumerate(target.elements) if isinstance(e, cst.StarredElement)),
        None,
    )
    if not isinstance(value, cst.Tuple | cst.List):
        every: list[tuple[cst.BaseExpression, cst.BaseExpression, int | None]]
        every = [(t, value, place) for place, t in enumerate(parts)]
        return every if star is None else every[:star]
    values = [e.value for e in value.elements]
    known = next(
        (i for i, e in enumerate(value.elements) if isinstance(e, cst.StarredElement)),
        len(values),
    )
    if star is None or known < len(values):
        return [(t, v, None) for t, v in zip(parts, values[:known], strict=False)]
    after = len(parts) - star - 1
    middle = values[star : len(values) - after]
    return [
        *((t, v, None) for t, v in zip(parts[:star], values, strict=False)),
        *((parts[star], v, None) for v in middle),
        *(
            (t, v, None)
            for t, v in zip(
                parts[star + 1 :], values[len(values) - after :], strict=False
            )
        ),
    ]


def parameters(function: cst.FunctionDef | cst.Lambda) -> list[str]:
    """Return the names of a function's parameters in order."""
    of = function.params
    every = [*of.posonly_params, *of.params, *of.kwonly_params]
    return [p.name.value for p in every]
