"""Operators, displays and comprehensions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.arithmetic import combined, elementwise
from stretto.convert._proof.batch_values import (
    NONE,
    UNSET,
    BoundMethod,
    Constant,
    Count,
    Draw,
    Item,
    Iter,
    LibraryName,
    LibraryResult,
    Linear,
    ObjectRef,
    OneOf,
    Rows,
    Seq,
    Unproved,
    Why,
    first_rows,
    has_count,
    is_of_batch,
    join,
    joined,
)
from stretto.convert._proof.branches import afresh, decide, either, truth_of
from stretto.convert._proof.containers import (
    by_place,
    items_in,
    items_of,
    new_dict,
    new_list,
)
from stretto.convert._proof.script_run import Frame
from stretto.convert._proof.targets import bind
from stretto.convert._proof.tensor_joins import product

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Run


OPERATORS = {
    cst.Add: "+",
    cst.Subtract: "-",
    cst.Multiply: "*",
    cst.Divide: "/",
    cst.FloorDivide: "//",
    cst.Power: "**",
    cst.AddAssign: "+",
    cst.SubtractAssign: "-",
    cst.MultiplyAssign: "*",
    cst.DivideAssign: "/",
    cst.FloorDivideAssign: "//",
    cst.PowerAssign: "**",
}


def element_values(
    run: Run, elements: Sequence[cst.BaseElement], frame: Frame
) -> Iterator[Value]:
    """Yield the values of the elements of a display."""
    for element in elements:
        value = run.value(element.value, frame)
        if element in run.work.whole:
            yield Constant()  # batches of all ranks, equal on each
        elif isinstance(element, cst.StarredElement):
            yield from items_in(run, value, element)
        else:
            yield value


def dict_display(run: Run, node: cst.Dict, frame: Frame) -> Value:
    """Return the dict of a display."""
    parts: dict[str, Value] = {}
    for element in node.elements:
        value = run.value(element.value, frame)
        if isinstance(element, cst.DictElement):
            key = run.value(element.key, frame)
            name = key.value if isinstance(key, Constant) else UNSET
            if isinstance(name, str):
                parts[f"k:{name}"] = value
                continue
        elif isinstance(value, ObjectRef) and value.kind == "dict":
            parts |= run.state.get(value.key, {})
            continue
        parts["*"] = join(parts["*"], value, node) if "*" in parts else value
    return new_dict(run, parts, node, frame)


def operation(run: Run, node: cst.BinaryOperation, frame: Frame) -> Value:
    """Return the value of ``a op b``."""
    a, b = run.value(node.left, frame), run.value(node.right, frame)
    if isinstance(node.operator, cst.MatrixMultiply):
        return product(a, b, node)
    if isinstance(a, ObjectRef) or isinstance(b, ObjectRef):
        parts = [run.items_of_ref(v) if isinstance(v, ObjectRef) else v for v in (a, b)]
        if isinstance(node.operator, cst.Multiply):
            listed = parts[0] if isinstance(a, ObjectRef) else parts[1]
            inner = joined(items_in(run, listed, node), node)
            times = parts[1] if isinstance(a, ObjectRef) else parts[0]
            one = isinstance(listed, Seq) and len(listed.items) == 1
            exact = isinstance(times, Count) and times.exact and times.degree == 1
            if has_count(times) and not (one and exact):
                inner = Unproved(Why.COUNTED, node)
            return new_list(run, Iter(inner, samples=exact), node, frame)
        both = combined("+", parts[0], parts[1], node)
        return new_list(
            run, both if isinstance(both, Seq | Iter) else Iter(both), node, frame
        )
    return combined(OPERATORS.get(type(node.operator), "?"), a, b, node)


def unary_operation(run: Run, node: cst.UnaryOperation, frame: Frame) -> Value:
    """Return the value of ``op a``."""
    value = run.value(node.expression, frame)
    if isinstance(node.operator, cst.Not):
        known = truth_of(value)
        if known is not None:
            return Constant(not known)
        return value if is_of_batch(value) else Constant()
    if isinstance(node.operator, cst.Minus) and isinstance(value, Constant):
        number = value.value
        if isinstance(number, int | float):
            return Constant(-number, value.grad)
        return Constant(grad=value.grad)
    if isinstance(node.operator, cst.BitInvert) and isinstance(value, Linear):
        return Unproved(Why.NONLINEAR, node)
    return value


def comparison(run: Run, node: cst.Comparison, frame: Frame) -> Value:
    """Return the value of a comparison."""
    left = run.value(node.left, frame)
    values = [left]
    out: list[bool | None] = []
    for part in node.comparisons:
        right = run.value(part.comparator, frame)
        out.append(_compared(part.operator, values[-1], right))
        values.append(right)
    if out and all(o is not None for o in out):
        return Constant(all(out))
    if any(isinstance(p.operator, cst.Is | cst.IsNot) for p in node.comparisons):
        return Constant()
    for value in values:
        if isinstance(value, Linear | Unproved):
            return Unproved(Why.DECIDED, node)
    counts = sum(isinstance(v, Count) for v in values)
    if 0 < counts < len(values) and first_rows(values) is None:
        return Unproved(Why.DECIDED, node)
    rows = first_rows(values)
    if rows is not None:
        made = elementwise(
            [replace(v, degree=0) if isinstance(v, Rows) else v for v in values],
            node,
        )
        if isinstance(made, Rows) and made.kind == "order":
            return Unproved(Why.ACROSS, node)
        return replace(made, kind="bool") if isinstance(made, Rows) else made
    if any(isinstance(v, Item) for v in values):
        return Item()
    return Draw() if any(isinstance(v, Draw) for v in values) else Constant()


def boolean_operation(run: Run, node: cst.BooleanOperation, frame: Frame) -> Value:
    """Return the value of ``and`` or ``or``."""
    left = run.value(node.left, frame)
    known = truth_of(left)
    is_and = isinstance(node.operator, cst.And)
    if known is not None:
        return left if known is not is_and else run.value(node.right, frame)
    right = run.value(node.right, frame)
    second = truth_of(right)
    if second is not None and second is not is_and and not is_of_batch(left):
        return (
            Constant(second) if isinstance(right, Constant) else join(left, right, node)
        )
    for value in (left, right):
        if is_of_batch(value):
            return value
    return join(left, right, node)


def conditional(run: Run, node: cst.IfExp, frame: Frame) -> Value:
    """Return the value of ``a if test else b``."""
    truth, why = decide(run, node.test, frame)
    if truth is not None:
        return run.value(node.body if truth else node.orelse, frame)
    one, other = run.value(node.body, frame), run.value(node.orelse, frame)
    if node.body.deep_equals(node.orelse):
        return join(one, other, node)
    return either(afresh(one), other, node, why)


def comprehension(run: Run, node: cst.BaseComp, frame: Frame) -> Value:
    """Return the value of a comprehension or a generator expression."""
    inner = Frame(
        key=run.key("comp", frame.key, id(node)),
        scope=frame.scope,
        owner=frame.owner,
        parent=frame,
        receiver=frame.receiver,
    )
    samples = chosen = False
    part: cst.CompFor | None = node.for_in
    unrolled: list[Value] | None = None
    while part is not None:
        over = run.value(part.iter, inner)
        items, each = items_of(run, over, part)
        if part in run.work.whole:
            items, each = [Constant()], False
        samples = samples or each
        simple = part is node.for_in and part.inner_for_in is None and not part.ifs
        if simple and len(items) > 1:
            unrolled = []
            for item in items:
                bind(run, part.target, item, inner)
                unrolled.append(_comprehension_result(run, node, inner))
            break
        bind(run, part.target, joined(items, part), inner)
        for test in part.ifs:
            chosen = decide(run, test.test, inner)[1] is not None or chosen
        part = part.inner_for_in
    if isinstance(node, cst.DictComp):
        value = joined(unrolled, node) if unrolled else run.value(node.value, inner)
        run.state.pop(inner.key, None)
        return new_dict(run, {"*": value}, node, frame)
    if unrolled is not None:
        result: Value = Seq(tuple(unrolled))
    else:
        item = _comprehension_result(run, node, inner)
        result = Iter(by_place(item) if samples else item, samples, chosen)
    run.state.pop(inner.key, None)
    if isinstance(node, cst.GeneratorExp):
        return result
    return new_list(run, result, node, frame)


def _comprehension_result(run: Run, node: cst.BaseComp, frame: Frame) -> Value:
    """Return one element of a comprehension."""
    if isinstance(node, cst.DictComp):
        return run.value(node.value, frame)
    return run.value(getattr(node, "elt", None), frame)


def _compared(operator: cst.BaseCompOp, a: Value, b: Value) -> bool | None:
    """Return the result of a comparison, if it is certain."""
    if isinstance(operator, cst.Is | cst.IsNot | cst.Equal | cst.NotEqual):
        equal: bool | None = None
        x = a.value if isinstance(a, Constant) else UNSET
        y = b.value if isinstance(b, Constant) else UNSET
        if x is not UNSET and y is not UNSET:
            equal = x == y
        elif NONE in (a, b):
            other = b if a == NONE else a
            if not isinstance(
                other, Constant | OneOf | LibraryResult | LibraryName | BoundMethod
            ):
                equal = False
        if equal is None:
            return None
        return equal if isinstance(operator, cst.Is | cst.Equal) else not equal
    if not isinstance(a, Constant) or a.value is UNSET:
        return None
    if isinstance(operator, cst.In | cst.NotIn):
        if isinstance(b, Seq) and all(
            isinstance(i, Constant) and i.value is not UNSET for i in b.items
        ):
            inside = any(
                isinstance(i, Constant) and i.value == a.value for i in b.items
            )
            return inside if isinstance(operator, cst.In) else not inside
        return None
    if not isinstance(b, Constant) or b.value is UNSET:
        return None
    x, y = a.value, b.value
    if not isinstance(x, int | float) or not isinstance(y, int | float):
        return None
    if isinstance(operator, cst.GreaterThan):
        return x > y
    if isinstance(operator, cst.GreaterThanEqual):
        return x >= y
    if isinstance(operator, cst.LessThan):
        return x < y
    return x <= y if isinstance(operator, cst.LessThanEqual) else None
