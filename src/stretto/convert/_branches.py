"""Evaluate branches that the arguments of a constructor decide."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._tree import argument, dotted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._flow import ScriptFlow
    from stretto.convert._tree import ScriptTree


@final
class Branches:
    """Tests and statements of methods, for the object that is being followed."""

    def __init__(self, tree: ScriptTree, flow: ScriptFlow) -> None:
        self._tree, self._flow = tree, flow
        self._making: list[tuple[cst.ClassDef, cst.Call]] = []
        """The objects whose methods are being followed, and what made each."""

    @contextmanager
    def inside(
        self, kind: cst.ClassDef | None, maker: cst.Call | None
    ) -> Iterator[None]:
        """Follow methods of an object of a class that a call made, if there is one."""
        if kind is None or maker is None:
            yield
            return
        self._making.append((kind, maker))
        try:
            yield
        finally:
            self._making.pop()

    def decided(self, test: cst.BaseExpression) -> bool | None:
        """Return whether a test holds, if how the object was made decides it."""
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            inner = self.decided(test.expression)
            return None if inner is None else not inner
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            part = test.comparisons[0]
            known = self._constant(test.left), self._constant(part.comparator)
            if known[0] is None or known[1] is None:
                return None
            if isinstance(part.operator, cst.Equal | cst.Is):
                return known[0] == known[1]
            if isinstance(part.operator, cst.NotEqual | cst.IsNot):
                return known[0] != known[1]
            return None
        value = self._constant(test)
        return None if value is None else bool(value[0])

    def is_left_out(self, node: cst.CSTNode) -> bool:
        """Return whether a branch that is never taken contains a statement."""
        if not self._making:
            return False
        below = node
        for above in self._tree.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                return False
            if isinstance(above, cst.If) and below is not above.test:
                known = self.decided(above.test)
                if known is not None and known is not (below is above.body):
                    return True
            if isinstance(above, cst.IndentedBlock):
                before = above.body[: list(above.body).index(below)]  # type: ignore[arg-type]
                if any(self._ends(line) for line in before):
                    return True
            below = above
        return False

    def sure_block(self, statement: cst.CSTNode) -> cst.CSTNode | None:
        """Return the block around a statement, and around branches surely taken."""
        block = self._tree.parent(statement)
        while self._making and block is not None:
            branch = self._tree.parent(block)
            node: cst.CSTNode | None = None
            if isinstance(branch, cst.If) and self.decided(branch.test):
                node = branch
            elif isinstance(branch, cst.Else):
                above = self._tree.parent(branch)
                if isinstance(above, cst.If) and self.decided(above.test) is False:
                    node = above
            while node is not None:
                above = self._tree.parent(node)
                if not isinstance(above, cst.If):
                    break
                node = above if self.decided(above.test) is False else None
            if node is None:
                break
            block = self._tree.parent(node)
        return block

    def _constant(self, node: cst.BaseExpression) -> tuple[object] | None:
        """Return an expression's value, if it is certain."""
        path = dotted(node)
        if path is None or path in ("True", "False", "None"):
            try:
                return (ast.literal_eval(self._tree.text(node)),)
            except (ValueError, SyntaxError):
                return None
        if not path.startswith("self.") or not self._making:
            return None
        kind, maker = self._making[-1]
        scope = self._tree.function(node)
        if self._tree.owner(scope) is not kind:
            return None
        made = self._flow.assigned(path, scope)
        if len(made) != 1 or made[0].scope is None or made[0].place is not None:
            return None
        init, value = made[0].scope, made[0].value
        if init.name.value != "__init__" or any(a.star for a in maker.args):
            return None
        name = dotted(value)
        names = parameters(init)
        if name not in names or name is None:
            return self._constant(value)
        if self._flow.assigned(name, init):
            return None
        given = argument(maker, names.index(name) - 1, name)
        if given is None:
            of = init.params
            every = [*of.posonly_params, *of.params, *of.kwonly_params]
            given = every[names.index(name)].default
        if given is None or (dotted(given) or "").startswith("self."):
            return None
        return self._constant(given)

    def _ends(self, line: cst.CSTNode) -> bool:
        """Return whether a statement certainly leaves the function."""
        if isinstance(line, cst.SimpleStatementLine):
            return isinstance(line.body[-1], cst.Return | cst.Raise)
        if not isinstance(line, cst.If):
            return False
        known = self.decided(line.test)
        if known is None:
            return False
        if known:
            return any(self._ends(inner) for inner in line.body.body)
        if isinstance(line.orelse, cst.If):
            return self._ends(line.orelse)
        return line.orelse is not None and any(
            self._ends(inner) for inner in line.orelse.body.body
        )
