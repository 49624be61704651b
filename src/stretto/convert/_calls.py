"""Find which functions of the script a call executes."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import Scope, dotted, found

if TYPE_CHECKING:
    from stretto.convert._flow import ScriptFlow
    from stretto.convert._tree import ScriptTree

Called = tuple[cst.FunctionDef, cst.ClassDef | None, cst.Call | None]
"""A function; a method comes with its class and the call that made the object."""


@final
class Calls:
    """Calls of the script's functions and objects."""

    def __init__(self, tree: ScriptTree, flow: ScriptFlow) -> None:
        self._tree, self._flow = tree, flow

    def called(self, call: cst.Call, scope: Scope) -> list[Called]:
        """Return the script's functions that a call may execute."""
        out: list[Called] = []
        for made in self.makers(call, scope):
            kind = self._tree.classes.get(dotted(made.func) or "")
            if kind is not None:
                out += [
                    (f, kind, made)
                    for f in found(kind.body, cst.FunctionDef)
                    if f.name.value in ("forward", "__call__")
                ]
        return out or [(f, None, None) for f in self._flow.local(call)]

    def functions(self, call: cst.Call) -> list[cst.FunctionDef]:
        """Return the functions of the script that a call may execute."""
        return [f for f, _, _ in self.called(call, self._tree.function(call))]

    def makers(self, call: cst.Call, scope: Scope) -> list[cst.Call]:
        """Return the calls that made the object that is called, or the call itself.

        ``CrossEntropyLoss()(x, y)`` calls what it makes.
        """
        if isinstance(call.func, cst.Call):
            return [call.func]
        if dotted(call.func) is None:
            return []
        out: list[cst.Call] = []
        waiting = self._flow.origins(call.func, scope)
        seen: set[int] = set()
        while waiting:
            origin = waiting.pop()
            made = origin.value
            if not isinstance(made, cst.Call | cst.IfExp) or id(made) in seen:
                continue
            seen.add(id(made))
            same = self._flow.same_object(made, origin.scope, origin.place)
            if isinstance(made, cst.Call) and not same:
                out.append(made)
            for value, inner, _ in same:
                waiting += self._flow.origins(value, inner)
        return out
