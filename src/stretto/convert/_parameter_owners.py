"""Find the models whose parameters an expression has."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._batch_loops import WRAPPERS
from stretto.convert._flow import parameters
from stretto.convert._modules import Wholes
from stretto.convert._tree import Scope, dotted, found

if TYPE_CHECKING:
    from stretto.convert._flow import Origin, ScriptFlow
    from stretto.convert._tree import ScriptTree

_READING = ("values", "items", "keys", "get")
"""Methods of a container that leave it as it is."""


@final
class ParameterOwners:
    """The models that parameters, or names of models, are of."""

    def __init__(self, tree: ScriptTree, flow: ScriptFlow) -> None:
        self._tree, self._flow = tree, flow
        self._wholes = Wholes(tree, flow)
        self._followed: set[int] = set()
        """Values of names that are being followed."""

    def models_of(
        self, given: cst.BaseExpression, scope: Scope, depth: int
    ) -> list[Origin]:
        """Return where the models were created whose parameters are given."""
        out: list[Origin] = []
        for call in found(given, cst.Call):
            owner = self._tree.method_called(call, "parameters", "named_parameters")
            if owner is not None:
                out += self.model(owner, scope)
        if out or depth == 0:
            return out
        for name in found(given, cst.Name):
            for origin in self._flow.assigned(name.value, scope):
                out += self.models_of(origin.value, origin.scope, depth - 1)
            for above in _scopes(self._tree, scope):
                if name.value in parameters(above):
                    for call, value in self._flow.passed(above, name.value):
                        inner = self._tree.function(call)
                        out += self.models_of(value, inner, depth - 1)
        return out

    def model(self, owner: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return where the model was created that contains `owner`."""
        while isinstance(owner, cst.Subscript):  # model[1].parameters()
            part = self._element(owner, scope)
            if part is not None:
                return self.model(*part)
            owner = owner.value
        path = dotted(owner)
        if path is None:
            if isinstance(owner, cst.Call) and owner.args:  # unwrap(model).parameters()
                return self.model(owner.args[0].value, scope)
            return []
        if path == "self" and scope is not None:
            return self._receivers(scope)
        over = self._iterated(owner)
        if over is not None:
            elements = self._elements(over, scope)
            return [m for e, where in elements for m in self.model(e, where)]
        parts = self._named_parts(owner, scope)
        if parts:
            return parts
        # The longest assigned part of model.head.parameters() is the model, unless
        # it is part of a module that training calls as a whole.
        node: cst.BaseExpression = owner
        while True:
            origins = self._flow.origins(node, scope)
            real = [o for o in origins if o.path is not None or not dotted(o.value)]
            for origin in origins:  # a parameter that gets a loop's variable
                over = None if origin in real else self._iterated(origin.value)
                if over is not None:
                    for element, where in self._elements(over, origin.scope):
                        real += self.model(element, where)
            if real:
                return self._whole(node, scope, real) or real
            if not isinstance(node, cst.Attribute):
                return []
            node = node.value
            if dotted(node) == "self" and scope is not None:
                return self._receivers(scope)

    def _named_parts(self, owner: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return the models of ``head.parameters()`` after ``head = model.head``."""
        if not isinstance(owner, cst.Name):
            return []
        made = self._flow.assigned(owner.value, scope)
        if not made or any(
            not isinstance(o.value, cst.Attribute)
            or o.place is not None
            or id(o.value) in self._followed
            for o in made
        ):
            return []
        values = {id(o.value) for o in made}
        self._followed |= values
        out = [m for o in made for m in self.model(o.value, o.scope)]
        self._followed -= values
        return out

    def _whole(
        self, part: cst.BaseExpression, scope: Scope, made: list[Origin]
    ) -> list[Origin]:
        """Return the model that training calls, if a part is called only by it."""
        if not isinstance(part, cst.Attribute):
            return []
        if dotted(part.value) == "self":
            whole = self._receivers(scope) if scope is not None else []
        else:
            whole = self._flow.origins(part.value, scope)
            whole = self._whole(part.value, scope, whole) or whole
        return whole if self._wholes.is_called(whole, made) else []

    def _iterated(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return what a loop or a comprehension goes through to set a name."""
        name = (dotted(node) or "").partition(".")[0]
        for above in self._tree.ancestors(node):
            if isinstance(above, cst.FunctionDef | cst.Lambda | cst.ClassDef):
                return None
            clause: cst.For | cst.CompFor | None = None
            if isinstance(above, cst.For | cst.CompFor):
                clause = above
            elif isinstance(above, cst.BaseComp):
                clause = above.for_in
            while clause is not None:
                sets = isinstance(clause.target, cst.Name) and clause.target.value
                if sets == name and not self._tree.within(node, clause.iter):
                    return clause.iter
                clause = (
                    clause.inner_for_in if isinstance(clause, cst.CompFor) else None
                )
        return None

    def _elements(
        self, over: cst.BaseExpression, scope: Scope
    ) -> list[tuple[cst.BaseExpression, Scope]]:
        """Return the names in the list, the tuple or the dict's values gone through."""
        on = (
            self._tree.method_called(over, "values")
            if isinstance(over, cst.Call)
            else None
        )
        displays = [(over, scope)]
        path = dotted(over if on is None else on)
        if path is not None:
            if self._may_change(path):
                return []
            displays = [(o.value, o.scope) for o in self._flow.assigned(path, scope)]
        out: list[tuple[cst.BaseExpression, Scope]] = []
        for display, where in displays:
            kinds = (cst.List, cst.Tuple) if on is None else (cst.Dict,)
            if not isinstance(display, kinds):
                return []
            out += [(e.value, where) for e in display.elements]
        return out if all(dotted(e) is not None for e, _ in out) else []

    def _may_change(self, path: str) -> bool:
        """Return whether a container of a name may get or lose elements."""
        for node in found(self._tree.module, (cst.Name, cst.Attribute)):
            if dotted(node) != path or self._tree.is_label(node):
                continue
            above = self._tree.parent(node)
            if isinstance(above, cst.Attribute) and above.value is node:
                if above.attr.value not in _READING:
                    return True
            elif isinstance(above, cst.Subscript):
                around = self._tree.parent(above)
                if isinstance(around, cst.AssignTarget | cst.AugAssign | cst.Del):
                    return True
            elif isinstance(above, cst.Arg):
                call = self._tree.parent(above)
                if self._tree.called(call) not in (*WRAPPERS, "len", "print"):
                    return True
            elif not isinstance(above, cst.AssignTarget | cst.For | cst.CompFor):
                return True
        return False

    def _element(
        self, node: cst.Subscript, scope: Scope
    ) -> tuple[cst.BaseExpression, Scope] | None:
        """Return the name in a display that an element is, by its index or its key."""
        index = node.slice[0].slice
        path = dotted(node.value)
        made = self._flow.assigned(path, scope) if path is not None else []
        if len(made) != 1 or not isinstance(index, cst.Index):
            return None
        if self._may_change(path or ""):
            return None
        display, given = made[0].value, self._tree.text(index.value)
        out: cst.BaseExpression | None = None
        if isinstance(display, cst.List | cst.Tuple):
            if given.isdecimal() and int(given) < len(display.elements):
                out = display.elements[int(given)].value
        elif isinstance(display, cst.Dict):
            for element in display.elements:
                if not isinstance(element, cst.DictElement):
                    return None
                if self._tree.text(element.key).strip("\"'") == given.strip("\"'"):
                    out = element.value
        if out is None or dotted(out) is None:
            return None
        return out, made[0].scope

    def _receivers(self, method: cst.FunctionDef) -> list[Origin]:
        """Return the objects whose method is called, if that makes the optimizer."""
        out: list[Origin] = []
        for call in self._flow.calls_of(method):
            on = self._tree.method_called(call, method.name.value)
            if on is not None and dotted(on) != "self":
                out += self._flow.origins(on, self._tree.function(call))
        return out


def _scopes(tree: ScriptTree, scope: Scope) -> list[cst.FunctionDef]:
    out = []
    while scope is not None:
        out.append(scope)
        scope = tree.function(scope)
    return out
