"""Refuse steps whose gradients DistributedDataParallel would exchange only in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import Scope, dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._models import Models

_CUTTING = ("detach", "item", "data")


@final
class Steps:
    """The forwards that each ``backward`` of a step differentiates.

    After a backward, gradients of a model are exchanged again only after the model was
    called again: a second backward through earlier calls stays on its rank.
    """

    def __init__(self, work: Work, models: Models) -> None:
        self._work, self._models = work, models
        self._tree, self._flow = work.tree, work.flow

    def check(self) -> None:
        """Refuse a second backward through calls made before the first.

        Raises:
            SpecError: there is one; the error has the line and the next step.
        """
        backwards = sorted(self._work.job.backwards, key=self._tree.line)
        for place, second in enumerate(backwards):
            for first in backwards[:place]:
                if self._tree.function(first) is not self._tree.function(second):
                    continue
                if not self._both_run(first, second):
                    continue
                self._compare(first, second)

    def _compare(self, first: cst.Call, second: cst.Call) -> None:
        line = self._tree.line(first)
        shown = self._tree.shown_line(first)
        before, after = self._calls(first), self._calls(second)
        for call in after:
            name = dotted(call.func)
            again = [c for c in after if dotted(c.func) == name]
            if any(self._tree.line(c) > line for c in again):
                continue
            if any(dotted(c.func) == name for c in before):
                raise self._work.job.refuse(
                    second,
                    f"a second backward() goes through `{name}(...)` of line "
                    f"{self._tree.shown_line(call)}, which was called before the "
                    f"backward() of line {shown}: DistributedDataParallel exchanges "
                    "gradients once for each call of the model. Add the losses and "
                    "call backward() once, or call the model again in between",
                )

    def _both_run(self, first: cst.CSTNode, second: cst.CSTNode) -> bool:
        """Return whether one pass may run both: not in branches of one ``if``."""
        chain = {id(a): a for a in self._tree.ancestors(first)}
        for above in self._tree.ancestors(second):
            if id(above) in chain and isinstance(above, cst.If):
                own = above.body
                return self._tree.within(first, own) == self._tree.within(second, own)
        return not any(
            isinstance(above, cst.IndentedBlock) and _leaves(above)
            for above in chain.values()
            if isinstance(self._tree.parent(above), cst.If | cst.Else)
            and not self._tree.within(second, above)
        )

    def _calls(self, backward: cst.Call) -> list[cst.Call]:
        """Return the calls of trained models that a backward differentiates."""
        scope, line = self._tree.function(backward), self._tree.line(backward)
        loss = self._work.job.differentiated(backward)
        if loss is None:
            return []
        out: list[cst.Call] = []
        waiting: list[tuple[cst.CSTNode, int]] = [(loss, line)]
        seen: set[int] = set()
        while waiting:
            node, before = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, cst.Attribute) and node.attr.value in _CUTTING:
                continue
            if isinstance(node, cst.Call):
                inner = node.func
                if isinstance(inner, cst.Attribute) and inner.attr.value in _CUTTING:
                    continue
                if self._models.is_model(inner, scope):
                    out.append(node)
            path = dotted(node)
            if isinstance(node, cst.Attribute):
                waiting.append((node.value, before))
            elif path is None:
                waiting += [(child, before) for child in node.children]
            if path is not None:
                waiting += self._made(path, scope, before)
        return out

    def _made(
        self, path: str, scope: Scope, before: int
    ) -> list[tuple[cst.CSTNode, int]]:
        """Return the last assignment to a variable before a line."""
        if scope is not None and self._tree.owner(scope) and path.startswith("self."):
            return []
        made = [
            o
            for o in self._flow.assigned(path, scope)
            if o.scope is scope and self._tree.line(o.statement) < before
        ]
        if not made:
            return []
        last = self._tree.line(made[-1].statement)
        out: list[tuple[cst.CSTNode, int]] = [(made[-1].value, last)]
        body: cst.CSTNode = self._tree.module if scope is None else scope.body
        out += [
            (a.value, self._tree.line(a))
            for a in found(body, cst.AugAssign)
            if dotted(a.target) == path and last < self._tree.line(a) < before
        ]
        return out


def _leaves(block: cst.IndentedBlock) -> bool:
    """Return whether nothing after a block runs in the same pass."""
    last = block.body[-1] if block.body else None
    return isinstance(last, cst.SimpleStatementLine) and any(
        isinstance(part, cst.Continue | cst.Break | cst.Return | cst.Raise)
        for part in last.body
    )
