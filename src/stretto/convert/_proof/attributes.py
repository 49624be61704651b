"""Attributes of values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.batch_values import (
    Alt,
    Bad,
    Class,
    Count,
    Fixed,
    Item,
    Lib,
    Linear,
    Made,
    Method,
    Ref,
    Rows,
    Seq,
    Shape,
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
    if isinstance(on, Alt):
        return joined([attribute_of(run, v, name, node) for v in on.values], node)
    if isinstance(on, Lib):
        return Lib(f"{on.name}.{name}")
    if isinstance(on, Ref):
        return object_attribute(run, on, name, node)
    if isinstance(on, Class):
        if name == "apply" and has_own_gradient(run, on):
            return Method(on, name)
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
            return Fixed()
        if name.startswith("is_"):
            return Fixed()
        if name == "ndim":
            run.given(as_call(node), (), {}).test_rank(on)
            return Fixed() if on.ndim is None else Fixed(on.ndim)
        if name in ("data", "real", "imag"):
            return replace(on, kind="")
        if name == "loss" and on.trusted:
            return Linear(0)
        if name in ("size", "nbytes", "strides", "itemsize"):
            return Method(on, name)
        if on.raw or on.opaque is not None:
            return replace(on, whole=False)
        return Method(on, name)
    if isinstance(on, Linear):
        if name in ("device", "dtype", "grad", "shape", "requires_grad", "grad_fn"):
            return Fixed()
        return on if name in ("data", "T") else Method(on, name)
    if isinstance(on, Seq):
        if name in ("values", "indices") and len(on.items) == 2:
            return on.items[name == "indices"]
        return Method(on, name)
    if isinstance(on, Made):
        known = run.get(run.key("made", id(on.node)), name)
        if known is not None:
            return known
        if name == "batch_size" and is_loader(run, on):
            return Fixed() if node in run.work.whole else Count()
        if name in ("weight", "bias"):
            return Fixed(grad=True)
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
        return Made(f"{on.name}.{name}", on.node, on.args, on.options)
    if isinstance(on, Item | Bad):
        return on
    if isinstance(on, Count) and name in ("shape", "device", "dtype"):
        return Fixed()
    if isinstance(on, Fixed) and on.counted:
        if name == "shape":
            return Shape(as_rows(on))
        if name in ("data", "T", "mT", "real"):
            return fixed_method(name, on, run.given(as_call(node), (on,), {}))
        return Fixed() if name in ("device", "dtype", "grad") else Method(on, name)
    return Fixed(
        grad=isinstance(on, Fixed)
        and on.grad
        and name not in ("shape", "device", "dtype", "grad")
    )
