"""Arithmetic with values: ``+ - * /``, and functions of single elements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.batch_values import (
    BoundMethod,
    Constant,
    Count,
    Draw,
    Item,
    Iter,
    Linear,
    OneOf,
    Rows,
    Seq,
    Shape,
    Unproved,
    Why,
    first_bad,
    first_nonlinear,
    first_rows,
    has_count,
    is_of_batch,
    joined,
    with_elements,
)
from stretto.convert._proof.fixed_tensors import as_rows, computed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import libcst as cst

    from stretto.convert._proof.batch_values import Value


def combined(op: str, a: Value, b: Value, node: cst.CSTNode) -> Value:
    """Return the value of ``a op b``.

    Any operator but ``+ - * /``, ``//`` and ``**`` is ``?``.
    """
    for value in (a, b):
        if isinstance(value, Unproved):
            return value
    if isinstance(a, OneOf):
        return joined([combined(op, v, b, node) for v in a.values], node)
    if isinstance(b, OneOf):
        return joined([combined(op, a, v, node) for v in b.values], node)
    if isinstance(a, Seq) and isinstance(b, Seq) and op == "+":
        return Seq(a.items + b.items)
    several = (Seq, Iter)
    if op == "+" and isinstance(a, several) and isinstance(b, several):
        if any(isinstance(v, Iter) and v.samples for v in (a, b)):
            return Iter(Unproved(Why.PLACED, node), samples=True)
        return Iter(joined([_element(a), _element(b)], node))
    a, b = _plain(a, node), _plain(b, node)
    if isinstance(a, Unproved) or isinstance(b, Unproved):
        return a if isinstance(a, Unproved) else b
    if isinstance(a, Constant) and isinstance(b, Constant):
        return _folded(op, a, b)
    if isinstance(a, Item) or isinstance(b, Item):
        return _with_item(op, a, b, node)
    if isinstance(a, Draw) or isinstance(b, Draw):
        other = b if isinstance(a, Draw) else a
        if isinstance(other, Rows):
            return other
        if isinstance(other, Linear):
            return other if op in "+-" else Unproved(Why.DRAWN, node)
        return Draw()
    if isinstance(a, Count) or isinstance(b, Count):
        return _with_count(op, a, b, node)
    if isinstance(a, Rows) and isinstance(b, Rows):
        return rows_with_rows(op, a, b, node)
    if isinstance(a, Rows) and isinstance(b, Constant):
        if has_size(b, a):
            return Unproved(Why.SIZED, node)
        return _rows_with_fixed(op, a, node, inverse=False)
    if isinstance(a, Constant) and isinstance(b, Rows):
        if has_size(a, b):
            return Unproved(Why.SIZED, node)
        return _rows_with_fixed(op, b, node, inverse=op not in "+-*")
    if isinstance(a, Rows) and isinstance(b, Linear):
        return _rows_with_linear(op, a, b, node)
    if isinstance(a, Linear) and isinstance(b, Rows):
        return _rows_with_linear(op if op != "/" else "?", b, a, node)
    return _with_linear(op, a, b, node)


def _plain(value: Value, node: cst.CSTNode) -> Value:
    """Return a value as a number or a tensor."""
    if isinstance(value, Constant | Rows | Linear | Item | Count | Draw):
        return value
    if (bad := first_bad([value])) is not None:
        return bad
    if (rows := first_rows([value])) is not None:
        return rows
    of_rows = isinstance(value, BoundMethod) and isinstance(value.of, Rows)
    if has_count(value) or isinstance(value, Shape) or of_rows:
        return Unproved(Why.COUNTED, node)
    return Unproved(Why.UNREAD, node) if is_of_batch(value) else Constant()


def _element(value: Value) -> Value:
    if isinstance(value, Iter):
        return value.item
    if isinstance(value, Seq) and value.items:
        return value.items[0]
    return value


def _folded(op: str, a: Constant, b: Constant) -> Constant:
    grad = a.grad or b.grad
    x, y = a.value, b.value
    if isinstance(x, int | float) and isinstance(y, int | float):
        try:
            value = {"+": x + y, "-": x - y, "*": x * y}.get(op)
            if op == "/":
                value = x / y
        except (ArithmeticError, ValueError):
            return Constant(grad=grad)
        if value is not None:
            return Constant(value, grad)
    if op == "+" and isinstance(x, str) and isinstance(y, str):
        return Constant(x + y)
    return computed([a, b])


def _with_item(op: str, a: Value, b: Value, node: cst.CSTNode) -> Value:
    places = [isinstance(v, Item) and v.place != "" for v in (a, b)]
    if any(places):
        if all(places) or any(isinstance(v, Constant | Count) for v in (a, b)):
            return Item(place="moved")
        return Unproved(Why.ACROSS, node)  # places in the batch as numbers
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Item):
            if isinstance(other, Rows):
                return Unproved(Why.ACROSS, node)
            if isinstance(other, Linear):
                if op == "+" and other.degree == one.degree + 1:
                    return other
                return Unproved(Why.UNREAD, node)
            if isinstance(other, Count) and op == "/" and one is a and not other.affine:
                return Item(one.degree - other.degree)
            if isinstance(other, Count) and op == "*" and not other.affine:
                return Item(one.degree + other.degree)
            if isinstance(other, Count):
                return Unproved(Why.COUNTED, node)
            if isinstance(other, Item) and other.degree != one.degree:
                return Unproved(Why.MIXED, node)
            return one
    return Unproved(Why.UNREAD, node)


def _with_count(op: str, a: Value, b: Value, node: cst.CSTNode) -> Value:
    if isinstance(a, Count) and isinstance(b, Count):
        return _counts(op, a, b, node)
    count = a if isinstance(a, Count) else b
    other = b if isinstance(a, Count) else a
    if not isinstance(count, Count):
        return Unproved(Why.UNREAD, node)
    if isinstance(other, Constant):
        return _count_with_fixed(op, count, other, node, inverse=count is b)
    if isinstance(other, Linear) and op in "+-":
        if other.degree == 0 and not count.grad:
            return other
        return replace(other, mixed=True)
    if op not in "*/" or count.affine:
        return Unproved(Why.COUNTED, node)
    by = count.degree
    if isinstance(other, Rows):
        if op == "*":
            return replace(other, degree=other.degree + by)
        if count is b:
            return replace(other, degree=other.degree - by)
        return replace(other, degree=by - other.degree)
    if isinstance(other, Linear):
        if other.mixed:
            return Unproved(Why.MIXED, node)
        if op == "*":
            return Linear(other.degree + by)
        if count is b:
            return Linear(other.degree - by)
        return Unproved(Why.NONLINEAR, node)
    return Unproved(Why.UNREAD, node)


def _counts(op: str, a: Count, b: Count, node: cst.CSTNode) -> Value:
    """Return the value of an operation on two numbers of samples."""
    affine, grad = a.affine or b.affine, a.grad or b.grad
    if op == "*":
        return Count(a.degree + b.degree, exact=False, affine=affine, grad=grad)
    if op == "/":
        rest = a.degree - b.degree
        if rest:
            return Count(rest, exact=False, affine=affine, grad=grad)
        return Unproved(Why.COUNTED, node) if affine else Constant(grad=grad)
    if op in "+-" and a.degree == b.degree:
        return Count(a.degree, exact=False, affine=affine, grad=grad)
    return Unproved(Why.COUNTED, node)


def _count_with_fixed(
    op: str, count: Count, other: Constant, node: cst.CSTNode, *, inverse: bool
) -> Value:
    """Return the value of an operation on a number of samples and a constant."""
    by, grad, number = count.degree, count.grad or other.grad, other.value
    out = replace(count, exact=False, grad=grad)
    if isinstance(number, str):
        return Unproved(Why.COUNTED, node)
    if other.counted:
        rows = as_rows(other)
        if inverse:
            return _with_count(op, rows, count, node)
        return _with_count(op, count, rows, node)
    if op == "*" or (op == "/" and not inverse):
        return replace(out, exact=count.exact and number in (1, True))
    if op == "/":
        return Unproved(Why.COUNTED, node) if count.affine else replace(out, degree=-by)
    if op in "+-":
        same = number in (0, False) and not (inverse and op == "-")
        return replace(out, affine=True) if not same else replace(count, grad=grad)
    if op == "//" and not inverse:
        return replace(out, affine=True, exact=count.exact and number in (1, True))
    if op == "**" and not inverse and isinstance(number, int) and not count.affine:
        return replace(out, degree=by * int(number))
    return Unproved(Why.COUNTED, node)


def rows_with_rows(op: str, a: Rows, b: Rows, node: cst.CSTNode) -> Value:
    """Return the value of an operation on the elements of two tensors of samples."""
    axis = a.axis if a.axis is not None else b.axis
    if a.axis is not None and b.axis is not None:
        ends = (
            (a.ndim - a.axis, b.ndim - b.axis)
            if a.ndim is not None and b.ndim is not None
            else (a.axis, b.axis)
        )
        if ends[0] != ends[1]:
            return Unproved(Why.ACROSS, node)
        axis = max(a.axis, b.axis)
    if (a.kind == "order") is not (b.kind == "order"):
        return Unproved(Why.ACROSS, node)  # places in the batch as numbers
    if a.sorted is not b.sorted:
        return Unproved(Why.ACROSS, node)  # each sample with another
    if (a.single and b.thin) or (b.single and a.thin):
        return Unproved(Why.UNREAD, node)  # maybe each sample with each other
    shifted = a.shifted or b.shifted
    if shifted is not None and op not in "+-":
        return Unproved(Why.ACROSS, shifted)
    degree = a.degree
    if op == "*":
        degree = a.degree + b.degree
    elif op == "/":
        degree = a.degree - b.degree
    elif a.degree != b.degree:
        return Unproved(Why.MIXED, node)
    ndim = None
    if a.ndim is not None and b.ndim is not None:
        ndim = max(a.ndim, b.ndim)
    opaque = a.opaque if a.opaque is not None else b.opaque
    return Rows(
        axis=axis,
        ndim=ndim,
        least=max(r.least if r.ndim is None else r.ndim for r in (a, b)),
        degree=degree,
        even=a.even and b.even,
        shifted=shifted,
        opaque=opaque,
        trusted=a.trusted or b.trusted,
        copies=max(a.copies, b.copies),
        sorted=a.sorted,
        layer=a.layer if a.layer is not None else b.layer,
        rank=a.rank if a.layer is not None else b.rank,
        thin=ndim is None and any(r.thin or r.ndim == 1 for r in (a, b)),
        kind=a.kind if a.kind == b.kind else "",
    )


def has_size(fixed: Constant, rows: Rows) -> bool:
    """Return whether a constant has a fixed number of elements for the samples."""
    if fixed.shape is None or rows.axis is None or rows.ndim is None:
        return False
    at = rows.axis - rows.ndim + len(fixed.shape)
    size = fixed.shape[at] if at >= 0 else 1
    return isinstance(size, int) and size > 1


def _rows_with_fixed(op: str, a: Rows, node: cst.CSTNode, *, inverse: bool) -> Value:
    if a.shifted is not None and (inverse or op not in "+-*/"):
        return Unproved(Why.ACROSS, a.shifted)
    if inverse:
        return replace(a, degree=-a.degree, raw=False, whole=False, kind="")
    if op not in "+-*/" and a.degree != 0:
        return Unproved(Why.NONLINEAR, node)
    return replace(a, raw=False, whole=False, kind=kept_kind(op, a))


def kept_kind(op: str, a: Rows) -> str:
    """Return the kind of what an operation makes of a tensor."""
    return a.kind if op in "+-*/" or a.kind == "order" else ""


def _rows_with_linear(op: str, a: Rows, b: Linear, node: cst.CSTNode) -> Value:
    if op in "+-" and a.degree == b.degree and not b.mixed:
        return replace(a, shifted=node, raw=False, whole=False)
    if a.opaque is not None and not a.trusted:
        return Unproved(Why.UNREAD, a.opaque)
    return Unproved(Why.ACROSS, node)


def _with_linear(op: str, a: Value, b: Value, node: cst.CSTNode) -> Value:
    if isinstance(a, Linear) and isinstance(b, Linear):
        if op in "+-":
            mixed = a.mixed or b.mixed or a.degree != b.degree
            return Linear(max(a.degree, b.degree), mixed)
        return Unproved(Why.SELECTED if op == "/" else Why.NONLINEAR, node)
    linear = a if isinstance(a, Linear) else b
    other = b if isinstance(a, Linear) else a
    if not isinstance(linear, Linear) or not isinstance(other, Constant):
        return Unproved(Why.UNREAD, node)
    if op in "+-":
        mixed = linear.mixed or (linear.degree != 0 and other.grad)
        return Linear(linear.degree, mixed)
    if op == "*" or (op == "/" and linear is a):
        return linear
    return Unproved(Why.NONLINEAR, node)


def elementwise(values: Iterable[Value], node: cst.CSTNode) -> Value:
    """Return the value of a function of the elements of its arguments."""
    out: Value = Constant()
    given = [
        v
        for v in with_elements(values)
        if isinstance(v, Constant | Rows | Linear | Item | Count | Draw | Unproved)
    ]
    if (bad := first_bad(given) or first_nonlinear(given, node)) is not None:
        return bad
    for value in given:
        if isinstance(value, Constant):
            continue
        if isinstance(value, Count):
            return Unproved(Why.COUNTED, node)
        out = combined("?", out, value, node) if out != Constant() else value
        if isinstance(out, Unproved):
            return out
    if isinstance(out, Rows):
        return replace(out, raw=False, whole=False, kind=kept_kind("?", out))
    if isinstance(out, Constant):
        return computed(v for v in given if isinstance(v, Constant))
    return out
