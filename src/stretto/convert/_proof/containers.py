"""Lists, dicts, and the elements of everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._collate import is_listed
from stretto.convert._flow import SAME_OBJECT
from stretto.convert._proof.batch_values import (
    NONE,
    UNSET,
    Alt,
    Bad,
    Count,
    Draw,
    Fixed,
    Func,
    Item,
    Iter,
    Linear,
    Made,
    Ref,
    Rows,
    Seq,
    Shape,
    first_bad,
    is_of_batch,
    joined,
)
from stretto.convert._proof.class_lookups import bound_method, method_of
from stretto.convert._proof.script_run import MODULE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import Given
    from stretto.convert._proof.script_run import Frame, Run


_UNROLLED = 6
"""The longest tuple whose loop is followed element by element."""


def new_list(run: Run, items: Value, node: cst.CSTNode, frame: Frame) -> Ref:
    """Return a new list."""
    ref = Ref(run.key("list", frame.key, id(node)), "list")
    run.state[ref.key] = {"items": items}
    return ref


def new_dict(
    run: Run, parts: Mapping[str, Value], node: cst.CSTNode, frame: Frame
) -> Ref:
    """Return a new dict."""
    ref = Ref(run.key("dict", frame.key, id(node)), "dict")
    run.state[ref.key] = dict(parts)
    return ref


def extend(run: Run, ref: Ref, values: Sequence[Value], node: cst.CSTNode) -> None:
    """Add values to a list."""
    old = run.get(ref.key, "items") or Seq(())
    samples = any(loop.samples for loop in run.loops)
    if isinstance(old, Seq) and not run.loops and len(old.items) < 64:
        run.set(ref.key, "items", Seq((*old.items, *values)))
        return
    items = list(old.items) if isinstance(old, Seq) else []
    if isinstance(old, Iter):
        items, samples = [old.item], samples or old.samples
    several = joined([*items, *values], node)
    samples = samples and is_of_batch(several)
    chosen = samples and (bool(run.written) or (isinstance(old, Iter) and old.chosen))
    run.set(ref.key, "items", Iter(several, samples, chosen))


def items_in(run: Run, value: Value, node: cst.CSTNode) -> list[Value]:
    """Return the elements of a value, or one that stands for all."""
    return items_of(run, value, node)[0]


def items_of(
    run: Run, value: Value, node: cst.CSTNode, *, whole: bool = False
) -> tuple[list[Value], bool]:
    """Return the elements of a value, and whether there is one for each sample."""
    if isinstance(value, Ref):
        if value.kind == "dict":
            return [Fixed()], False
        if isinstance(value.kind, cst.ClassDef):
            return [_iterated(run, value)], False
        value = run.items_of_ref(value)
    if isinstance(value, Alt):
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
        return [Fixed()], False
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
    if isinstance(value, Made) and is_loader(run, value):
        return [batch_of(run, value)], False
    if isinstance(value, Count):
        return [Item(place="here")], True
    if isinstance(value, Linear | Item | Bad | Draw):
        return [value], False
    return [Fixed(grad=isinstance(value, Fixed) and value.grad)], False


def _iterated(run: Run, ref: Ref) -> Value:
    """Return what an object of the script yields."""
    if isinstance(ref.kind, cst.ClassDef):
        method = method_of(run, ref.kind, "__iter__")
        if method is not None:
            made = run.call(
                bound_method(run, method, ref), (), {}, ref.kind, run.frames[MODULE]
            )
            return items_in(run, made, ref.kind)[0]
    return Fixed()


def is_loader(run: Run, made: Made) -> bool:
    """Return whether an object of a library is a loader."""
    last = made.name.rpartition(".")[2]
    return last.endswith("DataLoader") or run.job.batches.is_loader(made.node)


def _tensors_of(loader: Made) -> Value | None:
    """Return the batch of a loader of a ``TensorDataset`` whose shapes are known."""
    data = loader.option("dataset", 0)
    if not isinstance(data, Made) or not data.name.endswith("TensorDataset"):
        return None
    shapes = [v.shape if isinstance(v, Fixed) else None for v in data.args]
    if not shapes or None in shapes:
        return None
    return Seq(
        tuple(
            Rows(raw=True, ndim=len(s), single=len(s) > 1 and s[-1] == 1)
            for s in shapes
            if s is not None
        )
    )


def _with_lists(run: Run, value: Value) -> Value:
    """Return a value with the elements of lists in place of these."""
    if isinstance(value, Ref) and value.kind == "list":
        value = run.items_of_ref(value)
    if isinstance(value, Seq):
        return Seq(tuple(_with_lists(run, v) for v in value.items))
    return value


def _function_of(run: Run, collate: Value) -> cst.FunctionDef | cst.Lambda | None:
    """Return the script's function that a loader's ``collate_fn`` calls."""
    if isinstance(collate, Made) and collate.name == "functools.partial":
        collate = collate.args[0] if collate.args else NONE
    if isinstance(collate, Ref) and isinstance(collate.kind, cst.ClassDef):
        method = method_of(run, collate.kind, "__call__")
        return method[0] if method is not None else None
    return collate.node if isinstance(collate, Func) else None


def batch_of(run: Run, made: Made) -> Value:
    """Return the batch of a loader, as its ``collate_fn`` makes it."""
    raw = Rows(raw=True, whole=True)
    collate = made.option("collate_fn", 6)
    unknown = collate is not None and collate != NONE
    return read_batch(run, made) or (replace(raw, axis=None) if unknown else raw)


def read_batch(run: Run, made: Made) -> Value | None:
    """Return the batch of a loader if its ``collate_fn`` or its tensors are known."""
    collate = made.option("collate_fn", 6)
    if collate is None or collate == NONE:
        return _tensors_of(made)
    function = _function_of(run, collate)
    if function is None:
        return None
    if is_listed(run.work, function):
        return Rows(raw=True, whole=True)  # one note for one cause
    item = Iter(Item(), samples=True)
    out = run.call(collate, (item,), {}, made.node, run.frames[MODULE])
    out = _with_lists(run, out)
    known = is_of_batch(out) or isinstance(out, Ref)
    if known and first_bad([out]) is None:
        return out
    return Rows(raw=True, whole=True, axis=None)


def dict_value(run: Run, ref: Ref, name: object, node: cst.CSTNode) -> Value:
    """Return a value of a dict."""
    known = run.state.get(ref.key, {})
    if isinstance(known.get("*"), Bad):
        return known["*"]
    if isinstance(name, str) and f"k:{name}" in known:
        return known[f"k:{name}"]
    if isinstance(name, str) and "*" in known:
        return known["*"]
    return joined(known.values(), node) if known else Fixed()


def container_method(run: Run, on: Ref, name: str, given: Given, frame: Frame) -> Value:
    """Return the value of a call of a method of a list or a dict."""
    node, args = given.node, given.args
    first: Value = args[0] if args else Fixed()
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
            return Iter(Fixed(grad=True))
        if name in ("copy", "reverse", "sort"):
            return on
        return Fixed()
    inside = run.state.get(on.key, {})
    few = 0 < len(inside) <= _UNROLLED and "*" not in inside
    if name == "values":
        return Seq(tuple(inside.values())) if few else run.items_of_ref(on)
    if name == "items":
        if few:
            pairs = ((k.removeprefix("k:"), v) for k, v in inside.items())
            return Seq(tuple(Seq((Fixed(k), v)) for k, v in pairs))
        each = run.items_of_ref(on)
        value = each.item if isinstance(each, Iter) else Fixed()
        return Iter(Seq((Fixed(), value)))
    if name in ("get", "pop", "setdefault"):
        key = first.value if isinstance(first, Fixed) else UNSET
        return dict_value(run, on, key, node)
    if name == "update":
        if isinstance(first, Ref) and first.kind == "dict":
            for key_, value in run.state.get(first.key, {}).items():
                run.set(on.key, key_, value)
        for key_, value in given.options.items():
            run.set(on.key, f"k:{key_}", value)
        return NONE
    if name in SAME_OBJECT or name == "copy":
        return on
    return Fixed()
