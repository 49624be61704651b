"""Calls of functions of Python's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.arithmetic import combined, elementwise
from stretto.convert._proof.attributes import attribute_of
from stretto.convert._proof.batch_values import (
    NONE,
    UNSET,
    Constant,
    Count,
    Item,
    Iter,
    Linear,
    ObjectRef,
    Rows,
    Seq,
    Shape,
    SliceValue,
    Unproved,
    Why,
    is_of_batch,
    joined,
)
from stretto.convert._proof.containers import items_in, items_of, new_dict, new_list
from stretto.convert._proof.fixed_tensors import as_rows
from stretto.convert._proof.given_arguments import as_call

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments
    from stretto.convert._proof.script_run import Frame, Run


def builtin_call(run: Run, name: str, given: CallArguments, frame: Frame) -> Value:
    """Return the value of a call of a function of Python's own."""
    node = given.node
    args = given.args
    first: Value = args[0] if args else Constant()
    if name == "print":
        return NONE
    if name == "len":
        return _length_of(run, first, node)
    if node in run.work.whole and name != "next":
        return _of_whole_batches(run, name, node, frame)
    if name in ("range",):
        counted = next((v for v in args if isinstance(v, Count)), None)
        if counted is None:
            return Iter(Constant())
        all_places = counted.exact and (
            len(args) == 1 or args == (Constant(0), counted)
        )
        return Iter(Item(place="here" if all_places else "moved"), samples=True)
    if name == "enumerate":
        items, samples = items_of(run, first, _loop_of(node, run.tree.parent(node)))
        if len(items) > 1:
            return Seq(tuple(Seq((Constant(i), v)) for i, v in enumerate(items)))
        moved = len(args) > 1 or "start" in given.options
        place = Item(place="moved" if moved else "here")
        index: Value = place if samples else Constant()
        return Iter(Seq((index, joined(items, node))), samples)
    if name == "zip":
        if "*" in given.options and len(args) == 1:
            inner = args[0]
            if isinstance(inner, Iter):
                items = (
                    items_in(run, inner.item, node)
                    if not isinstance(inner.item, Item)
                    else [inner.item]
                )
                return Iter(Iter(joined(items, node), inner.samples))
        parts = [items_of(run, v, _loop_of(node, run.tree.parent(node))) for v in args]
        lengths = {len(items) for items, _ in parts}
        if lengths and len(lengths) == 1 and max(lengths) > 1:
            rows = zip(*(items for items, _ in parts), strict=True)
            return Seq(tuple(Seq(r) for r in rows))
        samples = any(s for _, s in parts)
        each = [joined(items, node) for items, _ in parts]
        if samples:
            owns = [own for _, own in parts]
            pairs = zip(each, owns, strict=True)
            each = [v if own else _beside_samples(v) for v, own in pairs]
        return Iter(Seq(tuple(each)), samples)
    if name == "sum":
        return _sum_of(run, first, args, node)
    if name in ("max", "min"):
        values = list(args)
        if len(values) == 1:
            values = (
                items_in(run, first, node)
                if isinstance(first, Seq | Iter | ObjectRef)
                else [first]
            )
        if any(isinstance(v, Linear) for v in values):
            return Unproved(Why.NONLINEAR, node)
        if isinstance(first, Rows) and len(args) == 1:
            return Unproved(Why.DECIDED, node)
        return elementwise([*values, Constant()], node)
    if name in ("float", "int", "abs", "round", "bool", "complex", "pow"):
        if isinstance(first, Count) and name == "int":
            return replace(first, affine=first.affine or not first.exact)
        if name == "float":
            return number_in(run, first, node)
        if (
            isinstance(first, Constant)
            and name == "int"
            and isinstance(first.value, int)
        ):
            return first
        return elementwise(args, node)
    if name in ("list", "tuple", "sorted", "set", "reversed", "iter", "frozenset"):
        if isinstance(first, Shape):
            return first
        items, samples = items_of(run, first, node) if args else ([], False)
        if name == "sorted" and any(isinstance(v, Linear) for v in items):
            return new_list(run, Iter(Unproved(Why.DECIDED, node)), node, frame)
        if isinstance(first, Rows) and first.opaque is not None:
            return first
        if isinstance(first, Rows) and first.whole:
            return first
        made: Value = (
            Seq(tuple(items)) if not args or len(items) > 1 else Iter(items[0], samples)
        )
        sets = name in ("set", "frozenset") and is_of_batch(made)
        left_out = sets or (isinstance(first, Iter) and first.chosen)
        if isinstance(made, Iter) and left_out:
            made = replace(made, chosen=True)
        if isinstance(first, Seq) and name in ("list", "tuple", "iter"):
            made = first
        if isinstance(first, ObjectRef) and first.kind == "list" and name != "set":
            made = run.items_of_ref(first)
        if name in ("list", "set", "sorted"):
            return new_list(run, made, node, frame)
        return made
    if name == "next":
        if node in run.work.whole:
            return Constant()  # a batch of all ranks, equal on each
        item = joined(items_in(run, first, node), node) if args else Constant()
        turns = any(loop.samples for loop in run.loops)
        return Item(place="moved") if turns and isinstance(item, Constant) else item
    if name in ("map", "filter"):
        items, samples = items_of(run, args[1] if len(args) > 1 else NONE, node)
        inner = joined(items, node)
        if name == "filter":
            return Iter(inner, samples, chosen=samples or is_of_batch(inner))
        return Iter(run.call(first, (inner,), {}, node, frame), samples)
    if name == "getattr" and len(args) > 1:
        named = args[1]
        if isinstance(named, Constant) and isinstance(named.value, str):
            return attribute_of(run, first, named.value, node)
        return Constant()
    if name == "setattr" and len(args) > 2:
        named = args[1]
        if (
            isinstance(first, ObjectRef)
            and isinstance(named, Constant)
            and isinstance(named.value, str)
        ):
            run.set(first.key, named.value, args[2])
        return NONE
    if name == "dict":
        known = {f"k:{k}": v for k, v in given.options.items() if k not in ("**", "*")}
        if isinstance(first, ObjectRef) and first.kind == "dict":
            known = {**run.state.get(first.key, {}), **known}
        elif args:
            if isinstance(first, Rows):
                return first
            known["*"] = joined(items_in(run, first, node), node)
        return new_dict(run, known, node, frame)
    if name == "slice":
        ends = (NONE, *args, NONE) if len(args) == 1 else (*args, NONE)
        return SliceValue(*ends[:3]) if len(ends) > 2 else Constant()
    if name in ("isinstance", "hasattr", "callable", "issubclass", "type", "id"):
        return Constant()
    if name in ("any", "all"):
        return first if is_of_batch(first) else Constant()
    return Constant()


def _beside_samples(value: Value) -> Value:
    """Return an element of another list, at the place of a sample."""
    if isinstance(value, Constant) and value.value is UNSET and not value.uniform:
        return Item(place="moved")
    return value


def _of_whole_batches(run: Run, name: str, node: cst.Call, frame: Frame) -> Value:
    """Return what a function returns for the batches of all ranks, equal on each."""
    if name in ("list", "sorted"):
        return new_list(run, Iter(Constant()), node, frame)
    return Iter(Constant()) if name in ("tuple", "map", "filter") else Constant()


def _length_of(run: Run, value: Value, node: cst.CSTNode) -> Value:
    """Return the value of ``len(value)``."""
    if isinstance(value, ObjectRef):
        value = run.items_of_ref(value)
    if isinstance(value, Shape):
        run.given(as_call(node), (), {}).test_rank(value.of)
    if isinstance(value, Constant) and value.counted:
        value = as_rows(value)
    if isinstance(value, Rows):
        if value.whole or value.axis not in (0, None):
            return (
                Constant()
                if value.whole and not value.raw
                else Count()
                if value.raw
                else Constant()
            )
        if not value.even:
            return Unproved(Why.SELECTED, node)
        return Count() if value.copies == 1 else Count(exact=False)
    if isinstance(value, Unproved):
        return value
    if isinstance(value, Iter) and isinstance(value.item, Unproved):
        return value.item
    if isinstance(value, Iter) and value.chosen:
        return Unproved(Why.SELECTED, node)
    if isinstance(value, Iter) and value.samples:
        return Count()
    if isinstance(value, Seq):
        return Constant(len(value.items))
    return Constant()


def _sum_of(
    run: Run, first: Value, args: tuple[Value, ...], node: cst.CSTNode
) -> Value:
    """Return the value of ``sum(values)``."""
    if isinstance(first, Rows) and first.opaque is None and not first.raw:
        return Linear(first.degree + 1) if first.axis == 0 else first
    items, samples = items_of(run, first, node)
    out: Value = args[1] if len(args) > 1 else Constant(0)
    for item in items:
        out = combined("+", out, item, node)
    if isinstance(first, ObjectRef) and first.kind == "dict":
        out = run.items_of_ref(first)
        out = out.item if isinstance(out, Iter) else out
    listed = run.items_of_ref(first) if isinstance(first, ObjectRef) else first
    if isinstance(out, Constant) and out.value != 0 and isinstance(listed, Iter):
        if listed.chosen:
            return Unproved(Why.SELECTED, node)
        if listed.samples:
            return Count(exact=False, grad=out.grad)
    if isinstance(out, Item):
        return Linear(out.degree + 1)
    if samples and isinstance(out, Linear):
        return Unproved(Why.UNREAD, node)
    return out


def number_in(run: Run, value: Value, node: cst.CSTNode) -> Value:
    """Return the number in a tensor, which is reduced over ranks in a step."""
    counted = isinstance(value, Unproved) and value.why in (Why.COUNTED, Why.PLACED)
    seen = run.numbers.setdefault(id(node), [])
    if value not in seen:
        seen.append(value)
    if counted or not isinstance(value, Linear | Rows | Unproved | Count):
        return value
    around = (id(a) for a in run.tree.ancestors(node))
    if not any(a in run.reducing for a in around):
        return value
    if isinstance(value, Count):
        if value.degree != 1 or value.affine or value.grad:
            return Unproved(Why.COUNTED, node)
        run.summed.add(node)
    return Constant()


def _loop_of(node: cst.CSTNode, above: cst.CSTNode | None) -> cst.CSTNode:
    """Return the loop whose iterable a call is, else the call."""
    return above if isinstance(above, cst.For) else node
