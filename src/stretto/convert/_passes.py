"""Find loops that train in some passes only, as with ``for phase in ("train", "val")``.

The samples of a divided loader are filled up to a multiple of the ranks, so what a pass
counts that does not train would not be what one process counts. Such a pass therefore
gives each rank all samples, and nothing is reduced after it.
"""

from __future__ import annotations

import ast
from functools import partial
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._edit import theirs
from stretto.convert._models import reaching_training
from stretto.convert._step_calls import set_in
from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._batch_loops import BatchLoop
    from stretto.convert._edit import Work

_PLAIN = (
    cst.Name,
    cst.Attribute,
    cst.SimpleString,
    cst.Integer,
    cst.Comparison,
    cst.ComparisonTarget,
    cst.BaseCompOp,
    cst.UnaryOperation,
    cst.Not,
    cst.BooleanOperation,
    cst.BaseBooleanOp,
    cst.LeftParen,
    cst.RightParen,
    cst.Dot,
    cst.BaseParenthesizableWhitespace,
)
"""The nodes of conditions that can be decided before a loop."""


def convert(work: Work) -> None:
    """Let passes that do not train see all samples, and name each loop's condition."""
    for loop in work.job.training:
        condition = _condition(work, loop)
        if condition is None or not isinstance(loop.node, cst.For):
            _point_out(work, loop)
            continue
        at = _begins(work, loop)
        name = _free_name(work)
        work.passes[loop.node] = name
        work.before(at, f"{theirs(name)} = {theirs(condition)}")
        for source, _ in loop.loaders:
            func = work.expression("batches_of_pass")
            work.change(source, partial(_call, func=func, trains=cst.Name(name)))
        work.done(
            loop.node,
            f"a pass trains if `{condition}`; in any other, each rank goes through all "
            "samples, as rank 0 sees them, and nothing is reduced over ranks",
        )


def condition(work: Work, loop: BatchLoop) -> str | None:
    """Return the condition of a loop's passes that train, if not all of them do."""
    return _condition(work, loop) if isinstance(loop.node, cst.For) else None


def evaluated(work: Work, loop: BatchLoop) -> set[tuple[int | None, int | None]]:
    """Return the keys of a loop's loaders with which no pass trains.

    Such is that of "val" in ``loaders[phase]`` if passes train where ``phase`` is
    "train".
    """
    trains = condition(work, loop)
    out: set[tuple[int | None, int | None]] = set()
    kept: set[tuple[int | None, int | None]] = set()
    for source, scope in loop.loaders:
        by_key = work.job.batches.by_key(source, scope)
        index = source.slice[0].slice if isinstance(source, cst.Subscript) else None
        name = index.value if isinstance(index, cst.Index) else None
        if trains is None or not by_key or not isinstance(name, cst.Name):
            return set()
        for key, origins in by_key:
            never = not _may_hold(trains, name.value, key)
            (out if never else kept).update(origin.key for origin in origins)
    return out - kept


def _may_hold(condition: str, name: str, value: str) -> bool:
    """Return whether a conjunction may hold where a variable has a text as value."""
    terms: list[ast.expr] = [ast.parse(condition, mode="eval").body]
    while terms:
        term, wanted = terms.pop(), True
        while isinstance(term, ast.UnaryOp) and isinstance(term.op, ast.Not):
            term, wanted = term.operand, not wanted
        if isinstance(term, ast.BoolOp) and isinstance(term.op, ast.And) and wanted:
            terms += term.values
        if not isinstance(term, ast.Compare) or len(term.ops) != 1:
            continue
        sides = [term.left, term.comparators[0]]
        texts = [s.value for s in sides if isinstance(s, ast.Constant)]
        if not any(isinstance(s, ast.Name) and s.id == name for s in sides):
            continue
        if texts and isinstance(term.ops[0], ast.Eq | ast.NotEq):
            equal = (texts[0] == value) is isinstance(term.ops[0], ast.Eq)
            if equal is not wanted:
                return False
    return True


def _point_out(work: Work, loop: BatchLoop) -> None:
    """List a loop that may evaluate in some calls, under a condition not known."""
    several = len(loop.origins) > len(loop.loaders) or any(
        isinstance(above, cst.DictComp | cst.ListComp)
        for origin in loop.origins
        for above in work.tree.ancestors(origin.value)
    )
    several = several or any(
        work.tree.loops(origin.value) and work.job.batches.is_put(origin)
        for origin in loop.origins
    )
    flagged = len(work.job.training) > 1 and _by_flag(work, loop)
    guarded = any(
        isinstance(above, cst.If)
        and (
            work.tree.within(above, loop.node)
            or work.tree.function(above) is not loop.scope
        )
        for call in _backwards(work, loop)
        for above in work.tree.ancestors(call)
    )
    if flagged or (several and guarded):
        work.undecided(
            loop.node,
            "whether each pass of this loop trains: one that only evaluates counts a "
            "few samples twice if their number is not divisible by the number of "
            "ranks. Decide it in this loop's body (`if train:` around the step), or "
            "evaluate in a loop of its own",
        )


def _by_flag(work: Work, loop: BatchLoop) -> bool:
    """Return whether a called function trains by a flag whose value is not known."""
    points = list(_points(work, loop))
    return bool(points) and all(
        any(
            work.job.batches.steps.is_flag(test)
            and work.job.batches.steps.reaches(point, {function: call}) is None
            for function in work.flow.local(call)
            for test, _ in guards_of(work, function)
            for point in _backwards_in(work, function)
        )
        for call in points
    )


def _backwards_in(work: Work, function: cst.FunctionDef) -> list[cst.Call]:
    return [call for call in work.job.backwards if work.tree.function(call) is function]


def _backwards(work: Work, loop: BatchLoop) -> list[cst.Call]:
    """Return the calls of ``backward`` that a loop's steps make, also in functions."""
    waiting: list[cst.CSTNode] = [loop.node.body]
    seen: set[int] = set()
    out: list[cst.Call] = []
    while waiting:
        for call in found(waiting.pop(), cst.Call):
            if call in work.job.backwards:
                out.append(call)
            for function in work.flow.local(call):
                if id(function) not in seen:
                    seen.add(id(function))
                    waiting.append(function.body)
    return out


def _call(
    loader: cst.BaseExpression, func: cst.BaseExpression, trains: cst.BaseExpression
) -> cst.Call:
    """Return ``function(loader, trains)``."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    first = cst.Arg(value=loader, comma=comma)
    return cst.Call(func=func, args=[first, cst.Arg(value=trains)])


def _free_name(work: Work) -> str:
    name, number = "trains", 1
    while name in work.tree.names or name in work.passes.values():
        number += 1
        name = f"trains_{number}"
    return name


def _begins(work: Work, loop: BatchLoop) -> cst.CSTNode:
    """Return the first statement at which a loop's loaders are named.

    Raises:
        SpecError: it is not just before the loop.
    """
    tree = work.tree
    places: list[cst.CSTNode] = [loop.node]
    for source, scope in loop.loaders:
        if tree.within(source, loop.node):
            continue
        statement = tree.statement(source)
        if scope is not loop.scope or tree.block(statement) is not tree.block(
            loop.node
        ):
            raise work.job.refuse(
                loop.node,
                "not every pass of this loop trains, and its loader is named at "
                f"another place (line {tree.shown_line(source)}), so the passes that "
                "evaluate would count some samples twice. Name the loader in this "
                "`for`, or evaluate in a loop of its own",
            )
        places.append(statement)
    return min(places, key=tree.line)


def _condition(work: Work, loop: BatchLoop) -> str | None:
    """Return a condition, set before a loop, without which it does not train."""
    points = list(_points(work, loop))
    if not points:
        return None
    common: list[str] | None = None
    for point in points:
        texts = list(
            dict.fromkeys((*_guards(work, point, loop), *_within(work, point, loop)))
        )
        common = texts if common is None else [t for t in common if t in texts]
    return " and ".join(common) if common else None


def _points(work: Work, loop: BatchLoop) -> Iterator[cst.Call]:
    """Yield the calls in a loop that are, or run, a ``backward``."""
    reaching = reaching_training(work)
    for call in found(loop.node.body, cst.Call):
        if call in work.job.batches.idle:
            continue
        local = work.flow.local(call)
        if call in work.job.backwards or any(f in reaching for f in local):
            yield call


def _guards(work: Work, point: cst.CSTNode, loop: BatchLoop) -> Iterator[str]:
    """Yield the conditions of a loop's body that hold where a call is made."""
    tree = work.tree
    below: cst.CSTNode = point
    for above in tree.ancestors(point):
        if isinstance(above, cst.If) and not tree.within(point, above.test):
            for part in _parts(above.test, holds=tree.within(point, above.body)):
                yield from _decided_before(work, *part, loop)
        if isinstance(above, cst.IndentedBlock):
            for line in above.body:
                if line is below:
                    break
                if isinstance(line, cst.If) and _skips(line):
                    for part in _parts(line.test, holds=False):
                        yield from _decided_before(work, *part, loop)
        if above is loop.node.body:
            return
        below = above


def _within(work: Work, point: cst.Call, loop: BatchLoop) -> Iterator[str]:
    """Yield the conditions of a called function that its caller's loop decides."""
    steps = work.job.batches.steps
    functions = work.flow.local(point)
    if point in work.job.backwards or len(functions) != 1:
        return
    for test, holds in guards_of(work, functions[0]):
        if steps.holds(test, {functions[0]: point}) is not None:
            continue
        new = steps.replaced(test, functions[0], point)
        if new is not None:
            for part in _parts(new, holds=holds):
                yield from _decided_before(work, *part, loop)


def guards_of(
    work: Work, function: cst.FunctionDef
) -> list[tuple[cst.BaseExpression, bool]]:
    """Return the tests that hold wherever a function trains, if it has such."""
    reaching = reaching_training(work)
    common: list[tuple[cst.BaseExpression, bool]] | None = None
    for call in found(function.body, cst.Call):
        if call in work.job.batches.idle or not (
            call in work.job.backwards
            or any(f in reaching for f in work.flow.local(call))
        ):
            continue
        tests = list(work.job.batches.steps.guards(call))
        if common is None:
            common = tests
        else:
            kept = {(id(test), holds) for test, holds in tests}
            common = [(t, h) for t, h in common if (id(t), h) in kept]
    return common or []


def trains_in(work: Work, function: cst.FunctionDef) -> str | None:
    """Return the condition under which a function trains, to be read in it."""
    out: list[str] = []
    for test, holds in guards_of(work, function):
        plain = work.tree.called(test) == "torch.is_grad_enabled" or all(
            isinstance(part, _PLAIN) for part in found(test, cst.CSTNode)
        )
        if plain and work.job.batches.steps.is_flag(test):
            out.append(_text(work, test, holds=holds))
    return " and ".join(out) or None


def _text(work: Work, test: cst.BaseExpression, *, holds: bool) -> str:
    """Return a test as a part of a conjunction, or its opposite."""
    if (
        not holds
        and isinstance(test, cst.UnaryOperation)
        and isinstance(test.operator, cst.Not)
    ):
        return _text(work, test.expression, holds=True)
    text = work.tree.text(test)
    if isinstance(test, cst.BooleanOperation):
        text = f"({text})"
    return text if holds else f"not ({text})"


def _skips(line: cst.If) -> bool:
    """Return whether a branch ends a step, so that what follows is the other one."""
    last = line.body.body[-1]
    inner = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last
    return line.orelse is None and isinstance(inner, cst.Continue)


def _parts(
    test: cst.BaseExpression, *, holds: bool
) -> Iterator[tuple[cst.BaseExpression, bool]]:
    """Yield what is true, or false, if all of a condition is."""
    kind = cst.And if holds else cst.Or
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, kind):
        yield from _parts(test.left, holds=holds)
        yield from _parts(test.right, holds=holds)
    else:
        yield test, holds


def _decided_before(
    work: Work,
    test: cst.BaseExpression,
    holds: bool,  # noqa: FBT001 - unpacked from a pair
    loop: BatchLoop,
) -> Iterator[str]:
    """Yield a condition's text if it is the same in each step of a loop."""
    node = loop.node
    if not isinstance(node, cst.For):
        return
    if any(not isinstance(part, _PLAIN) for part in found(test, cst.CSTNode)):
        return
    changed = set_in(node)
    modes = any(
        work.tree.method_called(call, "train", "eval") is not None
        for call in found(node.body, cst.Call)
    )
    names = {n.value for n in found(test, cst.Name) if not work.tree.is_label(n)}
    if names <= {"True", "False", "None"}:
        return
    for part in found(test, (cst.Name, cst.Attribute)):
        if dotted(part) in changed:
            return
        if isinstance(part, cst.Attribute) and part.attr.value == "training" and modes:
            return
    text = work.tree.text(test)
    if isinstance(test, cst.BooleanOperation):
        text = f"({text})"
    yield text if holds else f"not ({text})"
