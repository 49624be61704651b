"""Find calls of training functions that do not train, such as ``step(x, train=False)``.

A script may use one function for training and evaluation, with an argument that decides
whether it calls ``backward``. What the argument is shows at the call.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._tree import argument, dotted, found, targets_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._flow import ScriptFlow
    from stretto.convert._tree import ScriptTree

Entered = dict[cst.FunctionDef, cst.Call]
"""Functions, and the call by which each is entered."""

Guard = tuple[cst.BaseExpression, bool]
"""A test, and whether it holds."""

_DEPTH = 8
"""Names through which a value is followed."""

_TRACKED = ("torch.enable_grad", "torch.set_grad_enabled")

_OBJECT = object()
"""The value of what is certainly an object other than ``None``."""


def set_in(body: cst.CSTNode) -> set[str]:
    """Return the names, also of attributes, that some code sets."""
    targets: list[cst.BaseExpression] = []
    for inner in found(body, cst.CSTNode):
        targets += targets_of(inner)
    targets += [inner.target for inner in found(body, cst.CompFor)]
    targets += [inner.name for inner in found(body, cst.AsName)]
    out: set[str] = set()
    while targets:
        target = targets.pop()
        if isinstance(target, cst.Tuple | cst.List):
            targets += [element.value for element in target.elements]
        elif (path := dotted(target)) is not None:
            out.add(path)
    return out


@final
class StepCalls:
    """Decides whether calls of a script's functions train."""

    def __init__(self, tree: ScriptTree, flow: ScriptFlow) -> None:
        self._tree, self._flow = tree, flow

    def guards(self, point: cst.CSTNode) -> Iterator[Guard]:
        """Yield the tests of a function's branches that hold where a point is reached.

        A branch of which each part contains a point of its own decides nothing here.
        """
        below = point
        for above in self._tree.ancestors(point):
            if isinstance(above, cst.FunctionDef | cst.Module):
                return
            if isinstance(above, cst.If) and not self._tree.within(point, above.test):
                yield above.test, self._tree.within(point, above.body)
            if isinstance(above, cst.IfExp) and below is not above.test:
                yield above.test, below is above.body
            if isinstance(above, cst.IndentedBlock):
                for line in above.body:
                    if line is below:
                        break
                    if isinstance(line, cst.If) and line.orelse is None:
                        last = line.body.body[-1]
                        if isinstance(last, cst.SimpleStatementLine):
                            last = last.body[-1]
                        if isinstance(last, cst.Return | cst.Raise):
                            yield line.test, False
            below = above

    def reaches(self, point: cst.CSTNode, entered: Entered) -> bool | None:
        """Return whether a point in a function runs, if how it is entered decides it.

        Args:
            point: A call in a function that is among the keys of `entered`.
            entered: The calls on the way to it.
        """
        known = True
        for test, holds in self.guards(point):
            value = self.holds(test, entered)
            if value is not None and value is not holds:
                return False
            known = known and value is not None
        return True if known else None

    def without_gradient(self, call: cst.Call, function: cst.FunctionDef) -> bool:
        """Return whether a call runs a function that tracks no gradients."""
        return self._tree.without_gradient(call) and not any(
            self._tree.full(part) in _TRACKED
            for part in found(function, (cst.Name, cst.Attribute))
        )

    def is_flag(self, test: cst.BaseExpression) -> bool:
        """Return whether a test only reads what a function does not compute."""
        function = self._tree.function(test)
        made = set_in(function.body) if function is not None else set()
        names = [
            name.value
            for name in found(test, cst.Name)
            if not self._tree.is_label(name)
        ]
        given = parameters(function) if function is not None else []
        flags = {dotted(part) for part in found(test, (cst.Name, cst.Attribute))}
        calls = [self._tree.called(call) for call in found(test, cst.Call)]
        return (
            bool(names)
            and not made.intersection(names)
            and all(call == "torch.is_grad_enabled" for call in calls)
            and (
                bool(calls)
                or any(name in given for name in names)
                or any((flag or "").endswith(".training") for flag in flags)
                or any((flag or "").startswith("self.") for flag in flags)
            )
        )

    def holds(self, test: cst.BaseExpression, entered: Entered) -> bool | None:
        """Return whether a test holds, if the calls that enter functions decide it."""
        value = self._value(test, entered, _DEPTH)
        return None if value is None else value[0] is _OBJECT or bool(value[0])

    def _value(
        self, node: cst.BaseExpression, entered: Entered, depth: int
    ) -> tuple[object] | None:
        """Return an expression's value, if it is certain."""
        if depth == 0:
            return None
        if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
            inner = self.holds(node.expression, entered)
            return None if inner is None else (not inner,)
        if isinstance(node, cst.BooleanOperation):
            sides = [self.holds(s, entered) for s in (node.left, node.right)]
            ends = isinstance(node.operator, cst.Or)
            if ends in sides:
                return (ends,)
            return None if None in sides else (not ends,)
        if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
            part = node.comparisons[0]
            left = self._value(node.left, entered, depth)
            right = self._value(part.comparator, entered, depth)
            if left is None or right is None:
                return None
            if _OBJECT in (left[0], right[0]) and None not in (left[0], right[0]):
                return None
            if isinstance(part.operator, cst.Equal | cst.Is):
                return (left[0] == right[0],)
            if isinstance(part.operator, cst.NotEqual | cst.IsNot):
                return (left[0] != right[0],)
            return None
        if not isinstance(node, cst.Name) or node.value in ("True", "False", "None"):
            try:
                return (ast.literal_eval(self._tree.text(node)),)
            except (ValueError, SyntaxError):
                return self._made(node)
        function = self._tree.function(node)
        made = self._flow.assigned(node.value, function)
        if function is not None and node.value in parameters(function):
            if any(origin.scope is function for origin in made):
                return None
            given = self._given(function, node.value, entered)
            return None if given is None else self._value(given, entered, depth - 1)
        if len(made) != 1 or made[0].place is not None:
            return None
        return self._value(made[0].value, entered, depth - 1)

    def _made(self, node: cst.BaseExpression) -> tuple[object] | None:
        """Return that an expression is an object, if it makes one."""
        called = self._tree.called(node)
        own = self._tree.own_class(node) is not None
        made = own or called.startswith("torch.optim.")
        return (_OBJECT,) if made else None

    def _given(
        self, function: cst.FunctionDef, name: str, entered: Entered
    ) -> cst.BaseExpression | None:
        """Return what a call passes for a parameter, or its default."""
        call = entered.get(function)
        if call is None or any(a.star for a in call.args):
            return None
        names = parameters(function)
        place = names.index(name)
        if names and names[0] in ("self", "cls") and self._tree.owner(function):
            place -= 1
        given = argument(call, place, name)
        if given is None:
            of = function.params
            every = [*of.posonly_params, *of.params, *of.kwonly_params]
            given = next(p.default for p in every if p.name.value == name)
        return given

    def replaced(
        self, test: cst.BaseExpression, function: cst.FunctionDef, call: cst.Call
    ) -> cst.BaseExpression | None:
        """Return a test of parameters with what a call passes for them."""
        read = {n.value for n in found(test, cst.Name) if not self._tree.is_label(n)}
        names = read & set(parameters(function))
        if names & {"self", "cls"} or read & set_in(function.body):
            return None
        caller = self._tree.function(call)
        if caller is not None and (read - names) & {
            *parameters(caller),
            *set_in(caller.body),
        }:
            return None  # there the name is another variable
        new: dict[str, cst.BaseExpression] = {}
        for name in names:
            given = self._given(function, name, {function: call})
            if given is None:
                return None
            plain = isinstance(given, cst.Name | cst.Attribute | cst.SimpleString)
            new[name] = (
                given
                if plain
                else given.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            )
        out = test.visit(_Replace(new))
        return out if isinstance(out, cst.BaseExpression) else None


@final
class _Replace(cst.CSTTransformer):
    def __init__(self, new: dict[str, cst.BaseExpression]) -> None:
        self._new = new

    def leave_Name(  # noqa: N802 - LibCST's name
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> cst.BaseExpression:
        del original_node
        new = self._new.get(updated_node.value)
        return updated_node if new is None else new.deep_clone()
