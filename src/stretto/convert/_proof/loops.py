"""Loops, and what loops over samples add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._batch_loops import WRAPPERS
from stretto.convert._proof.batch_values import (
    Constant,
    Item,
    Iter,
    LibraryResult,
    Linear,
    Rows,
    Seq,
    Unproved,
    Why,
    is_of_batch,
)
from stretto.convert._proof.branches import (
    decide,
    merged,
    settle_changed,
    settle_written,
)
from stretto.convert._proof.containers import items_of
from stretto.convert._proof.loaders import is_loader, read_batch
from stretto.convert._proof.script_run import LoopRun
from stretto.convert._proof.targets import bind
from stretto.convert._tree import found

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Frame, Run, State


def run_for(run: Run, node: cst.For, frame: Frame) -> bool:
    """Run a ``for`` loop; return whether what follows it is reached."""
    over = run.value(node.iter, frame)
    if node in run.work.whole:
        over = Iter(_of_all_ranks(run, node.iter))
    trains = id(node) in run.training
    if trains:
        over = _batches_of(run, node, over)
    items, samples = items_of(run, over, node, whole=trains)
    run.in_step += trains
    falls = _repeat(run, node, items, frame, samples=samples)
    run.in_step -= trains
    return falls


def _batches_of(run: Run, node: cst.For, over: Value) -> Value:
    """Return the batches that a training loop takes, as its text says."""
    if isinstance(over, Iter) and is_of_batch(over.item):
        return over
    if isinstance(over, LibraryResult) and is_loader(run, over):
        batch = read_batch(run, over)
        if batch is not None:
            return Iter(batch)
    return _batches_by_text(run, node.iter)


def _of_all_ranks(run: Run, node: cst.BaseExpression) -> Value:
    """Return what a loop over batches of all ranks yields: equal on each rank."""
    inner = run.tree.called(node)
    return Seq((Constant(), Constant())) if inner == "enumerate" else Constant()


def _batches_by_text(run: Run, node: cst.BaseExpression) -> Value:
    """Return what an expression for batches yields, as its text says."""
    batch = Rows(raw=True, whole=True)
    full = run.tree.called(node)
    if isinstance(node, cst.Call) and full in WRAPPERS and node.args:
        inner = _batches_by_text(run, node.args[0].value)
        item = inner.item if isinstance(inner, Iter) else batch
        if full == "enumerate":
            return Iter(Seq((Constant(), item)))
        if full == "zip":
            parts = [_batches_by_text(run, a.value) for a in node.args]
            return Iter(
                Seq(tuple(p.item if isinstance(p, Iter) else batch for p in parts))
            )
        return inner
    if full in ("range", "trange"):
        return Iter(Constant())
    return Iter(batch)


def run_while(run: Run, node: cst.While, frame: Frame) -> bool:
    """Run a ``while`` loop; return whether what follows it is reached."""
    trains = id(node) in run.training
    run.in_step += trains
    _, why = decide(run, node.test, frame)
    run.written.append(set())
    falls = _repeat(run, node, [], frame, samples=False)
    why = why or decide(run, node.test, frame)[1]
    written = run.written.pop()
    if not trains and not _has_losses(run, node):
        settle_written(run, written, node, why)
    run.in_step -= trains
    return falls


def _has_losses(run: Run, node: cst.CSTNode) -> bool:
    """Return whether steps are made in a loop."""
    return any(id(call) in run.backwards for call in found(node, cst.Call))


def _repeat(
    run: Run,
    node: cst.For | cst.While,
    items: Sequence[Value],
    frame: Frame,
    *,
    samples: bool,
) -> bool:
    """Run a loop's body for its items, or until nothing changes."""
    loop = LoopRun(samples=samples, decisions=len(frame.decided))
    before = dict(run.state)
    run.loops.append(loop)
    once = len(items) > 1
    trains = id(node) in run.training or _has_losses(run, node)
    for turn in range(max(len(items), 3)):
        if once and turn >= len(items):
            break
        entry = run.state
        run.state = dict(entry)
        if isinstance(node, cst.For):
            bind(run, node.target, items[turn if once else 0], frame)
        falls = run.block(node.body, frame)
        exits = [*loop.continues, *([run.state] if falls else [])]
        skipped = None if trains else loop.skipped
        loop.continues = []
        if once:
            if not exits:
                break
            run.state = merged(exits, node, skipped)
            continue
        run.state = merged(
            [entry, merged(exits, node, skipped)] if exits else [entry], node
        )
        if turn and run.state == entry:
            break
    run.loops.pop()
    run.state = merged([run.state, *loop.breaks], node)
    if loop.left is not None and not trains:
        settle_changed(run, before, node, loop.left)
    if samples:
        _settle_sums(run, loop, before, node)
    if node.orelse is not None:
        return run.block(node.orelse.body, frame)
    return True


def _settle_sums(run: Run, loop: LoopRun, before: State, node: cst.CSTNode) -> None:
    """Make what a loop over samples has added up a sum over them."""
    for key, name in loop.updated:
        value = run.get(key, name)
        added = (key, name) in loop.added
        kinds = Constant if added else (Constant, Linear, Rows)
        if isinstance(value, kinds):
            run.set(key, name, Unproved(Why.COUNTED, node))
    for key, names in list(run.state.items()):
        if names is before.get(key):
            continue
        new = dict(names)
        for name, value in names.items():
            if isinstance(value, Item) and before.get(key, {}).get(name) != value:
                summed = (key, name) in loop.added and not loop.breaks
                new[name] = (
                    Linear(value.degree + 1) if summed else Unproved(Why.ACROSS, node)
                )
        run.state[key] = new
