"""Statements, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.arithmetic import combined
from stretto.convert._proof.batch_values import NONE, Class, Func, ObjectRef, Shape
from stretto.convert._proof.branches import run_if, run_match, run_try
from stretto.convert._proof.class_lookups import decorated
from stretto.convert._proof.containers import extend, items_in
from stretto.convert._proof.expressions import OPERATORS
from stretto.convert._proof.loops import run_for, run_while
from stretto.convert._proof.ranks import learn_least_rank, learn_rank
from stretto.convert._proof.script_run import MODULE
from stretto.convert._proof.targets import bind
from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Frame, Run


def run_small(run: Run, lines: Sequence[cst.CSTNode], frame: Frame) -> bool:
    """Run the statements of one line; return whether what follows is reached."""
    return all(_run_simple_statement(run, line, frame) for line in lines)


def run_statement(run: Run, node: cst.CSTNode, frame: Frame) -> bool:
    """Run a statement; return whether what follows it is reached."""
    if isinstance(node, cst.SimpleStatementLine):
        return run_small(run, node.body, frame)
    if isinstance(node, cst.If):
        return run_if(run, node, frame)
    if isinstance(node, cst.For):
        return run_for(run, node, frame)
    if isinstance(node, cst.While):
        return run_while(run, node, frame)
    if isinstance(node, cst.With):
        for item in node.items:
            value = run.value(item.item, frame)
            if item.asname is not None:
                if isinstance(item.item, cst.Call) and item.item.args:
                    on = run.tree.method_called(item.item, "scale_loss")
                    if on is not None:
                        value = run.value(item.item.args[0].value, frame)
                bind(run, item.asname.name, value, frame)
        return run.block(node.body, frame)
    if isinstance(node, cst.Try):
        return run_try(run, node, frame)
    if isinstance(node, cst.FunctionDef):
        run.assign(node.name.value, _defined_function(run, node, frame), frame)
    elif isinstance(node, cst.ClassDef):
        run.assign(node.name.value, Class(node, frame.key), frame)
    elif isinstance(node, cst.Match):
        return run_match(run, node, frame)
    return True


def _defined_function(run: Run, node: cst.FunctionDef, frame: Frame) -> Value:
    """Return the function that a definition makes."""
    return decorated(run, Func(node, frame.key), node, frame)


def _run_simple_statement(run: Run, node: cst.CSTNode, frame: Frame) -> bool:
    """Run a simple statement; return whether what follows it is reached."""
    if isinstance(node, cst.Expr):
        run.value(node.value, frame)
    elif isinstance(node, cst.Assign):
        learn_least_rank(run, node.value, frame)
        value = run.value(node.value, frame)
        for target in node.targets:
            bind(run, target.target, value, frame)
            if isinstance(target.target, cst.Tuple | cst.List) and isinstance(
                value, Shape
            ):
                learn_rank(run, node.value, len(target.target.elements), frame)
            _note_addition(run, target.target, node.value, frame)
    elif isinstance(node, cst.AnnAssign):
        if node.value is not None:
            bind(run, node.target, run.value(node.value, frame), frame)
    elif isinstance(node, cst.AugAssign):
        _augment(run, node, frame)
    elif isinstance(node, cst.Return):
        value = NONE if node.value is None else run.value(node.value, frame)
        if frame.decided and frame.returned is None:
            frame.returned = frame.decided[-1]
        frame.returns.append(value)
        return False
    elif isinstance(node, cst.Raise):
        return False
    elif isinstance(node, cst.Break):
        if run.loops:
            loop = run.loops[-1]
            loop.breaks.append(run.state)
            if len(frame.decided) > loop.decisions:
                loop.left = frame.decided[-1]
        return False
    elif isinstance(node, cst.Continue):
        if run.loops:
            loop = run.loops[-1]
            loop.continues.append(run.state)
            if len(frame.decided) > loop.decisions:
                loop.skipped = frame.decided[-1]
        return False
    elif isinstance(node, cst.Global | cst.Nonlocal):
        for item in node.names:
            name = item.name.value
            home = frame.parent
            if isinstance(node, cst.Global):
                home = run.frames[MODULE]
            while (
                home is not None
                and home.parent is not None
                and (run.get(home.key, name) is None)
            ):
                home = home.parent
            frame.foreign[name] = home.key if home is not None else MODULE
    elif isinstance(node, cst.Assert):
        run.value(node.test, frame)
    return True


def _note_addition(
    run: Run, target: cst.BaseExpression, value: cst.BaseExpression, frame: Frame
) -> None:
    """Note that ``a = a + x`` adds to a variable."""
    name = dotted(target)
    if name is None or not run.loops:
        return
    if (
        isinstance(value, cst.BinaryOperation)
        and isinstance(value.operator, cst.Add)
        and name in (dotted(value.left), dotted(value.right))
    ):
        _note_added(run, target, frame)
    elif any(dotted(part) == name for part in found(value, (cst.Name, cst.Attribute))):
        _note_added(run, target, frame, plain=False)


def _note_added(
    run: Run, target: cst.BaseExpression, frame: Frame, *, plain: bool = True
) -> None:
    """Note for all loops around that a variable is computed from what it was."""
    place = _place_of(run, target, frame)
    if place is not None:
        for loop in run.loops:
            loop.updated.add(place)
            if plain:
                loop.added.add(place)


def _place_of(
    run: Run, target: cst.BaseExpression, frame: Frame
) -> tuple[int, str] | None:
    """Return the frame or object, and the name, of a variable."""
    if isinstance(target, cst.Name):
        return frame.foreign.get(target.value, frame.key), target.value
    if isinstance(target, cst.Attribute):
        on = run.value(target.value, frame)
        if isinstance(on, ObjectRef):
            return on.key, target.attr.value
    return None


def _augment(run: Run, node: cst.AugAssign, frame: Frame) -> None:
    """Run ``a op= b``."""
    old = run.value(node.target, frame)
    more = run.value(node.value, frame)
    if isinstance(old, ObjectRef) and old.kind == "list":
        extend(run, old, items_in(run, more, node), node)
        return
    op = OPERATORS.get(type(node.operator), "?")
    new = combined(op, old, more, node)
    run.write(old, new, node)
    bind(run, node.target, new, frame)
    _note_added(run, node.target, frame, plain=op == "+")
