"""Write a comprehension that trains as a ``for`` statement.

    losses = [step(batch) for batch in loader]

becomes

    losses = []
    for batch in loader:
        losses.append(step(batch))

so that the later stages find the loop and the lines of its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import libcst as cst

from stretto.convert._tree import ScriptTree, dotted, found, stored_names, targets_of
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TAKING_ALL = ("sum", "list", "tuple", "max", "min", "sorted", "set")
"""Built-in functions that read a generator to its end, before they do anything else."""


class TrainingComprehension(SpecError):
    """Training is in a comprehension, as in ``[step(batch) for batch in loader]``."""

    def __init__(self, text: str, value: cst.BaseComp) -> None:
        super().__init__(text)
        self.value = value


def unrolled(tree: ScriptTree, value: cst.BaseComp) -> ScriptTree | None:
    """Return a tree with a ``for`` statement in place of a comprehension.

    Return ``None`` if the comprehension is not the first that its statement evaluates,
    so that the steps would run in another order.
    """
    small = next(
        (a for a in tree.ancestors(value) if isinstance(a, cst.BaseSmallStatement)),
        None,
    )
    line = tree.parent(small) if small is not None else None
    if (
        not isinstance(value, cst.ListComp | cst.GeneratorExp)
        or not isinstance(line, cst.SimpleStatementLine)
        or len(line.body) != 1
        or any(
            comment is not line.trailing_whitespace.comment
            for comment in found(line.with_changes(leading_lines=()), cst.Comment)
        )
        or not _is_first(tree, value)
        or not isinstance(small, cst.Assign | cst.AnnAssign | cst.Expr | cst.Return)
        or any(part.asynchronous is not None for part in _clauses(value.for_in))
        or any(True for _ in found(value, (cst.Await, cst.NamedExpr)))
    ):
        return None
    new = _Unrolling(tree, value, small).lines(line)
    old = tree.module.code.splitlines()
    block: Any = tree.block(line)
    place = next(i for i, part in enumerate(block.body) if part is line)
    body = [*block.body[:place], *new, *block.body[place + 1 :]]
    module = (
        block.with_changes(body=body)
        if block is tree.module
        else tree.module.deep_replace(block, block.with_changes(body=body))
    )
    if not isinstance(module, cst.Module):
        raise TypeError("a module became something else")
    try:
        cst.parse_module(module.code)
    except cst.ParserSyntaxError:
        return None  # it went over lines, between the brackets
    more = len(module.code.splitlines()) - len(old)
    first = tree.line(line)
    last = first + len(tree.text(line.with_changes(leading_lines=())).splitlines()) - 1
    numbers = {}
    for number in range(1, len(old) + more + 1):
        was = number if number <= first else max(first, number - more)
        was = first if first < number <= last + more else was
        numbers[number] = tree.line_in_script(was)
    return ScriptTree(module.deep_clone(), lines=numbers)


def _clauses(clause: cst.CompFor) -> Iterator[cst.CompFor]:
    yield clause
    if clause.inner_for_in is not None:
        yield from _clauses(clause.inner_for_in)


def _is_first(tree: ScriptTree, value: cst.BaseComp) -> bool:
    """Return whether a statement evaluates nothing but names before a value."""
    below: cst.CSTNode = value
    lazy = isinstance(value, cst.GeneratorExp)
    for above in tree.ancestors(value):
        if isinstance(above, cst.Call):
            argument = bool(above.args) and above.args[0] is below
            if not argument and above.func is not below:
                return False
            if argument and dotted(above.func) is None:
                return False
            if lazy and not (argument and tree.called(above) in _TAKING_ALL):
                return False
            lazy = False
        elif isinstance(above, cst.Arg):
            if above.star:
                return False
        elif isinstance(above, cst.BaseSmallStatement):
            return not lazy and not isinstance(above, cst.AugAssign)
        elif lazy or not _evaluates_first(above, below):
            return False
        below = above
    return False


def _evaluates_first(node: cst.CSTNode, part: cst.CSTNode) -> bool:
    """Return whether an expression evaluates one of its parts before the others."""
    if isinstance(node, cst.Attribute | cst.Subscript):
        return node.value is part
    if isinstance(node, cst.BinaryOperation | cst.Comparison):
        return node.left is part
    return False


@final
class _Unrolling:
    """The lines of one comprehension."""

    def __init__(
        self,
        tree: ScriptTree,
        value: cst.ListComp | cst.GeneratorExp,
        small: cst.Assign | cst.AnnAssign | cst.Expr | cst.Return,
    ) -> None:
        self._tree, self._value, self._small = tree, value, small
        self._taken = {*tree.names, *tree.imported}

    def lines(self, line: cst.SimpleStatementLine) -> list[cst.BaseStatement]:
        """Return the statements that replace the line of the comprehension."""
        if isinstance(self._small, cst.Expr) and self._small.value is self._value:
            loop = self._loop(lambda value: cst.Expr(value=value), line)
            return [loop.with_changes(leading_lines=line.leading_lines)]
        nothing = cst.List(elements=[])
        target = self._target()
        if target is not None:
            kept = target.value
            begin: cst.BaseSmallStatement = self._small.with_changes(value=nothing)
        else:
            kept = self._free("results")
            name = cst.AssignTarget(target=cst.Name(kept))
            begin = cst.Assign(targets=[name], value=nothing)
        made = cst.SimpleStatementLine(body=[begin], leading_lines=line.leading_lines)
        out = [made, self._loop(lambda value: _append(kept, value), line)]
        if target is None:
            rest = self._small.deep_replace(self._value, cst.Name(kept))
            out.append(cst.SimpleStatementLine(body=[_small(rest)]))
        return out

    def _target(self) -> cst.Name | None:
        """Return the variable of which a list is the value, if no step reads it."""
        targets = targets_of(self._small)
        if self._small.value is not self._value or len(targets) != 1:
            return None
        target = targets[0]
        readers: list[cst.CSTNode] = [self._value]
        if self._tree.function(self._small) is None:
            readers += self._tree.functions
        read = {name.value for node in readers for name in found(node, cst.Name)}
        lazy = isinstance(self._value, cst.GeneratorExp)
        if not isinstance(target, cst.Name) or lazy or target.value in read:
            return None
        return target

    def _loop(
        self,
        result: Callable[[cst.BaseExpression], cst.BaseSmallStatement],
        line: cst.SimpleStatementLine,
    ) -> cst.For:
        comp = self._renamed()
        body: cst.BaseStatement = cst.SimpleStatementLine(body=[result(comp.elt)])
        for clause in reversed(list(_clauses(comp.for_in))):
            for test in reversed(clause.ifs):
                body = cst.If(
                    test=test.test,
                    body=cst.IndentedBlock(body=[body]),
                    whitespace_before_test=cst.SimpleWhitespace(" "),
                )
            body = cst.For(
                target=clause.target,
                iter=clause.iter,
                body=cst.IndentedBlock(body=[body]),
            )
        if not isinstance(body, cst.For):
            raise TypeError("a comprehension without `for`")
        block = body.body.with_changes(header=line.trailing_whitespace)
        return body.with_changes(body=block)

    def _renamed(self) -> cst.ListComp | cst.GeneratorExp:
        """Return the comprehension with variables that its scope does not use."""
        own = {
            name.value
            for clause in _clauses(self._value.for_in)
            for name in stored_names(clause.target)
        }
        scope = self._tree.function(self._value)
        inside = set(found(self._value, cst.Name))
        used = {
            name.value
            for name in found(self._tree.module if scope is None else scope, cst.Name)
            if name not in inside and not self._tree.is_label(name)
        }
        new = {name: self._free(name) for name in own & used}
        if not new:
            return self._value
        out = self._value.visit(_Renaming(self._tree, new))
        if not isinstance(out, cst.ListComp | cst.GeneratorExp):
            raise TypeError("a comprehension became something else")
        return out

    def _free(self, name: str) -> str:
        names = (name, *(f"{name}_{number}" for number in range(2, 1000)))
        free = next(n for n in names if n not in self._taken)
        self._taken.add(free)
        return free


def _append(kept: str, value: cst.BaseExpression) -> cst.Expr:
    func = cst.Attribute(value=cst.Name(kept), attr=cst.Name("append"))
    return cst.Expr(value=cst.Call(func=func, args=[cst.Arg(value=value)]))


def _small(node: object) -> cst.BaseSmallStatement:
    if not isinstance(node, cst.BaseSmallStatement):
        raise TypeError("a statement became something else")
    return node


@final
class _Renaming(cst.CSTTransformer):
    def __init__(self, tree: ScriptTree, new: dict[str, str]) -> None:
        self._tree, self._new = tree, new

    def leave_Name(  # noqa: N802 - LibCST's name
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> cst.Name:
        if self._tree.is_label(original_node):
            return updated_node
        new = self._new.get(updated_node.value, updated_node.value)
        return updated_node.with_changes(value=new)
