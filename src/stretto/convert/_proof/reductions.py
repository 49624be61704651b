"""Functions of torch that combine the elements of a dimension, or of all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.arithmetic import elementwise, rows_with_rows
from stretto.convert._proof.batch_values import (
    Constant,
    Linear,
    Rows,
    Seq,
    Unproved,
    Why,
    first_nonlinear,
)
from stretto.convert._proof.dimensions import (
    is_sample_dim,
    may_be_sample_dim,
    without_dims,
)
from stretto.convert._proof.given_arguments import known_ints
from stretto.convert._tree import found

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments


_DEFAULT_DIMS = {
    "normalize": 1,
    "glu": -1,
    "gumbel_softmax": -1,
    "argsort": -1,
    "sort": -1,
    "topk": -1,
    "kthvalue": -1,
    "softmax": 1,
    "log_softmax": 1,
    "softmin": 1,
    "diff": -1,
    "flipud": 0,
    "fliplr": 1,
}


_OVER_ALL = frozenset(["roll", "take_along_dim", "take"])
"""Functions along a dimension that without one see a tensor as a row of elements."""


_DIM_PLACES = {
    "gumbel_softmax": 5,
    "normalize": 2,
    "topk": 1,
    "kthvalue": 1,
    "norm": 1,
    "vector_norm": 2,
    "roll": 1,
    "quantile": 1,
    "matrix_norm": 99,
    "take_along_dim": 2,
    "diff": 1,
}
"""Place of the dimension after the tensor, if it is not the first."""


def reduced(name: str, on: Rows, given: CallArguments) -> Value:
    """Return what ``mean``, ``sum`` and similar functions make of a tensor."""
    node = given.node
    place = _DIM_PLACES.get(name, 0) + 1
    dim = given.get("dim", place) or given.get("axis")
    if name in ("max", "min") and isinstance(dim, Rows):
        return elementwise(given.args, node)
    if name == "norm" and "dim" not in given.options and len(given.args) < 3:
        dim = None
    dims = known_ints(dim)
    over_all = dim is None or (isinstance(dim, Constant) and dim.value is None)
    keep = given.get("keepdim", place + 1) or given.get("keepdims")
    kept = isinstance(keep, Constant) and keep.value is True
    pair = not over_all and name in ("max", "min", "median", "mode", "kthvalue")
    if over_all or (dims is not None and any(is_sample_dim(d, on) for d in dims)):
        if name in ("mean", "nanmean") and on.copies:
            if on.opaque is not None and not on.trusted and _is_loss_name(on.opaque):
                return Unproved(Why.UNREAD, on.opaque)
            if not on.even or name == "nanmean":
                return Unproved(Why.SELECTED, node)
            return Linear(on.degree)
        if name in ("sum", "nansum"):
            return Linear(on.degree + 1)
        bad = Unproved(Why.ACROSS, node)
        return Seq((bad, bad)) if pair else bad
    if dims is not None and any(may_be_sample_dim(d, on) for d in dims):
        bad = Unproved(Why.UNREAD, node)
        return Seq((bad, bad)) if pair else bad
    if on.shifted is not None and name not in ("mean", "sum"):
        return Unproved(Why.ACROSS, on.shifted)
    if dims is None and on.axis is not None and not _is_behind(given, on):
        return Unproved(Why.UNREAD, node)
    if name not in ("mean", "sum", "nansum") and on.degree:
        return Unproved(Why.NONLINEAR, node)
    out = replace(on, raw=False, whole=False, kind="")
    if not kept and dims is not None:
        out = without_dims(on, dims)
    if name in ("all", "any"):
        out = replace(out, kind="bool")
    return Seq((out, out)) if pair else out


def _is_behind(given: CallArguments, on: Rows) -> bool:
    """Return whether dimensions are written as a range behind that of the samples."""
    for call in found(given.node, cst.Call):
        named = isinstance(call.func, cst.Name) and call.func.value == "range"
        start = call.args[0].value if len(call.args) > 1 else None
        if named and isinstance(start, cst.Integer):
            return on.axis is not None and int(start.value) > on.axis
    return False


def _is_loss_name(node: cst.CSTNode) -> bool:
    """Return whether a call is, by its name, of a loss."""
    if not isinstance(node, cst.Call):
        return False
    func = node.func
    name = ""
    if isinstance(func, cst.Name):
        name = func.value
    elif isinstance(func, cst.Attribute):
        name = func.attr.value
    name = name.lower()
    return any(word in name for word in ("loss", "criteri", "crit", "objective"))


def along_dim(name: str, on: Rows, given: CallArguments) -> Value:
    """Return what a function along one dimension makes of a tensor."""
    node = given.node
    place = _DIM_PLACES.get(name, 0) + 1
    dim = given.get("dim", place) or given.get("dims", place) or given.get("axis")
    dims = known_ints(dim)
    pair = name in ("sort", "topk", "kthvalue")
    if dims is None and dim is None and name in _OVER_ALL:
        return Unproved(Why.ACROSS, node)
    if dims is None:
        default = _DEFAULT_DIMS.get(name)
        dims = [default] if default is not None and dim is None else []
    if any(is_sample_dim(d, on) for d in dims):
        bad = Unproved(Why.ACROSS, node)
        order = replace(on, kind="order", raw=False, whole=False, sorted=True)
        if name == "argsort":
            return order
        if name == "sort":
            return Seq((replace(on, sorted=True) if on.raw else bad, order))
        return Seq((bad, bad)) if pair else bad
    only = dim is None and pair and on.axis == 0 and on.ndim is None and on.least < 2
    if only or any(may_be_sample_dim(d, on) for d in dims):
        bad = Unproved(Why.UNREAD, node)
        return Seq((bad, bad)) if pair else bad
    if name not in ("flip", "roll", "cumsum"):
        nonlinear = first_nonlinear([on], node)
        if nonlinear is not None:
            return nonlinear
    out: Value = replace(on, raw=False, whole=False, kind="")
    if name.startswith(("gather", "scatter", "index", "take")):
        others = [v for v in given.args[1:] if isinstance(v, Rows)]
        for other in others:
            if isinstance(out, Rows):
                out = rows_with_rows("?", out, replace(other, ndim=out.ndim), node)
    if name == "kthvalue" and isinstance(out, Rows):
        out = without_dims(out, dims)
    return Seq((out, out)) if pair else out
