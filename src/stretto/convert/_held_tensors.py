"""Find the calls whose results an attribute, a container or an expression holds."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import argument, dotted, found, targets_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work

_PUTTING = ("append", "add", "insert", "extend", "update", "setdefault")


@final
class HeldTensors:
    """The calls that make what the variables of a script hold.

    Args:
        work: The script.
    """

    def __init__(self, work: Work) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._known: dict[tuple[int, str], list[cst.BaseExpression]] = {}

    def of(
        self, node: cst.Name | cst.Attribute, outer: cst.CSTNode
    ) -> Iterator[cst.Call]:
        """Yield calls outside of a loop or a function that make what a variable has.

        Args:
            node: The variable, or an attribute.
            outer: What reads it.
        """
        path = dotted(node)
        if path is None or self._tree.is_label(node):
            return
        key = (id(self._tree.function(node)), path)
        if key not in self._known:
            self._known[key] = list(self._values(node, path))
        for value in self._known[key]:
            if not self._tree.has(value) or self._tree.within(value, outer):
                continue
            if not self._makes_batches(value):
                yield from found(value, cst.Call)

    def _makes_batches(self, value: cst.BaseExpression) -> bool:
        """Return whether a value has data sets or loaders, not tensors of a step."""
        return any(
            self._work.job.batches.is_loader(call)
            or self._tree.called(call).startswith("torch.utils.data.")
            for call in found(value, cst.Call)
        )

    def _values(
        self, node: cst.Name | cst.Attribute, path: str
    ) -> Iterator[cst.BaseExpression]:
        scope = self._tree.function(node)
        made = [o.value for o in self._flow.origins(node, scope)]
        yield from made
        if isinstance(node, cst.Attribute):
            yield from self._of_classes.get(node.attr.value, ())
        last = path.rpartition(".")[2]
        for base, value in self._put.get(last, ()):
            where = self._flow.origins(base, self._tree.function(base))
            if any(o.value is other for o in where for other in made):
                yield value

    @cached_property
    def _of_classes(self) -> dict[str, list[cst.BaseExpression]]:
        """The values of attributes that a class's body or ``register_buffer`` sets."""
        out: dict[str, list[cst.BaseExpression]] = {}
        for kind in self._tree.classes.values():
            lines: Iterator[cst.Assign | cst.AnnAssign]
            lines = found(kind.body, (cst.Assign, cst.AnnAssign))
            for line in lines:
                own = self._tree.parent(self._tree.statement(line)) is kind.body
                for target in targets_of(line) if own else ():
                    if isinstance(target, cst.Name) and line.value is not None:
                        out.setdefault(target.value, []).append(line.value)
        for call in self._tree.calls:
            if self._tree.method_called(call, "register_buffer") is None:
                continue
            name, value = argument(call, 0, "name"), argument(call, 1, "tensor")
            if isinstance(name, cst.SimpleString) and value is not None:
                out.setdefault(str(name.evaluated_value), []).append(value)
        return out

    @cached_property
    def _put(self) -> dict[str, list[tuple[cst.BaseExpression, cst.BaseExpression]]]:
        """The values that lines put into containers, by a container's last name."""
        out: dict[str, list[tuple[cst.BaseExpression, cst.BaseExpression]]] = {}
        for line in found(self._tree.module, cst.Assign):
            for target in targets_of(line):
                if isinstance(target, cst.Subscript):
                    name = (dotted(target.value) or "").rpartition(".")[2]
                    out.setdefault(name, []).append((target.value, line.value))
        for call in self._tree.calls:
            on = self._tree.method_called(call, *_PUTTING)
            if on is not None:
                name = (dotted(on) or "").rpartition(".")[2]
                out.setdefault(name, []).extend((on, a.value) for a in call.args)
        return out
