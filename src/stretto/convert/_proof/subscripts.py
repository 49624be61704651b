"""Elements and slices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import (
    ELLIPSIS,
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
    SliceValue,
    Unproved,
    Why,
    first_rows,
    has_count,
    is_of_batch,
    joined,
)
from stretto.convert._proof.class_lookups import bound_method, method_of
from stretto.convert._proof.containers import dict_value
from stretto.convert._proof.dimensions import size_of
from stretto.convert._proof.fixed_tensors import part_of
from stretto.convert._proof.given_arguments import as_call, known_int

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Frame, Run


def index_values(run: Run, node: cst.Subscript, frame: Frame) -> list[Value]:
    """Return the values of an index, with those of a tuple one by one."""
    out: list[Value] = []
    for part in node.slice:
        inner = part.slice
        if isinstance(inner, cst.Index):
            value = run.value(inner.value, frame)
            out += value.items if isinstance(value, Seq) else (value,)
        elif isinstance(inner, cst.Slice):
            ends = (inner.lower, inner.upper, inner.step)
            values = (NONE if e is None else run.value(e, frame) for e in ends)
            out.append(SliceValue(*values))
    return out


def subscript(run: Run, node: cst.Subscript, frame: Frame) -> Value:
    """Return the value of ``a[i]``."""
    on = run.value(node.value, frame)
    if isinstance(on, OneOf):
        return joined([_subscript_of(run, v, node, frame) for v in on.values], node)
    out = _subscript_of(run, on, node, frame)
    run.note_view(out, on)
    return out


def _subscript_of(run: Run, on: Value, node: cst.Subscript, frame: Frame) -> Value:
    """Return an element of one value."""
    index = index_values(run, node, frame)
    first = index[0] if index else Constant()
    number = first.value if isinstance(first, Constant) else UNSET
    part = first if isinstance(first, SliceValue) else None
    if isinstance(on, ObjectRef | Seq | Iter) and part is None:
        chosen = _chosen_by(first, node)
        if chosen is not None and not (
            isinstance(on, ObjectRef) and isinstance(on.kind, cst.ClassDef)
        ):
            return chosen
    if isinstance(on, ObjectRef):
        if on.kind == "dict":
            return dict_value(run, on, number, node)
        if isinstance(on.kind, cst.ClassDef):
            method = method_of(run, on.kind, "__getitem__")
            if method is None:
                return Constant()
            given = (first if len(index) == 1 else Seq(tuple(index)),)
            return run.call(bound_method(run, method, on), given, {}, node, frame)
        on = run.items_of_ref(on)
    if isinstance(on, Seq):
        if part is not None:
            return _cut(on, part, node)
        if isinstance(number, int) and -len(on.items) <= number < len(on.items):
            return on.items[int(number)]
        return joined(on.items, node)
    if isinstance(on, Iter):
        if part is not None and has_count(part):
            return _places(on, on.item)
        if part is not None and on.samples and not part.is_whole:
            return replace(on, item=Unproved(Why.PLACED, node))
        if part is None and on.samples and isinstance(first, Constant):
            return Unproved(Why.PLACED, node)
        return on if part is not None else on.item
    if isinstance(on, Shape):
        if part is not None:
            return _sizes(on, part, node)
        return size_of(on.of, int(number)) if isinstance(number, int) else Constant()
    index = [as_index(run, v) for v in index]
    if isinstance(on, Rows):
        asked = sum(v not in (NONE, ELLIPSIS) for v in index)
        run.given(as_call(node), (), {}).show_rank(on, asked)
        return rows_subscript(on, node, index)
    if isinstance(on, Linear | Item | Unproved | Draw | Count):
        return on
    if isinstance(on, Constant) and on.counted:
        return part_of(on, index)
    if any(isinstance(v, Count) for v in index):
        return Unproved(Why.COUNTED, node)
    parts = [v for v in index if is_of_batch(v)]
    if parts:
        rows = first_rows(parts)
        uniform = isinstance(on, Constant) and on.uniform
        if rows is not None:
            return replace(
                rows,
                raw=False,
                whole=False,
                kind="order" if rows.kind == "order" and not uniform else "",
                opaque=None,
                axis=0,
                ndim=None,
            )
        return parts[0]
    if isinstance(on, LibraryResult) and has_count(on):
        return Unproved(Why.COUNTED, node)
    if isinstance(on, LibraryResult):
        return (
            LibraryResult(f"{on.name}[]", on.node, on.args, on.options)
            if is_of_batch(on)
            else Constant()
        )
    if not isinstance(on, Constant):
        return Constant()
    return _fixed_part(on, index, node)


def as_index(run: Run, value: Value) -> Value:
    """Return a list of indices as a tensor."""
    listed = isinstance(value, ObjectRef) and value.kind == "list"
    items = (
        run.items_of_ref(value) if isinstance(value, ObjectRef) and listed else value
    )
    if isinstance(items, Iter) and items.samples and isinstance(items.item, Item):
        kind = "order" if items.item.place else ""
        return Rows(ndim=1, kind=kind, even=not items.chosen)
    return value


def _fixed_part(on: Constant, parts: list[Value], node: cst.CSTNode) -> Value:
    """Return a part of a tensor without samples."""
    out = part_of(on, parts)
    for place, part in enumerate(parts):
        if isinstance(part, SliceValue) and has_count(part):
            if on.uniform:
                return replace(out, counted=True)
            if has_count(part.step):
                return Unproved(Why.COUNTED, node)
            ndim = None if out.shape is None else len(out.shape)
            return Rows(axis=place, ndim=ndim, kind="order")
    return out


def _chosen_by(index: Value, node: cst.CSTNode) -> Value | None:
    """Return an element of a list or a dict that the batch chooses."""
    if isinstance(index, Unproved):
        return index
    if isinstance(index, Linear | Rows):
        return Unproved(Why.DECIDED, node)
    return Unproved(Why.COUNTED, node) if isinstance(index, Count) else None


def _cut(on: Seq, part: SliceValue, node: cst.CSTNode) -> Value:
    """Return a slice of a tuple or a list."""
    inner = joined(on.items, node)
    if has_count(part):
        return _places(Iter(inner), inner)
    ends = []
    for value in (part.lower, part.upper, part.step):
        known = value.value if isinstance(value, Constant) else UNSET
        if known is not None and not isinstance(known, int):
            return Iter(inner)
        ends.append(known)
    return Seq(on.items[slice(*ends)])


def _places(listed: Value, item: Value) -> Value:
    """Return a list of as many numbers as samples, which depend on their places."""
    if isinstance(item, Constant):
        return Iter(Item(place="moved"), samples=True)
    return listed


def _sizes(on: Shape, part: SliceValue, node: cst.CSTNode) -> Value:
    """Return some sizes of a tensor."""
    lower = 0 if part.lower == NONE else known_int(part.lower)
    upper = known_int(part.upper)
    axis, whole = on.of.axis, part.upper == NONE
    if lower is not None and upper is not None and 0 <= lower <= upper:
        return Seq(tuple(size_of(on.of, i) for i in range(lower, upper)))
    if axis is None or lower is None or lower < 0 or (upper is None and not whole):
        return Iter(Unproved(Why.COUNTED, node))
    if axis < lower:
        return Iter(Constant())
    if whole and lower == 0:
        return on
    return Shape(replace(on.of, axis=axis - lower, ndim=None, thin=False))


def rows_subscript(on: Rows, node: cst.Subscript, index: list[Value]) -> Value:
    """Return elements of a tensor of samples."""
    key = index[0] if index else Constant()
    plain = isinstance(key, Constant) and len(index) == 1
    if len(index) == 1 and isinstance(key, Iter):
        return replace(on, whole=False, ndim=None)
    if isinstance(key, Constant) and isinstance(key.value, str):
        if key.value == "loss" and on.trusted:
            return Linear(0)
        return replace(on, whole=False)
    if on.whole and isinstance(key, Constant):
        return replace(on, whole=False)
    if on.opaque is not None and plain:
        return on
    return _rows_indexed(on, index, node)


def _rows_indexed(on: Rows, parts: list[Value], node: cst.Subscript) -> Value:
    """Return a tensor of samples after each part of an index."""
    axis, ndim = on.axis, on.ndim
    place = new = taken = 0
    out = replace(on, raw=False, whole=False, thin=False, least=1)
    found_rows = False
    kept: int | None = None
    for value in parts:
        if value == ELLIPSIS:
            if axis is not None and place <= axis and kept is None:
                kept = new + axis - place if place <= axis else None
            place = 10**6
            continue
        if value == NONE:
            new += 1
            ndim = None if ndim is None else ndim + 1
            continue
        here = axis is not None and place == axis
        if isinstance(value, SliceValue):
            if here:
                kept = new
                if not _keeps_samples(value, on):
                    return Unproved(Why.ACROSS, node)
                if value.ends != (NONE, NONE):
                    out = replace(out, copies=1)
            elif has_count(value):
                return Unproved(Why.COUNTED, node)
            new += 1
        elif isinstance(value, Rows):
            if value.kind == "order" or value.kind == "bool" or here or axis is None:
                if not found_rows:
                    kept = new if here or kept is None else kept
                    new += 1
                if (here and value.kind == "bool") or (here and value.kind != "order"):
                    out = replace(out, even=False)
                elif value.kind == "bool":
                    out = replace(out, even=False)
                    kept = 0
            found_rows = True
            if here and value.kind == "order" and value.sorted:
                out = replace(out, sorted=not out.sorted)
            if not value.even:
                out = replace(out, even=False)
        elif isinstance(value, Item) and here:
            if value.place != "here":
                return Unproved(Why.ACROSS, node)
            return Item(on.degree)
        elif here:
            return Unproved(Why.ACROSS, node)
        elif has_count(value):
            return Unproved(Why.COUNTED, node)
        else:
            ndim = None if ndim is None else ndim - 1
            taken += 1
        place += 1
    if axis is None:
        return replace(out, ndim=None, kind=on.kind)
    if kept is None:
        kept = new + axis - place if place <= axis else axis
    left = max(2, len(parts)) - taken
    return replace(
        out,
        axis=max(kept, 0),
        ndim=ndim if not found_rows else None,
        thin=ndim is None and taken > 0 and left <= 1,
        single=on.single and not taken and not found_rows,
        rank=on.rank + new - place if place < 10**6 else 0,
        layer=on.layer if place < 10**6 else None,
    )


def _keeps_samples(part: SliceValue, on: Rows) -> bool:
    """Return whether a slice keeps all samples, or a group of all of them."""
    if part.step not in (NONE, Constant(1)):
        return False
    for value in part.ends:
        if isinstance(value, Count) and value.exact:
            continue
        if on.copies > 1 and isinstance(value, Count):
            continue
        if on.copies > 1 and isinstance(value, Constant) and value.value is UNSET:
            continue  # a batch size, which is listed
        if isinstance(value, Constant) and value.value in (0, None):
            continue
        return False
    return True
