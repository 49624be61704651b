"""Functions of torch that join, divide or multiply tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.arithmetic import combined, elementwise, rows_with_rows
from stretto.convert._proof.batch_values import (
    UNSET,
    Constant,
    Count,
    Item,
    Iter,
    Linear,
    OneOf,
    Rows,
    Seq,
    Unproved,
    Why,
    first_bad,
    has_count,
    joined,
    with_elements,
)
from stretto.convert._proof.dimensions import is_sample_dim, without_dims
from stretto.convert._proof.fixed_tensors import (
    as_rows,
    computed,
    multiplied,
    sample_axis,
)
from stretto.convert._proof.given_arguments import known_ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    import libcst as cst

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments


def joined_along(name: str, given: CallArguments) -> Value | None:
    """Return what ``cat`` and ``stack`` make of a tuple or a list."""
    parts = given.get("tensors", 0)
    node = given.node
    dim = given.get("dim", 1) or given.get("axis")
    at = (known_ints(dim) or [0])[0] if dim is not None else 0
    if isinstance(dim, Constant) and dim.value is UNSET:
        at = 1
    if isinstance(parts, OneOf):
        return joined(
            [
                joined_along(
                    name,
                    replace(
                        given,
                        args=(v, *given.args[1:]),
                        options={"dim": dim or Constant(0)},
                    ),
                )
                or Constant()
                for v in parts.values
            ],
            node,
        )
    if isinstance(parts, Iter):
        item = parts.item
        if isinstance(item, Item):
            even = not parts.chosen and name == "stack"
            kind = "order" if item.place else ""
            return Rows(degree=item.degree, even=even, kind=kind)
        if parts.samples and isinstance(item, Constant):
            count = Count(exact=not parts.chosen)
            shape = None if item.shape is None else (count, *item.shape)
            return Constant(grad=item.grad, shape=shape, counted=True)
        values: tuple[Value, ...] = (item,)
        several = True
    elif isinstance(parts, Seq):
        values, several = parts.items, len(parts.items) != 1
    elif isinstance(parts, Rows):
        return replace(parts, raw=False, whole=False)
    else:
        return None
    if (bad := first_bad(values)) is not None:
        return bad
    rows = [v for v in with_elements(values) if isinstance(v, Rows)]
    if not rows and any(isinstance(v, Constant) and v.counted for v in values):
        return _joined_counted(name, values, at, node)
    if any(has_count(v) for v in values):
        return Unproved(Why.COUNTED, node)
    if not rows:
        linear = [v for v in values if isinstance(v, Linear)]
        if linear:
            same = all(v == linear[0] for v in linear)
            return linear[0] if same else Linear(linear[0].degree, mixed=True)
        return Constant(grad=any(isinstance(v, Constant) and v.grad for v in values))
    if any(isinstance(v, Linear) for v in values):
        return Unproved(Why.UNREAD, node)
    for part in rows:
        given.show_rank(part, at + 1 if name != "stack" else at)
    first: Value = rows[0]
    for other in rows[1:]:
        if not isinstance(first, Rows):
            return first
        degree = first.degree == other.degree
        first = (
            rows_with_rows("?", first, other, node)
            if degree
            else Unproved(Why.MIXED, node)
        )
    if not isinstance(first, Rows):
        return first
    if name == "stack":
        ndim = None if first.ndim is None else first.ndim + 1
        if at < 0:
            return replace(first, ndim=ndim, least=first.least + 1)
        moved = first.axis is not None and at <= first.axis
        axis = first.axis + 1 if moved and first.axis is not None else first.axis
        return replace(first, axis=axis, ndim=ndim)
    if name in ("hstack", "column_stack"):
        return replace(first, ndim=2 if name == "column_stack" else first.ndim)
    if is_sample_dim(at, first):
        fixed = [v for v in values if isinstance(v, Constant)]
        if fixed:
            return Unproved(Why.UNREAD, node)
        copies = sum(r.copies for r in rows) if not (several and len(rows) == 1) else 0
        return replace(first, copies=copies or 1)
    return replace(first, single=False)


def _joined_counted(
    name: str, values: Sequence[Value], at: int, node: cst.CSTNode
) -> Value:
    """Return what ``cat`` and ``stack`` make of constants of the batch's size."""
    fixed = [v for v in values if isinstance(v, Constant)]
    out = computed(fixed)
    if name == "stack":
        return replace(out, shape=None)
    first = fixed[0]
    axis = sample_axis(first)
    count = len(first.shape) if first.shape is not None else None
    if axis is None or count is None:
        return Unproved(Why.UNREAD, node)
    if at % count != axis:
        return replace(out, shape=None)
    sizes = [v.shape[axis] if v.shape and len(v.shape) > axis else None for v in fixed]
    if all(isinstance(s, Count) and s.exact for s in sizes):
        return Rows(axis=axis, ndim=count, copies=len(fixed))
    return Unproved(Why.PLACED, node)


def parts_of(name: str, on: Rows, given: CallArguments) -> Value:
    """Return what ``chunk``, ``split`` and ``unbind`` make of a tensor."""
    node = given.node
    dim = given.get("dim", 2 if name != "unbind" else 1) or given.get("axis")
    at = (known_ints(dim) or [0])[0] if dim is not None else 0
    size = given.get("chunks" if name == "chunk" else "split_size_or_sections", 1)
    plain = replace(on, raw=False, whole=False)
    if isinstance(dim, Constant) and dim.value is UNSET:
        return Iter(plain)
    if not is_sample_dim(at, on):
        out = without_dims(on, [at]) if name == "unbind" else plain
        pieces = known_ints(size)
        if name == "chunk" and pieces and 1 < pieces[0] <= 8:
            return Seq((out,) * pieces[0])
        if isinstance(size, Seq) and name == "split":
            return Seq((out,) * len(size.items))
        return Iter(out)
    if name == "unbind":
        return Iter(Item(on.degree), samples=True)
    one = replace(plain, copies=1)
    if name == "chunk" and on.copies > 1 and known_ints(size) == [on.copies]:
        return Seq((one,) * on.copies)
    sized = size if isinstance(size, Count) else None
    if isinstance(size, Seq) and all(isinstance(s, Count) for s in size.items):
        return Seq((one,) * len(size.items))
    if sized is not None and sized.exact:
        return Seq((one,) * on.copies) if on.copies > 1 else Iter(one)
    if isinstance(size, Constant) and size.value is UNSET and on.copies > 1:
        return Seq((one,) * on.copies)  # a batch size, which is listed
    return Unproved(Why.ACROSS, node)


def product(a: Value, b: Value, node: cst.CSTNode, *, dot: bool = False) -> Value:
    """Return the value of a matrix product."""
    if (bad := first_bad([a, b])) is not None:
        return bad
    if isinstance(a, OneOf) or isinstance(b, OneOf):
        return elementwise([a, b], node)
    if isinstance(a, Constant) and isinstance(b, Constant):
        if not (a.counted or b.counted):
            return multiplied(a, b)
        a = as_rows(a) if a.counted else a
        b = as_rows(b) if b.counted else b
    if isinstance(a, Rows) and isinstance(b, Rows):
        shifted = a.shifted or b.shifted
        if shifted is not None:
            return Unproved(Why.ACROSS, shifted)
        flat = a.ndim == 2 or b.ndim == 2 or a.ndim == 1 or b.ndim == 1
        if (a.ndim == 1 and b.ndim == 1) or dot:
            return Linear(a.degree + b.degree + 1)
        flat_too = a.ndim is None and max(a.least, b.least) < 3
        if a.turned is not b.turned and a.axis == b.axis == 0 and flat_too:
            return Unproved(Why.UNREAD, node)  # maybe each sample with each other
        if a.axis is not None and b.axis is not None and (flat or a.axis != b.axis):
            if a.ndim == 2 and b.ndim == 2 and a.axis == 1 and b.axis == 0:
                return Linear(a.degree + b.degree + 1)
            return Unproved(Why.ACROSS, node)
        return rows_with_rows("*", replace(a, ndim=None), replace(b, ndim=None), node)
    if isinstance(a, Rows) and isinstance(b, Constant):
        if a.axis is not None and a.ndim is not None and a.axis == a.ndim - 1:
            return Linear(a.degree + 1)
        return replace(a, raw=False, whole=False)
    if isinstance(a, Constant) and isinstance(b, Rows):
        if b.ndim is not None and b.axis == max(b.ndim - 2, 0):
            return Linear(b.degree + 1)
        return replace(b, raw=False, whole=False)
    return combined("*", a, b, node)
