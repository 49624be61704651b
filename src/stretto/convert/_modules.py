"""Modules that contain trained modules: which of both training calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import Scope, dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.convert._flow import Key, Origin, ScriptFlow
    from stretto.convert._tree import ScriptTree


def is_module(tree: ScriptTree, made: cst.CSTNode) -> bool:
    """Return whether a value may be a module: not if its class has no ``forward``."""
    if not isinstance(made, cst.Call):
        return False
    kind = tree.classes.get(dotted(made.func) or "")
    return kind is None or is_module_class(tree, kind)


def is_module_class(tree: ScriptTree, kind: cst.ClassDef) -> bool:
    """Return whether a class of the script, or one that it derives from, is a module's.

    One that derives from a class of another file may be a module's.
    """
    for one in tree.family(kind):
        names = {dotted(base.value) or "" for base in one.bases}
        if any(name.rpartition(".")[2].endswith("Module") for name in names):
            return True
        if any(f.name.value == "forward" for f in found(one.body, cst.FunctionDef)):
            return True
    return False


@final
class Wholes:
    """Finds out whether training calls a module, or its parts one by one."""

    def __init__(self, tree: ScriptTree, flow: ScriptFlow) -> None:
        self._tree, self._flow = tree, flow
        self._calls: list[tuple[cst.Call, frozenset[int]]] | None = None

    def is_called(self, whole: Iterable[Origin], parts: Iterable[Origin]) -> bool:
        """Return whether a module is called with gradients, and none of its parts.

        What the module's own methods call counts as the module's call.
        """
        wholes = [origin for origin in whole if is_module(self._tree, origin.value)]
        keys, inner = self._ids(wholes), self._ids(parts)
        if not keys or keys & inner:
            return False
        called = False
        for call, reached in self._with_gradient():
            if reached & keys:
                called = True
            elif reached & inner and not self._is_own(call):
                return False
        return called

    def _ids(self, origins: Iterable[Origin]) -> set[int]:
        """Return the values that some origins, or what their names mean, have."""
        out: set[int] = set()
        for origin in origins:
            out.add(id(origin.value))
            if origin.path is not None:
                made = self._flow.assigned(origin.path, origin.scope)
                out |= {id(o.value) for o in made}
        return out

    def _with_gradient(self) -> list[tuple[cst.Call, frozenset[int]]]:
        """Return the calls of names under which gradients are computed."""
        if self._calls is None:
            self._calls = [
                (call, _values(self._flow.reached(call.func, scope)))
                for call in self._tree.calls
                if dotted(call.func) is not None
                and not self._tree.without_gradient(call)
                for scope in (self._tree.function(call),)
            ]
        return self._calls

    def _is_own(self, call: cst.Call) -> bool:
        """Return whether a module's method calls an attribute of the module."""
        scope: Scope = self._tree.function(call)
        owner = self._tree.owner(scope)
        path = dotted(call.func) or ""
        return (
            path.startswith("self.")
            and path.count(".") == 1
            and owner is not None
            and is_module_class(self._tree, owner)
        )


def _values(keys: set[Key]) -> frozenset[int]:
    return frozenset(key[0] for key in keys if key[0] is not None)
