"""Assignments to names, attributes and elements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.arithmetic import elementwise
from stretto.convert._proof.batch_values import (
    UNSET,
    Class,
    Constant,
    Item,
    Iter,
    LibraryName,
    LibraryResult,
    Linear,
    ObjectRef,
    OneOf,
    Rows,
    Seq,
    Shape,
    Unproved,
    Why,
    first_bad,
    has_count,
    is_of_batch,
    join,
    joined,
)
from stretto.convert._proof.containers import extend, items_of
from stretto.convert._proof.dimensions import size_of
from stretto.convert._proof.fixed_tensors import stored_in
from stretto.convert._proof.subscripts import as_index, index_values, rows_subscript

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Frame, Run


def bind(run: Run, target: cst.BaseExpression, value: Value, frame: Frame) -> None:
    """Assign a value to a target."""
    if isinstance(target, cst.Name):
        run.assign(target.value, value, frame)
    elif isinstance(target, cst.Tuple | cst.List):
        parts = _unpacked(run, value, target)
        for element, part in zip(target.elements, parts, strict=False):
            bind(run, element.value, part, frame)
    elif isinstance(target, cst.Attribute):
        on = run.value(target.value, frame)
        for ref in on.values if isinstance(on, OneOf) else (on,):
            if isinstance(ref, ObjectRef):
                run.set(ref.key, target.attr.value, value)
            elif isinstance(ref, Class):
                run.set(run.key("class", id(ref.node)), target.attr.value, value)
            elif isinstance(ref, LibraryResult) and (_is_sized(value)):
                run.set(run.key("made", id(ref.node)), target.attr.value, value)
    elif isinstance(target, cst.Subscript):
        _store(run, target, value, frame)


def _is_sized(value: Value) -> bool:
    """Return whether a value depends on a batch, also on its size."""
    counted = isinstance(value, Constant) and value.counted
    return counted or is_of_batch(value) or has_count(value)


def _unpacked(run: Run, value: Value, target: cst.Tuple | cst.List) -> list[Value]:
    """Return the values of the names that a value is unpacked into."""
    count = len(target.elements)
    starred = [isinstance(e, cst.StarredElement) for e in target.elements]
    if isinstance(value, OneOf):
        parts = [_unpacked(run, v, target) for v in value.values]
        return [joined(p, target) for p in zip(*parts, strict=False)]
    if isinstance(value, ObjectRef):
        value = run.items_of_ref(value)
    if isinstance(value, Seq) and not any(starred):
        known = list(value.items)
        return known + [Constant()] * (count - len(known))
    if isinstance(value, Shape):
        return [size_of(value.of, i) for i in range(count)]
    if isinstance(value, Rows):
        if value.raw or value.opaque is not None:
            part: Value = replace(value, whole=False)
            return [part] * count
        inner, _ = items_of(run, value, target)
        return [inner[0]] * count
    if isinstance(value, Iter):
        return [value.item] * count
    if isinstance(value, Seq):
        return [joined(value.items, target)] * count
    if isinstance(value, Item | Linear | Unproved):
        return [value] * count
    return [Constant()] * count


def _store(run: Run, target: cst.Subscript, value: Value, frame: Frame) -> None:
    """Assign a value to an element."""
    on = run.value(target.value, frame)
    index = index_values(run, target, frame)
    if isinstance(on, ObjectRef) and on.kind == "dict":
        name = index[0].value if index and isinstance(index[0], Constant) else UNSET
        if isinstance(name, str):
            run.set(on.key, f"k:{name}", value)
        else:
            old = run.get(on.key, "*")
            run.set(on.key, "*", value if old is None else join(old, value, target))
    elif isinstance(on, ObjectRef) and on.kind == "list":
        if any(map(has_count, index)):
            value = Unproved(Why.COUNTED, target)
        extend(run, on, [value], target)
    elif isinstance(on, ObjectRef | LibraryResult | LibraryName | Class):
        return
    else:
        index = [as_index(run, v) for v in index]
        mixed = _stored(on, value, [*index], target)
        if isinstance(on, Rows):
            part = rows_subscript(on, target, index)
            mixed = part if isinstance(part, Unproved) else mixed
        if isinstance(on, Iter) and on.samples:
            mixed = Iter(Unproved(Why.PLACED, target), samples=True)
        run.write(on, mixed, target)
        write_root(run, target.value, mixed, frame)
        bind_again(run, target.value, mixed, frame)


def write_root(run: Run, of: cst.BaseExpression, value: Value, frame: Frame) -> None:
    """Note that a part of a tensor has changed, as in ``a.T[0] = 1``."""
    root: cst.CSTNode = of
    while isinstance(root, cst.Attribute | cst.Subscript | cst.Call):
        root = root.func if isinstance(root, cst.Call) else root.value
    if root is of or not isinstance(root, cst.Name) or not isinstance(value, Unproved):
        return
    old = run.read(root.value, frame)
    if isinstance(old, Rows) or (isinstance(old, Constant) and old.counted):
        run.write(old, value, of)


def _stored(on: Value, value: Value, index: list[Value], node: cst.CSTNode) -> Value:
    """Return a tensor after some of its elements were set."""
    if isinstance(on, Constant) and on.counted:
        return stored_in(on, index, value, node)
    if (bad := first_bad([value, *index])) is not None:
        return bad
    parts = [v for v in (on, value, *index) if is_of_batch(v)]
    if not isinstance(on, Rows) and any(map(has_count, (value, *index))):
        return Unproved(Why.COUNTED, node)
    if not parts:
        return replace(on, uniform=False) if isinstance(on, Constant) else on
    if any(isinstance(i, Item) for i in index) and not isinstance(on, Rows):
        return Rows()
    if isinstance(value, Item) and value.place:
        return Unproved(Why.PLACED, node)
    by_sample = Item(place="here") in index
    if isinstance(on, Rows) and by_sample and isinstance(value, Item):
        return on
    if isinstance(value, Linear):
        return Unproved(Why.ACROSS, node) if isinstance(on, Rows) else value
    if isinstance(on, Rows) and isinstance(value, Constant):
        return on
    if isinstance(on, Constant) and isinstance(value, Rows):
        if any(isinstance(i, Rows) and i.kind != "order" for i in index):
            return Unproved(Why.ACROSS, node)  # a memory of samples
        return replace(value, axis=None if index else value.axis, ndim=None)
    return elementwise([on, value], node)


def bind_again(
    run: Run, target: cst.BaseExpression, value: Value, frame: Frame
) -> None:
    """Assign to a variable what a call or an assignment has changed in place."""
    if isinstance(target, cst.Name | cst.Attribute):
        if isinstance(target, cst.Attribute) and target.attr.value in (
            "data",
            "grad",
        ):
            return
        bind(run, target, value, frame)
