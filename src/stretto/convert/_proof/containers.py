"""Lists, dicts, and the elements of everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._flow import SAME_OBJECT
from stretto.convert._proof.batch_values import (
    NONE,
    UNSET,
    Constant,
    Count,
    Draw,
    Item,
    Iter,
    LibraryResult,
    Linear,
    ObjectRef,
    OneOf,
    Rows,
    Seq,
    Shape,
    Unproved,
    Why,
    has_count,
    joined,
)
from stretto.convert._proof.class_lookups import bound_method, method_of
from stretto.convert._proof.dimensions import size_of
from stretto.convert._proof.fixed_tensors import sample_axis
from stretto.convert._proof.loaders import batch_of, is_loader
from stretto.convert._proof.script_run import MODULE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments
    from stretto.convert._proof.script_run import Frame, Run


_UNROLLED = 6
"""The longest tuple whose loop is followed element by element."""


def new_list(run: Run, items: Value, node: cst.CSTNode, frame: Frame) -> ObjectRef:
    """Return a new list."""
    ref = ObjectRef(run.key("list", frame.key, id(node)), "list")
    run.state[ref.key] = {"items": items}
    return ref


def new_dict(
    run: Run, parts: Mapping[str, Value], node: cst.CSTNode, frame: Frame
) -> ObjectRef:
    """Return a new dict."""
    ref = ObjectRef(run.key("dict", frame.key, id(node)), "dict")
    run.state[ref.key] = dict(parts)
    return ref


def extend(
    run: Run, ref: ObjectRef, values: Sequence[Value], node: cst.CSTNode
) -> None:
    """Add values to a list."""
    old = run.get(ref.key, "items") or Seq(())
    samples = any(loop.samples for loop in run.loops)
    if isinstance(old, Seq) and not run.loops and len(old.items) < 64:
        run.set(ref.key, "items", Seq((*old.items, *values)))
        return
    if isinstance(old, Iter) and old.samples and not samples:
        values = [Unproved(Why.PLACED, node)]
    items = list(old.items) if isinstance(old, Seq) else []
    if isinstance(old, Iter):
        items, samples = [old.item], samples or old.samples
    several = joined([*items, *values], node)
    several = by_place(several) if samples else several
    chosen = samples and (bool(run.written) or (isinstance(old, Iter) and old.chosen))
    run.set(ref.key, "items", Iter(several, samples, chosen))


def by_place(value: Value) -> Value:
    """Return what is made for each sample of a batch, which may differ by its place."""
    known = isinstance(value, Constant) and (value.uniform or value.value is not UNSET)
    if isinstance(value, Constant) and not known and not value.grad:
        return Item(place="moved")
    return value


def items_in(run: Run, value: Value, node: cst.CSTNode) -> list[Value]:
    """Return the elements of a value, or one that stands for all."""
    return items_of(run, value, node)[0]


def items_of(
    run: Run, value: Value, node: cst.CSTNode, *, whole: bool = False
) -> tuple[list[Value], bool]:
    """Return the elements of a value, and whether there is one for each sample."""
    if isinstance(value, ObjectRef):
        if value.kind == "dict":
            return [Constant()], False
        if isinstance(value.kind, cst.ClassDef):
            return [_iterated(run, value)], False
        value = run.items_of_ref(value)
    if isinstance(value, OneOf):
        return [
            joined((i for v in value.values for i in items_in(run, v, node)), node)
        ], False
    if isinstance(value, Seq):
        if 0 < len(value.items) <= _UNROLLED:
            return list(value.items), False
        return [joined(value.items, node)], False
    if isinstance(value, Iter):
        return [value.item], value.samples
    if isinstance(value, Shape):
        ndim = value.of.ndim
        if ndim is None:
            return [Unproved(Why.COUNTED, node)], False
        return [size_of(value.of, i) for i in range(ndim)], False
    if isinstance(value, Constant) and value.counted:
        part = replace(value, shape=None, counted=False)
        run.note_view(part, value)
        return [part], sample_axis(value) == 0
    if isinstance(value, Rows):
        if value.opaque is not None or value.axis is None:
            return [replace(value, whole=False)], False
        if value.axis == 0 and not whole:
            if value.whole and not isinstance(node, cst.For):
                return [replace(value, whole=False)], False
            return [
                Item(value.degree, place="here" if value.kind == "order" else "")
            ], True
        ndim = None if value.ndim is None else value.ndim - 1
        return [replace(value, axis=max(value.axis - 1, 0), ndim=ndim)], False
    if isinstance(value, LibraryResult) and is_loader(run, value):
        return [batch_of(run, value)], False
    if isinstance(value, Count):
        return [Item(place="here")], True
    if isinstance(value, Linear | Item | Unproved | Draw):
        return [value], False
    return [Constant(grad=isinstance(value, Constant) and value.grad)], False


def _iterated(run: Run, ref: ObjectRef) -> Value:
    """Return what an object of the script yields."""
    if isinstance(ref.kind, cst.ClassDef):
        method = method_of(run, ref.kind, "__iter__")
        if method is not None:
            made = run.call(
                bound_method(run, method, ref), (), {}, ref.kind, run.frames[MODULE]
            )
            return items_in(run, made, ref.kind)[0]
    return Constant()


def dict_value(run: Run, ref: ObjectRef, name: object, node: cst.CSTNode) -> Value:
    """Return a value of a dict."""
    known = run.state.get(ref.key, {})
    if isinstance(known.get("*"), Unproved):
        return known["*"]
    if isinstance(name, str) and f"k:{name}" in known:
        return known[f"k:{name}"]
    if isinstance(name, str) and "*" in known:
        return known["*"]
    return joined(known.values(), node) if known else Constant()


def container_method(
    run: Run, on: ObjectRef, name: str, given: CallArguments, frame: Frame
) -> Value:
    """Return the value of a call of a method of a list or a dict."""
    node, args = given.node, given.args
    first: Value = args[0] if args else Constant()
    if on.kind == "list":
        if name in ("append", "add", "insert", "appendleft"):
            extend(run, on, [args[-1]] if args else [], node)
            return NONE
        if name in ("extend", "update"):
            extend(run, on, items_in(run, first, node), node)
            return NONE
        if name in ("clear",):
            run.set(on.key, "items", Seq(()))
            return NONE
        if name in ("pop", "popleft"):
            return joined(items_in(run, on, node), node)
        if name in SAME_OBJECT:
            return on
        if name in ("parameters",):
            return Iter(Constant(grad=True))
        if name in ("copy", "reverse", "sort"):
            return on
        return Constant()
    inside = run.state.get(on.key, {})
    few = 0 < len(inside) <= _UNROLLED and "*" not in inside
    if name == "values":
        return Seq(tuple(inside.values())) if few else run.items_of_ref(on)
    if name == "items":
        if few:
            pairs = ((k.removeprefix("k:"), v) for k, v in inside.items())
            return Seq(tuple(Seq((Constant(k), v)) for k, v in pairs))
        each = run.items_of_ref(on)
        value = each.item if isinstance(each, Iter) else Constant()
        return Iter(Seq((Constant(), value)))
    if name in ("get", "pop", "setdefault"):
        key = first.value if isinstance(first, Constant) else UNSET
        if has_count(first):
            return Unproved(Why.COUNTED, node)
        return dict_value(run, on, key, node)
    if name == "update":
        if isinstance(first, ObjectRef) and first.kind == "dict":
            for key_, value in run.state.get(first.key, {}).items():
                run.set(on.key, key_, value)
        for key_, value in given.options.items():
            run.set(on.key, f"k:{key_}", value)
        return NONE
    if name in SAME_OBJECT or name == "copy":
        return on
    return Constant()
