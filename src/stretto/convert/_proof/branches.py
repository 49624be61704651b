"""Tests, and the variables after statements of which one branch is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import (
    NONE,
    UNSET,
    Class,
    Constant,
    Count,
    Draw,
    Func,
    Item,
    Iter,
    LibraryName,
    LibraryResult,
    Linear,
    ObjectRef,
    Rows,
    Seq,
    Unproved,
    Why,
    is_of_batch,
    join,
)

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Frame, Run, State


def run_if(run: Run, node: cst.If, frame: Frame) -> bool:
    """Run an ``if``; return whether what follows it is reached."""
    truth, why = decide(run, node.test, frame)
    if truth is True:
        return run.block(node.body, frame)
    if truth is False:
        return _run_else(run, node.orelse, frame)
    before = run.state
    if why is not None:
        frame.decided.append(why)
        run.written.append(set())
    alive: list[State] = []
    run.state = dict(before)
    if run.block(node.body, frame):
        alive.append(run.state)
    run.state = dict(before)
    if _run_else(run, node.orelse, frame):
        alive.append(run.state)
    written = set()
    if why is not None:
        frame.decided.pop()
        written = run.written.pop()
    if not alive:
        return False
    run.state = merged(alive, node, why)
    settle_written(run, written, node, why)
    return True


def run_match(run: Run, node: cst.Match, frame: Frame) -> bool:
    """Run a ``match``; return whether what follows it is reached."""
    _, why = decide(run, node.subject, frame)
    before, after = dict(run.state), [run.state]
    if why is not None:
        frame.decided.append(why)
        run.written.append(set())
    for case in node.cases:
        run.state = dict(before)
        if run.block(case.body, frame):
            after.append(run.state)
    written = set()
    if why is not None:
        frame.decided.pop()
        written = run.written.pop()
    run.state = merged(after, node, why)
    settle_written(run, written, node, why)
    return True


def settle_written(
    run: Run, written: set[tuple[int, str]], node: cst.CSTNode, why: Why | None
) -> None:
    """Note of variables that their values depend on a decision."""
    for key, name in written:
        value = run.get(key, name)
        if value is not None and why is not None:
            run.set(key, name, either(value, NONE, node, why))


def settle_changed(run: Run, before: State, node: cst.CSTNode, why: Why) -> None:
    """Note of variables that changed in a loop that ranks leave in different turns."""
    for key, names in list(run.state.items()):
        old = before.get(key)
        if names is old:
            continue
        for name, value in names.items():
            if old is None or old.get(name) is not value:
                run.set(key, name, either(value, NONE, node, why))


def _run_else(run: Run, orelse: cst.If | cst.Else | None, frame: Frame) -> bool:
    """Run the ``elif`` or ``else`` of an ``if``."""
    if orelse is None:
        return True
    if isinstance(orelse, cst.If):
        return run_if(run, orelse, frame)
    return run.block(orelse.body, frame)


def decide(
    run: Run, node: cst.BaseExpression, frame: Frame
) -> tuple[bool | None, Why | None]:
    """Return whether a test holds, and why it may differ by rank."""
    value = run.value(node, frame)
    known = truth_of(value)
    if known is not None:
        return known, None
    if isinstance(value, Draw):
        return None, Why.DRAWN
    return None, Why.DECIDED if is_of_batch(value) else None


def merged(states: list[State], node: cst.CSTNode, why: Why | None = None) -> State:
    """Return the variables after one of several branches."""
    out = states[0]
    for other in states[1:]:
        out = _merge_two(out, other, node, why)
    return out


def _merge_two(one: State, other: State, node: cst.CSTNode, why: Why | None) -> State:
    """Return the variables after one of two branches."""
    if one is other:
        return one
    out = dict(one)
    for key, theirs in other.items():
        ours = one.get(key)
        if ours is None:
            out[key] = theirs
        elif ours is not theirs:
            names = dict(ours)
            for name, value in theirs.items():
                here = names.get(name)
                if here is None:
                    names[name] = value
                elif here is not value:
                    names[name] = either(here, value, node, why)
            out[key] = names
    return out


def either(one: Value, other: Value, node: cst.CSTNode, why: Why | None) -> Value:
    """Return a value that stands for either of two, of which a test chooses."""
    if one is other or (one == other and (why is None or not is_of_batch(one))):
        return one
    if why is not None:
        if (
            isinstance(one, Seq)
            and isinstance(other, Seq)
            and len(one.items) == len(other.items)
        ):
            pairs = zip(one.items, other.items, strict=True)
            return Seq(tuple(either(a, b, node, why) for a, b in pairs))
        both = (one, other)
        of_step = (Linear, Rows) if why is Why.DECIDED else Linear
        if any(isinstance(v, Seq | Iter) and _contains(v, of_step) for v in both):
            return Iter(Unproved(why, node))  # of another length on another rank
        if any(isinstance(v, Linear | Item) for v in both):
            return Unproved(why, node)
        if why is Why.DECIDED and any(isinstance(v, Rows | Draw) for v in both):
            return Unproved(why, node)
        if all(isinstance(v, Constant | Count) for v in both) and NONE not in both:
            return Unproved(why, node) if why is Why.DECIDED else Draw()
    return join(one, other, node)


def _contains(value: Value, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a value is of some classes, or an element of it is."""
    if isinstance(value, Seq):
        return any(_contains(v, kinds) for v in value.items)
    if isinstance(value, Iter):
        return _contains(value.item, kinds)
    return isinstance(value, kinds)


def afresh(value: Value) -> Value:
    """Return an equal value that `either` does not take for the same number."""
    if isinstance(value, Seq):
        return Seq(tuple(afresh(v) for v in value.items))
    return replace(value) if isinstance(value, Linear | Rows | Item) else value


def run_try(run: Run, node: cst.Try, frame: Frame) -> bool:
    """Run a ``try``; return whether what follows it is reached."""
    before = dict(run.state)
    alive = []
    falls = run.block(node.body, frame)
    if falls and node.orelse is not None:
        falls = run.block(node.orelse.body, frame)
    if falls:
        alive.append(run.state)
    for handler in node.handlers:
        run.state = _merge_two(dict(before), run.state, node, None)
        if run.block(handler.body, frame):
            alive.append(run.state)
    if alive:
        run.state = merged(alive, node)
    if node.finalbody is not None and not run.block(node.finalbody.body, frame):
        return False
    return bool(alive)


def truth_of(value: Value) -> bool | None:
    """Return whether a value is true, if that is certain."""
    if isinstance(value, Constant):
        return None if value.value is UNSET else bool(value.value)
    if isinstance(value, Func | Class | LibraryResult | LibraryName):
        return True if not isinstance(value, LibraryName | LibraryResult) else None
    if isinstance(value, ObjectRef) and isinstance(value.kind, cst.ClassDef):
        return True
    if isinstance(value, Seq):
        return bool(value.items)
    return None
