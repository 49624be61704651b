"""Methods of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.arithmetic import combined, elementwise, kept_kind
from stretto.convert._proof.batch_values import (
    Alt,
    Bad,
    Count,
    Draw,
    Fixed,
    Item,
    Iter,
    Linear,
    Rows,
    Seq,
    Shape,
    Why,
    is_of_batch,
    joined,
    with_elements,
)
from stretto.convert._proof.dimensions import (
    is_sample_dim,
    moved_dims,
    size_of,
    without_dims,
)
from stretto.convert._proof.fixed_tensors import (
    RANK_CHANGING,
    SIZE_CHANGING,
    fixed_method,
    tiles,
)
from stretto.convert._proof.given_arguments import known_ints
from stretto.convert._proof.reductions import along_dim, reduced
from stretto.convert._proof.tensor_joins import joined_along, parts_of, product
from stretto.convert._proof.tensor_names import (
    ALONG,
    ELEMENTWISE,
    LINEAR_SHAPE,
    MOVING,
    REDUCING,
)

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import Given


_ARITHMETIC = {
    "add": "+",
    "add_": "+",
    "sub": "-",
    "sub_": "-",
    "subtract": "-",
    "mul": "*",
    "mul_": "*",
    "multiply": "*",
    "div": "/",
    "div_": "/",
    "divide": "/",
    "true_divide": "/",
}


def tensor_method(name: str, given: Given) -> Value | None:
    """Return the value of a method of a tensor, the first argument."""
    if not given.args:
        return Fixed()
    on = given.args[0]
    node = given.node
    if isinstance(on, Alt):
        return joined(
            [
                tensor_method(name, replace(given, args=(v, *given.args[1:])))
                or Fixed()
                for v in on.values
            ],
            node,
        )
    if isinstance(on, Seq | Iter) and name in (
        "tensor",
        "as_tensor",
        "array",
        "asarray",
        "FloatTensor",
        "LongTensor",
        "Tensor",
        "mean",
        "sum",
        "max",
        "min",
        "std",
    ):
        inner = joined_along("stack", replace(given, options={}, args=(on,)))
        if inner is not None and is_of_batch(inner):
            if name in ("mean", "sum", "max", "min", "std"):
                return tensor_method(
                    name, replace(given, args=(inner, *given.args[1:]))
                )
            return inner
        return Fixed()
    if isinstance(on, Bad):
        pair = name in ("sort", "topk", "max", "min") and len(given.args) > 1
        return Seq((on, on)) if pair else on
    if name in ("item",):
        return on
    if isinstance(on, Linear):
        return _linear_method(name, on, given)
    if isinstance(on, Item):
        return on
    rest = list(given.args[1:])
    if isinstance(on, Rows):
        out = _rows_method(name, on, given)
        if out is not None:
            return out
        return None
    if isinstance(on, Draw):
        if name in ("normal_", "uniform_", "random_"):
            return on
        return elementwise([on, *rest], node)
    if isinstance(on, Count):
        return (
            on
            if name in ("float", "to", "long", "int", "clone", "tensor", "as_tensor")
            else Bad(Why.UNREAD, node)
        )
    # A value without samples, with others that may have some.
    if name in ("matmul", "mm", "bmm", "mv", "dot") and rest:
        return product(on, rest[0], node)
    if name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_"):
        if given.in_step:
            return Rows()
        return replace(on, uniform=False) if isinstance(on, Fixed) else on
    if name in ("new_zeros", "new_ones", "new_full"):
        return Fixed(uniform=True)
    if name in ("zeros_like", "ones_like"):
        return Fixed(uniform=True, shape=on.shape if isinstance(on, Fixed) else None)
    counts = [isinstance(v, Count) for v in with_elements(rest)]
    if any(counts) and isinstance(on, Fixed):
        if name in ("repeat", "tile") and not on.uniform and tiles(on, counts):
            return Rows(axis=counts.index(True), kind="order")
        if name in ("repeat", "expand"):
            return Fixed(grad=on.grad)
        if name in ("narrow", "resize_") and not on.uniform:
            return Rows(axis=None if name == "narrow" else 0, kind="order")
    others = [v for v in with_elements(rest) if is_of_batch(v)]
    if others and name.startswith(("scatter", "index_add", "index_copy", "index_red")):
        dims = known_ints(given.get("dim", 1))
        if dims is None or dims[0] == 0:
            return Bad(Why.ACROSS, node)
    if name in ("max", "min") and not others and len(given.args) > 1:
        return Seq((Fixed(), Fixed()))
    if name in ("sort", "topk"):
        return Seq((Fixed(), Fixed()))
    if name in ("mul", "mul_", "multiply"):
        return combined("*", on, rest[0], node) if rest else on
    if name in ("add", "add_", "sub", "sub_"):
        return combined("+", on, rest[0], node) if rest else on
    if others:
        if name in ("index_select", "gather", "take"):
            return (
                replace(
                    others[0], raw=False, whole=False, kind=kept_kind("?", others[0])
                )
                if isinstance(others[0], Rows)
                else others[0]
            )
        return elementwise([on, *rest], node)
    return fixed_method(name, on, given) if isinstance(on, Fixed) else Fixed()


def _linear_method(name: str, on: Linear, given: Given) -> Value:
    """Return the value of a method of a mean or a sum over samples."""
    node = given.node
    rest = list(given.args[1:])
    if name in LINEAR_SHAPE or name in (
        "mean",
        "sum",
        "cumsum",
        "select",
        "diag",
        "trace",
        "diagonal",
        "chunk",
        "split",
        "unbind",
    ):
        return on
    if name in ("add", "add_", "sub", "sub_") and rest:
        return combined("+", on, rest[0], node)
    if name in ("mul", "mul_", "multiply") and rest:
        return combined("*", on, rest[0], node)
    if name in ("div", "div_", "true_divide", "divide") and rest:
        return combined("/", on, rest[0], node)
    if name in ("size", "dim", "numel"):
        return Fixed()
    return Bad(Why.NONLINEAR, node)


def _rows_method(name: str, on: Rows, given: Given) -> Value | None:
    """Return the value of a method of a tensor of samples."""
    node = given.node
    rest = list(given.args[1:])
    plain = replace(on, raw=False, whole=False)
    if name in ("size",):
        if not rest and "dim" not in given.options:
            return Shape(on)
        dims = known_ints(given.get("dim", 1))
        if dims is None:
            return Fixed()
        return size_of(on, dims[0])
    if name in ("numel", "nelement", "__len__"):
        return Count(1, exact=False) if on.even else Bad(Why.SELECTED, node)
    if name in ("dim", "ndimension", "get_device", "element_size"):
        return Fixed() if on.ndim is None else Fixed(on.ndim)
    if name in _ARITHMETIC and rest:
        return combined(_ARITHMETIC[name], on, rest[0], node)
    if name in ("matmul", "mm", "bmm", "mv", "dot") and rest:
        return product(on, rest[0], node, dot=name == "dot")
    if name in REDUCING:
        return reduced(name, on, given)
    if name in ALONG:
        return along_dim(name, on, given)
    if name in ("chunk", "split", "unbind", "tensor_split", "split_with_sizes"):
        return parts_of(name, on, given)
    moved = moved_dims(name, on, given)
    if moved is not None:
        return moved
    if name in (
        "eq",
        "ne",
        "gt",
        "ge",
        "lt",
        "le",
        "bool",
        "logical_not",
        "logical_and",
        "logical_or",
        "isnan",
        "isfinite",
        "isinf",
    ):
        out = elementwise([on, *rest], node)
        return replace(out, kind="bool") if isinstance(out, Rows) else out
    if name == "masked_select":
        return replace(plain, even=False, ndim=1, axis=0)
    if name == "select":
        dims = known_ints(given.get("dim", 1)) or [1]
        return (
            Bad(Why.ACROSS, node)
            if is_sample_dim(dims[0], on)
            else without_dims(on, dims)
        )
    if name == "narrow":
        dims = known_ints(given.get("dim", 1)) or [1]
        return Bad(Why.ACROSS, node) if is_sample_dim(dims[0], on) else plain
    if name in (
        "outer",
        "ger",
        "cdist",
        "cov",
        "corrcoef",
        "trace",
        "det",
        "svd",
        "kron",
    ):
        return Bad(Why.ACROSS, node)
    if name in ("diag", "diagonal"):
        return (
            Bad(Why.ACROSS, node)
            if on.ndim in (None, 2) and not given.options
            else plain
        )
    if name in ("nonzero", "unique", "bincount", "histc"):
        return replace(plain, even=False, ndim=None)
    if name in (
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_tensor",
    ):
        filled = given.get("fill_value", 1)
        if isinstance(filled, Linear | Bad):
            return Bad(Why.ACROSS, node)
        if name.startswith("new_"):
            return Fixed()
        return replace(plain, kind="", shifted=None, degree=0, opaque=None)
    if name == "where":
        return elementwise([on, *rest], node)
    if name in MOVING:
        return replace(on, whole=False)
    if name in LINEAR_SHAPE:
        return plain
    if name in ("requires_grad_", "register_hook", "backward"):
        return plain
    if name in ELEMENTWISE or name in ("log_prob", "rsample", "sample"):
        out = elementwise([on, *rest, *given.options.values()], node)
        if name in RANK_CHANGING and isinstance(out, Rows):
            return replace(out, ndim=None, least=1, single=False)
        if name in SIZE_CHANGING and isinstance(out, Rows):
            return replace(out, single=False)
        return out
    return None
