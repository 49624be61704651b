"""Find what a name in a step is: the loader's batch size, or this rank's."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._bindings import Binding, Bindings
from stretto.convert._flow import parameters
from stretto.convert._tree import argument, dotted, found, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.convert._edit import Work

_COMPUTING = ("min", "max", "int", "round", "abs", "float")


class BatchShare(enum.Enum):
    """Whether a number of a step is the batch size of all ranks."""

    ALL_RANKS = "the loader's batch size"
    OTHER = "another number, such as the length of this rank's batch"
    EITHER = "one of them, which the file does not say"


@final
class BatchNames:
    """The names that have the batch size of the training loaders.

    Args:
        work: The script.
        sizes: The batch sizes of divided loaders, as the script writes them.
        is_literal: Returns whether a number is written as one of them.
        in_steps: The functions that a step runs.
    """

    def __init__(
        self,
        work: Work,
        sizes: list[cst.BaseExpression],
        is_literal: Callable[[cst.BaseExpression], bool],
        in_steps: list[cst.FunctionDef],
    ) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._is_literal = is_literal
        self._in_steps = {id(f) for f in in_steps}
        self._bindings = Bindings(work.tree, work.flow)
        self._known: dict[Binding, BatchShare | None] = {}
        self._loaders: set[Binding] = set()
        waiting = list(sizes)
        while waiting:
            node = waiting.pop()
            if not isinstance(node, cst.Name | cst.Attribute):
                continue
            for made in self._bindings.reaching(node):
                if made in self._loaders or self._is_in_a_step(made):
                    continue
                self._loaders.add(made)
                if made.value is not None and not made.changed:
                    waiting.append(made.value)
                waiting += self._given(made) or []

    def of(self, node: cst.BaseExpression) -> BatchShare:
        """Return what a name or an attribute is."""
        return self._of(node) or BatchShare.EITHER

    def line_of_another(self, node: cst.BaseExpression) -> int | None:
        """Return a line that sets a name to something else than the loader's size."""
        if not isinstance(node, cst.Name | cst.Attribute):
            return None
        lines = [
            self._tree.shown_line(made.node)
            for made in self._bindings.reaching(node)
            if made.node is not None
            and made.parameter is None
            and self._of_binding(made) is not BatchShare.ALL_RANKS
        ]
        return min(lines, default=None)

    def _is_in_a_step(self, made: Binding) -> bool:
        if made.node is None or made.parameter is not None:
            return False
        return id(made.scope) in self._in_steps or any(
            made.node is not loop.node and self._tree.within(made.node, loop.node)
            for loop in self._work.job.training
        )

    def _of(self, node: cst.BaseExpression) -> BatchShare | None:
        if not isinstance(node, cst.Name | cst.Attribute):
            return self._computed(node)
        return _merged([self._of_binding(b) for b in self._bindings.reaching(node)])

    def _of_binding(self, made: Binding) -> BatchShare | None:
        if made in self._loaders:
            return BatchShare.ALL_RANKS
        if made not in self._known:
            self._known[made] = None  # while it is computed
            self._known[made] = self._set_to(made)
        return self._known[made]

    def _set_to(self, made: Binding) -> BatchShare | None:
        if made.parameter is not None:
            return self._passed(made)
        if made.value is None:
            return BatchShare.OTHER
        if made.changed:
            target = getattr(made.node, "target", None)
            before = self._of(target) if target is not None else None
            return BatchShare.OTHER if before is BatchShare.OTHER else BatchShare.EITHER
        if isinstance(made.value, cst.Integer):
            if not self._is_literal(made.value):
                return BatchShare.OTHER
            # The script may set the same variable to the same number twice.
            same = any(_is_same_variable(made, known) for known in self._loaders)
            return BatchShare.ALL_RANKS if same else BatchShare.EITHER
        return self._of(made.value)

    def _passed(self, made: Binding) -> BatchShare | None:
        """Return what the calls of a function pass for a parameter."""
        function, given = made.node, self._given(made)
        if not isinstance(function, cst.FunctionDef) or not given:
            return BatchShare.EITHER
        here = [n for n in given if self._is_of_a_step(n)]
        inside = _merged([self._argument(n) for n in here])
        if here and inside is BatchShare.OTHER:
            return inside  # other calls do not meet this rank's tensors
        return _merged([self._argument(n) for n in given])

    def _argument(self, node: cst.BaseExpression) -> BatchShare | None:
        if isinstance(node, cst.Integer) and self._is_literal(node):
            return BatchShare.ALL_RANKS
        return self._of(node)

    def _is_of_a_step(self, node: cst.CSTNode) -> bool:
        scope = self._tree.function(node)
        return (scope is not None and id(scope) in self._in_steps) or any(
            self._tree.within(node, loop.node.body) for loop in self._work.job.training
        )

    def _given(self, made: Binding) -> list[cst.BaseExpression] | None:
        """Return what calls pass for a parameter; ``None`` if one does not say it."""
        function, name = made.node, made.parameter
        if not isinstance(function, cst.FunctionDef) or name is None:
            return None
        params = found(function.params, cst.Param)
        default = next((p.default for p in params if p.name.value == name), None)
        names = parameters(function)
        if names and names[0] in ("self", "cls") and self._tree.owner(function):
            names = names[1:]
        place = names.index(name) if name in names else -1
        out = []
        for call in self._calls(function):
            value = argument(call, place, name)
            if value is None and not any(a.star for a in call.args):
                value = default
            if value is None:
                return None
            out.append(value)
        return out

    def _calls(self, function: cst.FunctionDef) -> list[cst.Call]:
        owner = self._tree.owner(function)
        calls = self._flow.calls_of(function)
        if owner is None or function.name.value != "forward":
            return calls
        kinds = {kind.name.value for kind in self._tree.family(owner)}
        return calls + [c for c in self._tree.calls if self._runs(c, kinds)]

    def _runs(self, call: cst.Call, kinds: set[str]) -> bool:
        """Return whether a call runs a module of one of the script's classes."""
        if dotted(call.func) is None:
            return False
        for origin in self._flow.origins(call.func, self._tree.function(call)):
            made = origin.value
            while isinstance(made, cst.Call) and isinstance(made.func, cst.Attribute):
                made = made.func.value  # Net().to(device)
            if isinstance(made, cst.Call) and dotted(made.func) in kinds:
                return True
        return False

    def _computed(self, node: cst.BaseExpression) -> BatchShare | None:
        """Return what a computed number is."""
        parts: list[cst.BaseExpression] = []
        if isinstance(node, cst.IfExp):
            return _merged([self._of(node.body), self._of(node.orelse)])
        if isinstance(node, cst.NamedExpr):
            return self._of(node.value)
        if isinstance(node, cst.BinaryOperation):
            parts = [node.left, node.right]
        elif isinstance(node, cst.UnaryOperation):
            parts = [node.expression]
        elif isinstance(node, cst.Call):
            called = self._tree.called(node)
            if called not in _COMPUTING and not self._flow.local(node):
                return BatchShare.OTHER
            parts = [a.value for a in node.args]
            if called == "min" and self._has_a_length(parts):
                return (
                    BatchShare.OTHER
                )  # a rank's batch is shorter than that of all ranks
            if called == "int" and len(parts) == 1:
                return self._of(parts[0])
        sizes = [self._of(part) for part in parts]
        derived = any(s in (BatchShare.ALL_RANKS, BatchShare.EITHER) for s in sizes)
        return BatchShare.EITHER if derived else BatchShare.OTHER

    def _has_a_length(self, nodes: list[cst.BaseExpression]) -> bool:
        return any(
            not isinstance(node, cst.Integer) and self._of(node) is BatchShare.OTHER
            for node in nodes
        )


def _merged(sizes: list[BatchShare | None]) -> BatchShare | None:
    known = {size for size in sizes if size is not None}
    return known.pop() if len(known) == 1 else BatchShare.EITHER if known else None


def _is_same_variable(one: Binding, other: Binding) -> bool:
    if one.scope is not other.scope or one.node is None or other.node is None:
        return False
    names = {dotted(target) for target in targets_of(one.node)} - {None}
    return not names.isdisjoint(dotted(target) for target in targets_of(other.node))
