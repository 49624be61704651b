"""Find numbers of a step that are shown and used for nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import found

if TYPE_CHECKING:
    from stretto.convert._tree import ScriptTree

SHOWING = frozenset(
    [
        "print",
        "debug",
        "info",
        "warning",
        "log",
        "add_scalar",
        "append",
        "set_postfix",
        "update",
        "write",
        "set_description",
    ]
)
"""Functions and methods that show what they are given, or keep it to be shown."""

_DISPLAYING = SHOWING - {"append", "update"}

_PASSING = frozenset(["int", "float", "round", "str", "format", "ceil", "floor"])
"""Functions of a number that is shown."""

_DEPTH = 3
"""Variables through which a number is followed."""


@final
class Shown:
    """The uses of one script's numbers."""

    def __init__(self, tree: ScriptTree) -> None:
        self._tree = tree

    def only(self, node: cst.BaseExpression, depth: int = _DEPTH) -> bool:
        """Return whether a number is only shown, also under other names."""
        top: cst.CSTNode = node
        above = self._tree.parent(top)
        while above is not None:
            if isinstance(above, cst.Arg):
                call = self._tree.parent(above)
                last = self._name(call)
                if last in _DISPLAYING:
                    return True
                if last not in _PASSING or call is None:
                    return False
                above = call
            elif isinstance(above, cst.Assign):
                target = self._target(above, node, top)
                return target is not None and self._is_only_shown(target, depth)
            elif not isinstance(
                above,
                cst.BinaryOperation
                | cst.UnaryOperation
                | cst.FormattedStringExpression
                | cst.FormattedString
                | cst.ConcatenatedString
                | cst.Element
                | cst.Tuple,
            ):
                return False
            top, above = above, self._tree.parent(above)
        return False

    def _name(self, call: cst.CSTNode | None) -> str:
        """Return the last name of what is called."""
        func = call.func if isinstance(call, cst.Call) else None
        if isinstance(func, cst.Attribute):
            return func.attr.value
        return func.value if isinstance(func, cst.Name) else ""

    def _target(
        self, line: cst.Assign, node: cst.CSTNode, value: cst.CSTNode
    ) -> cst.Name | None:
        """Return the name to which a number is assigned."""
        if len(line.targets) != 1:
            return None
        target: cst.BaseExpression = line.targets[0].target
        if isinstance(value, cst.Tuple) and isinstance(target, cst.Tuple):
            inside = [self._tree.within(node, e) for e in value.elements]
            same = len(inside) == len(target.elements) and any(inside)
            target = target.elements[inside.index(True)].value if same else target
        elif isinstance(value, cst.Tuple):
            return None
        return target if isinstance(target, cst.Name) else None

    def _is_only_shown(self, name: cst.Name, depth: int) -> bool:
        """Return whether everything that reads a variable shows it."""
        scope = self._tree.function(name)
        around = self._tree.module if scope is None else scope.body
        return depth > 0 and all(
            self._is_stored(other) or self.only(other, depth - 1)
            for other in found(around, cst.Name)
            if other.value == name.value and not self._tree.is_label(other)
        )

    def _is_stored(self, name: cst.Name) -> bool:
        node: cst.CSTNode | None = name
        while isinstance(node, cst.Name | cst.Element | cst.Tuple | cst.List):
            node = self._tree.parent(node)
        return isinstance(node, cst.AssignTarget)
