"""Attributes of values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.batch_values import (
    BoundMethod,
    Class,
    Constant,
    Count,
    Item,
    LibraryName,
    LibraryResult,
    Linear,
    ObjectRef,
    OneOf,
    Rows,
    Seq,
    Shape,
    Unproved,
    first_rows,
    joined,
)
from stretto.convert._proof.class_lookups import class_attribute, object_attribute
from stretto.convert._proof.fixed_tensors import as_rows, fixed_method
from stretto.convert._proof.given_arguments import as_call
from stretto.convert._proof.loaders import is_loader
from stretto.convert._proof.own_gradients import has_own_gradient
from stretto.convert._proof.tensor_methods import tensor_method

if TYPE_CHECKING:
    import libcst as cst

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Run


def attribute_of(run: Run, on: Value, name: str, node: cst.CSTNode) -> Value:
    """Return an attribute of a value."""
    if isinstance(on, OneOf):
        return joined([attribute_of(run, v, name, node) for v in on.values], node)
    if isinstance(on, LibraryName):
        return LibraryName(f"{on.name}.{name}")
    if isinstance(on, ObjectRef):
        return object_attribute(run, on, name, node)
    if isinstance(on, Class):
        if name == "apply" and has_own_gradient(run, on):
            return BoundMethod(on, name)
        known = run.get(run.key("class", id(on.node)), name)
        if known is not None:
            return known
        return class_attribute(run, on.node, name, None, node)
    if isinstance(on, Rows):
        if name in ("shape",):
            return Shape(on)
        if name in ("T", "mT", "H", "mH"):
            given = run.given(as_call(node), (on,), {})
            return tensor_method(name, given) or on
        if name in ("device", "dtype", "grad", "requires_grad", "grad_fn"):
            return Constant()
        if name.startswith("is_"):
            return Constant()
        if name == "ndim":
            run.given(as_call(node), (), {}).test_rank(on)
            return Constant() if on.ndim is None else Constant(on.ndim)
        if name in ("data", "real", "imag"):
            return replace(on, kind="")
        if name == "loss" and on.trusted:
            return Linear(0)
        if name in ("size", "nbytes", "strides", "itemsize"):
            return BoundMethod(on, name)
        if on.raw or on.opaque is not None:
            return replace(on, whole=False)
        return BoundMethod(on, name)
    if isinstance(on, Linear):
        if name in ("device", "dtype", "grad", "shape", "requires_grad", "grad_fn"):
            return Constant()
        return on if name in ("data", "T") else BoundMethod(on, name)
    if isinstance(on, Seq):
        if name in ("values", "indices") and len(on.items) == 2:
            return on.items[name == "indices"]
        return BoundMethod(on, name)
    if isinstance(on, LibraryResult):
        known = run.get(run.key("made", id(on.node)), name)
        if known is not None:
            return known
        if name == "batch_size" and is_loader(run, on):
            return Constant() if node in run.work.whole else Count()
        if name in ("weight", "bias"):
            return Constant(grad=True)
        if name in (
            "mean",
            "stddev",
            "loc",
            "scale",
            "probs",
            "logits",
            "variance",
            "mode",
        ) and (rows := first_rows([on])):
            return replace(rows, raw=False, whole=False)
        return LibraryResult(f"{on.name}.{name}", on.node, on.args, on.options)
    if isinstance(on, Item | Unproved):
        return on
    if isinstance(on, Count) and name in ("shape", "device", "dtype"):
        return Constant()
    if isinstance(on, Constant) and on.counted:
        if name == "shape":
            return Shape(as_rows(on))
        if name in ("data", "T", "mT", "real"):
            return fixed_method(name, on, run.given(as_call(node), (on,), {}))
        return (
            Constant() if name in ("device", "dtype", "grad") else BoundMethod(on, name)
        )
    return Constant(
        grad=isinstance(on, Constant)
        and on.grad
        and name not in ("shape", "device", "dtype", "grad")
    )
