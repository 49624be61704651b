"""Give each statement a line of its own, and join again those that did not change.

The conversion inserts statements before and after others, and compares their lines. So
``model = Net(); opt = SGD(...)`` and ``if done: save()`` are split first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from stretto.convert._parentheses import on_own_line
from stretto.convert._tree import ScriptTree, dotted, found

if TYPE_CHECKING:
    from collections.abc import Sequence

_Several = cst.SimpleStatementLine | cst.SimpleStatementSuite


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Lines that were one line of the script."""

    lines: tuple[cst.SimpleStatementLine, ...]
    origin: _Several
    """The line, or the part after the colon."""


def split(tree: ScriptTree) -> tuple[ScriptTree, list[Split]]:
    """Return a tree with one statement in each line, which keeps the lines' numbers."""
    several = (cst.SimpleStatementLine, cst.SimpleStatementSuite)
    if not any(
        len(node.body) > 1 or isinstance(node, cst.SimpleStatementSuite)
        for node in found(tree.module, several)
    ):
        return tree, []
    wrapper = MetadataWrapper(tree.module)
    old = wrapper.module
    numbers = wrapper.resolve(PositionProvider)
    splitter = _Splitter()
    new = old.visit(splitter)
    if not isinstance(new, cst.Module):
        raise TypeError("a module became something else")
    own = MetadataWrapper(new, unsafe_skip_copy=True).resolve(PositionProvider)
    kinds = (cst.BaseSmallStatement, cst.BaseCompoundStatement)
    lines = {
        int(own[after].start.line): tree.line_in_script(numbers[before].start.line)
        for before, after in zip(found(old, kinds), found(new, kinds), strict=True)
    }
    return ScriptTree(new, lines=lines), splitter.made


def with_name(tree: ScriptTree, value: cst.Call) -> ScriptTree | None:
    """Return a tree with ``model = value;`` before the statement that has a value.

    Calls before it among the same arguments get names too, so that the order stays.
    Return ``None`` if the value is not an argument, or any other call or a condition in
    its statement comes before it.
    """
    statement: cst.CSTNode | None = None
    for above in tree.ancestors(value):
        if isinstance(above, cst.BaseSmallStatement):
            statement = above
            break
        if isinstance(
            above, cst.Lambda | cst.BaseComp | cst.IfExp | cst.BooleanOperation
        ):
            return None
    line = tree.parent(statement) if statement is not None else None
    if not isinstance(line, _Several) or not isinstance(tree.parent(value), cst.Arg):
        return None
    taken = {*tree.names, *tree.imported}
    named: dict[cst.CSTNode, str] = {}
    for call in _before(tree, line, value):
        if tree.parent(tree.parent(call) or call) is not tree.parent(
            tree.parent(value) or value
        ):
            return None
        of = (dotted(call.func) or "value").rpartition(".")[2].lower()
        named[call] = _free(of, {*taken, *named.values(), "model"})
    named[value] = _free("model", taken)
    body: list[cst.BaseSmallStatement] = []
    for small in line.body:
        if small is statement:
            body += [_assigned(name, call) for call, name in named.items()]
            new = small.visit(_Named(named))
            if not isinstance(new, cst.BaseSmallStatement):
                raise TypeError("a statement became something else")
            body.append(new)
        else:
            body.append(small)
    module = tree.module.deep_replace(line, line.with_changes(body=body))
    return tree.changed(module) if isinstance(module, cst.Module) else None


def _before(tree: ScriptTree, line: cst.CSTNode, value: cst.Call) -> list[cst.Call]:
    """Return the calls that run before another in a line, without those inside them."""
    around = {id(a) for a in tree.ancestors(value)}
    out: list[cst.Call] = []
    for call in found(line, cst.Call):
        if call is value:
            break
        if id(call) in around or any(tree.within(call, other) for other in out):
            continue
        out.append(call)
    return out


def _free(name: str, taken: set[str]) -> str:
    names = (name, *(f"{name}_{number}" for number in range(2, 1000)))
    return next(n for n in names if n.isidentifier() and n not in taken)


def _assigned(name: str, value: cst.CSTNode) -> cst.Assign:
    if not isinstance(value, cst.Call):
        raise TypeError("only calls get names")
    return cst.Assign(
        targets=[cst.AssignTarget(target=cst.Name(name))],
        value=on_own_line(value.with_changes(lpar=[], rpar=[])),
        semicolon=cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" ")),
    )


class _Named(cst.CSTTransformer):
    """Replace calls by names."""

    def __init__(self, names: dict[cst.CSTNode, str]) -> None:
        super().__init__()
        self._names = names

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        name = self._names.get(original_node)
        if name is not None:
            return cst.Name(name)
        return super().on_leave(original_node, updated_node)


class _Splitter(cst.CSTTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[Split] = []

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        new = super().on_leave(original_node, updated_node)
        if isinstance(new, cst.SimpleStatementLine) and len(new.body) > 1:
            first, *rest = _lines(new)
            first = first.with_changes(leading_lines=new.leading_lines)
            self.made.append(Split(lines=(first, *rest), origin=new))
            return cst.FlattenSentinel([first, *rest])
        if isinstance(new, cst.SimpleStatementSuite):
            lines = _lines(new)
            self.made.append(Split(lines=lines, origin=new))
            return cst.IndentedBlock(body=lines)
        return new


def _lines(several: _Several) -> tuple[cst.SimpleStatementLine, ...]:
    *first, last = several.body
    alone = cst.MaybeSentinel.DEFAULT
    return (
        *(
            cst.SimpleStatementLine(body=[small.with_changes(semicolon=alone)])
            for small in first
        ),
        cst.SimpleStatementLine(
            body=[last.with_changes(semicolon=alone)],
            trailing_whitespace=several.trailing_whitespace,
        ),
    )


def joined(
    body: Sequence[Any], splits: Sequence[Split], unmoved: dict[int, cst.CSTNode]
) -> list[Any]:
    """Return a block's lines, with those of each split in one line again if possible.

    Args:
        body: The lines after all changes.
        splits: The splits of this block.
        unmoved: The earlier node of each line beside which nothing was inserted, by
            the identity of the line.
    """
    out = list(body)
    for made in splits:
        was = [unmoved.get(id(line)) for line in out]
        size = len(made.lines)
        for place in range(len(out) - size + 1):
            if all(
                a is b
                for a, b in zip(was[place : place + size], made.lines, strict=True)
            ):
                out[place : place + size] = [_one_line(out[place : place + size], made)]
                break
    return out


def _one_line(lines: list[Any], made: Split) -> cst.SimpleStatementLine:
    body = [
        line.body[0].with_changes(semicolon=small.semicolon)
        for line, small in zip(lines, made.origin.body, strict=True)
    ]
    return cst.SimpleStatementLine(
        body=body,
        leading_lines=lines[0].leading_lines,
        trailing_whitespace=lines[-1].trailing_whitespace,
    )


def suite(line: cst.SimpleStatementLine, made: Split) -> cst.SimpleStatementSuite:
    """Return a joined line as the part after a colon."""
    if not isinstance(made.origin, cst.SimpleStatementSuite):
        raise TypeError("this line does not follow a colon")
    return cst.SimpleStatementSuite(
        body=line.body,
        leading_whitespace=made.origin.leading_whitespace,
        trailing_whitespace=line.trailing_whitespace,
    )
