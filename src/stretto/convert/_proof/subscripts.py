"""Elements and slices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import (
    NONE,
    UNSET,
    Alt,
    Bad,
    Count,
    Draw,
    Fixed,
    Item,
    Iter,
    Linear,
    Made,
    Ref,
    Rows,
    Seq,
    Shape,
    Why,
    first_rows,
    is_of_batch,
    joined,
)
from stretto.convert._proof.class_lookups import bound_method, method_of
from stretto.convert._proof.containers import dict_value
from stretto.convert._proof.dimensions import size_of
from stretto.convert._proof.fixed_tensors import part_of

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Frame, Run


def index_values(run: Run, node: cst.Subscript, frame: Frame) -> list[Value]:
    """Return the values of an index."""
    out: list[Value] = []
    for part in node.slice:
        inner = part.slice
        if isinstance(inner, cst.Index):
            value = run.value(inner.value, frame)
            if isinstance(value, Seq) and len(node.slice) == 1:
                out += value.items
            else:
                out.append(value)
        else:
            out.append(Fixed())
    return out


def subscript(run: Run, node: cst.Subscript, frame: Frame) -> Value:
    """Return the value of ``a[i]``."""
    on = run.value(node.value, frame)
    if isinstance(on, Alt):
        return joined([_subscript_of(run, v, node, frame) for v in on.values], node)
    return _subscript_of(run, on, node, frame)


def _subscript_of(run: Run, on: Value, node: cst.Subscript, frame: Frame) -> Value:
    """Return an element of one value."""
    first = node.slice[0].slice
    index = index_values(run, node, frame)
    number = index[0].value if index and isinstance(index[0], Fixed) else UNSET
    sliced = isinstance(first, cst.Slice)
    part = first if isinstance(first, cst.Slice) else None
    if isinstance(on, Ref | Seq | Iter) and not sliced:
        chosen = _chosen_by(index[0] if index else Fixed(), node)
        if chosen is not None and not (
            isinstance(on, Ref) and isinstance(on.kind, cst.ClassDef)
        ):
            return chosen
    if isinstance(on, Ref):
        if on.kind == "dict":
            return dict_value(run, on, number, node)
        if isinstance(on.kind, cst.ClassDef):
            method = method_of(run, on.kind, "__getitem__")
            if method is None:
                return Fixed()
            given = (index[0] if index else Fixed(),)
            return run.call(bound_method(run, method, on), given, {}, node, frame)
        on = run.items_of_ref(on)
    if isinstance(on, Seq):
        if part is not None:
            return _cut(run, on, part, frame)
        if isinstance(number, int) and -len(on.items) <= number < len(on.items):
            return on.items[int(number)]
        return joined(on.items, node)
    if isinstance(on, Iter):
        if part is not None and _is_counted(run, part, frame):
            return _places(on.item, on)
        return on if sliced else on.item
    if isinstance(on, Shape):
        if sliced:
            return Iter(Fixed()) if not _is_whole(first) else on
        return size_of(on.of, int(number)) if isinstance(number, int) else Fixed()
    if isinstance(on, Rows):
        return rows_subscript(run, on, node, index, frame)
    if isinstance(on, Linear | Item | Bad | Draw):
        return on
    parts = [v for v in index if is_of_batch(v)]
    if parts:
        rows = first_rows(parts)
        uniform = isinstance(on, Fixed) and on.uniform
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
    if isinstance(on, Made):
        return (
            Made(f"{on.name}[]", on.node, on.args, on.options)
            if is_of_batch(on)
            else Fixed()
        )
    if not isinstance(on, Fixed):
        return Fixed()
    return _fixed_part(run, on, _index_parts(run, node, frame), frame)


def _fixed_part(
    run: Run, on: Fixed, parts: list[tuple[cst.BaseSlice, Value]], frame: Frame
) -> Value:
    """Return a part of a tensor without samples."""
    out = part_of(on, parts)
    if on.uniform:
        return out
    for place, (part, _) in enumerate(parts):
        if isinstance(part, cst.Slice) and _is_counted(run, part, frame):
            ndim = None if out.shape is None else len(out.shape)
            return Rows(axis=place, ndim=ndim, kind="order")
    return out


def _chosen_by(index: Value, node: cst.CSTNode) -> Value | None:
    """Return an element of a list or a dict that the batch chooses."""
    if isinstance(index, Bad):
        return index
    if isinstance(index, Linear | Rows):
        return Bad(Why.DECIDED, node)
    return None


def _cut(run: Run, on: Seq, part: cst.Slice, frame: Frame) -> Value:
    """Return a slice of a tuple or a list."""
    if _is_counted(run, part, frame):
        return _places(joined(on.items, part), Iter(joined(on.items, part)))
    ends = []
    for end in (part.lower, part.upper, part.step):
        value = run.value(end, frame) if end is not None else NONE
        known = value.value if isinstance(value, Fixed) else UNSET
        if known is not None and not isinstance(known, int):
            return Iter(joined(on.items, part))
        ends.append(known)
    return Seq(on.items[slice(*ends)])


def _is_counted(run: Run, part: cst.Slice, frame: Frame) -> bool:
    """Return whether a slice has as many elements as the batch has samples."""
    ends = [e for e in (part.lower, part.upper) if e is not None]
    return any(isinstance(run.value(e, frame), Count) for e in ends)


def _places(item: Value, listed: Value) -> Value:
    """Return a list of as many numbers as samples, which depend on their places."""
    if item == Fixed(grad=isinstance(item, Fixed) and item.grad):
        return Iter(Item(place="moved"), samples=True)
    return listed


def _is_whole(part: cst.BaseSlice) -> bool:
    """Return whether a slice takes everything."""
    return isinstance(part, cst.Slice) and (
        part.lower is None and part.upper is None and part.step is None
    )


def rows_subscript(
    run: Run, on: Rows, node: cst.Subscript, index: list[Value], frame: Frame
) -> Value:
    """Return elements of a tensor of samples."""
    inner = node.slice[0].slice
    key = index[0] if index else Fixed()
    if (
        isinstance(inner, cst.Index)
        and len(node.slice) == 1
        and isinstance(inner.value, cst.BinaryOperation)
        and not isinstance(key, Rows | Item | Fixed | Bad)
    ):
        return replace(on, whole=False, ndim=None)
    if isinstance(key, Fixed) and isinstance(key.value, str):
        if key.value == "loss" and on.trusted:
            return Linear(0)
        return replace(on, whole=False)
    if on.whole and isinstance(key, Fixed) and isinstance(inner, cst.Index):
        return replace(on, whole=False)
    if (
        on.opaque is not None and len(node.slice) == 1 and isinstance(inner, cst.Index)
    ) and isinstance(key, Fixed):
        return on
    return _rows_indexed(run, on, _index_parts(run, node, frame), node, frame)


def _index_parts(
    run: Run, node: cst.Subscript, frame: Frame
) -> list[tuple[cst.BaseSlice, Value]]:
    """Return the parts of an index, with their values."""
    parts: list[tuple[cst.BaseSlice, Value]] = []
    for part in node.slice:
        if isinstance(part.slice, cst.Index):
            value = run.value(part.slice.value, frame)
            several = value.items if isinstance(value, Seq) else (value,)
            parts += [(part.slice, v) for v in several]
        else:
            parts.append((part.slice, Fixed()))
    return parts


def _rows_indexed(
    run: Run,
    on: Rows,
    parts: list[tuple[cst.BaseSlice, Value]],
    node: cst.Subscript,
    frame: Frame,
) -> Value:
    """Return a tensor of samples after each part of an index."""
    axis, ndim = on.axis, on.ndim
    place = new = taken = 0
    out = replace(on, raw=False, whole=False, thin=False, least=1)
    found_rows = False
    kept: int | None = None
    for part, value in parts:
        dotdot = isinstance(part, cst.Index) and isinstance(part.value, cst.Ellipsis)
        if dotdot:
            if axis is not None and place <= axis and kept is None:
                kept = new + axis - place if place <= axis else None
            place = 10**6
            continue
        if isinstance(part, cst.Index) and value == NONE:
            new += 1
            ndim = None if ndim is None else ndim + 1
            continue
        here = axis is not None and place == axis
        if isinstance(part, cst.Slice):
            if here:
                kept = new
                if not _keeps_samples(run, part, on, frame):
                    return Bad(Why.ACROSS, node)
                if part.lower is not None or part.upper is not None:
                    out = replace(out, copies=1)
            new += 1
        elif isinstance(value, Rows) and isinstance(part, cst.Index):
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
                return Bad(Why.ACROSS, node)
            return Item(on.degree)
        elif here and isinstance(value, Fixed):
            listed = isinstance(part, cst.Index) and isinstance(part.value, cst.List)
            if value.value is UNSET and not listed:
                return Bad(Why.ACROSS, node)
            return Bad(Why.ACROSS, node)
        elif here:
            return Bad(Why.ACROSS, node)
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
    )


def _keeps_samples(run: Run, part: cst.Slice, on: Rows, frame: Frame) -> bool:
    """Return whether a slice keeps all samples, or a group of all of them."""
    if part.step is not None:
        step = run.value(part.step, frame)
        if not (isinstance(step, Fixed) and step.value in (1, None)):
            return False
    for end in (part.lower, part.upper):
        if end is None:
            continue
        value = run.value(end, frame)
        if isinstance(value, Count) and value.exact:
            continue
        if on.copies > 1 and isinstance(value, Count):
            continue
        if on.copies > 1 and isinstance(value, Fixed) and value.value is UNSET:
            continue  # a batch size, which is listed
        if isinstance(value, Fixed) and value.value in (0, None):
            continue
        return False
    return True
