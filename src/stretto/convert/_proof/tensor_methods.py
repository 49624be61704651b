"""Methods of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.arithmetic import combined, elementwise, kept_kind
from stretto.convert._proof.batch_values import (
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
    has_count,
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
from stretto.convert._proof.draws import note_generator
from stretto.convert._proof.fixed_tensors import (
    EVEN_METHODS,
    RANK_CHANGING,
    SIZE_CHANGING,
    as_rows,
    fixed_method,
    made,
    repeated,
    sample_axis,
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
    from collections.abc import Sequence

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments


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


_DRAWING = frozenset(
    [
        *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_"),
        *("geometric_", "log_normal_", "bernoulli", "multinomial"),
    ]
)


def tensor_method(name: str, given: CallArguments) -> Value | None:
    """Return the value of a method of a tensor, the first argument."""
    if not given.args:
        return Constant()
    on = given.args[0]
    node = given.node
    _show_rank(name, on, given)
    if name in _DRAWING and (is_of_batch(on) or getattr(on, "counted", False)):
        note_generator(given)
    if isinstance(on, OneOf):
        return joined(
            [
                tensor_method(name, replace(given, args=(v, *given.args[1:])))
                or Constant()
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
        numbers = [isinstance(v, Constant) for v in getattr(on, "items", ())]
        if isinstance(on, Seq) and all(numbers) and numbers:
            flat = all(
                isinstance(getattr(v, "value", None), int | float) for v in on.items
            )
            return Constant(shape=(len(on.items),) if flat else None)
        counted = isinstance(inner, Constant) and inner.counted
        if inner is not None and (is_of_batch(inner) or counted):
            if name in ("mean", "sum", "max", "min", "std"):
                return tensor_method(
                    name, replace(given, args=(inner, *given.args[1:]))
                )
            return inner
        return Constant()
    if isinstance(on, Unproved):
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
            else Unproved(Why.COUNTED, node)
        )
    if isinstance(on, Constant) and on.counted:
        return _counted_method(name, on, given)
    # A value without samples, with others that may have some.
    if name in ("matmul", "mm", "bmm", "mv", "dot") and rest:
        return product(on, rest[0], node)
    if name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_"):
        if given.in_step:
            return Rows()
        return replace(on, uniform=False) if isinstance(on, Constant) else on
    if name in ("new_zeros", "new_ones", "new_full", "new_empty") or (
        name == "new" and _are_sizes(rest)
    ):
        return _new(name, given)
    if name in ("zeros_like", "ones_like"):
        return Constant(
            uniform=True, shape=on.shape if isinstance(on, Constant) else None
        )
    if isinstance(on, Constant) and _is_counted(rest):
        return _sized_by_count(name, on, given)
    others = [v for v in with_elements(rest) if is_of_batch(v)]
    if others and name.startswith(("scatter", "index_add", "index_copy", "index_red")):
        dims = known_ints(given.get("dim", 1))
        if dims is None or dims[0] == 0:
            return Unproved(Why.ACROSS, node)
    if name in ("max", "min") and not others and len(given.args) > 1:
        return Seq((Constant(), Constant()))
    if name in ("sort", "topk"):
        return Seq((Constant(), Constant()))
    if name in _ARITHMETIC and rest:
        return combined(_ARITHMETIC[name], on, rest[0], node)
    if others:
        if name == "index_select" and isinstance(others[0], Rows):
            return _selected(on, others[0], given)
        if name in ("index_select", "gather", "take"):
            return (
                replace(
                    others[0], raw=False, whole=False, kind=kept_kind("?", others[0])
                )
                if isinstance(others[0], Rows)
                else others[0]
            )
        return elementwise([on, *rest], node)
    return fixed_method(name, on, given) if isinstance(on, Constant) else Constant()


def _show_rank(name: str, on: Value, given: CallArguments) -> None:
    """Note how many dimensions a function along a dimension needs."""
    along = name in REDUCING or name in ALONG
    if not along and name not in ("transpose", "swapaxes", "permute", "unbind"):
        return
    dim = given.options.get("dim", given.options.get("axis"))
    dims = known_ints(dim if dim is not None else Seq(given.args[1:]))
    if dims:
        given.show_rank(on, max(d + 1 if d >= 0 else -d for d in dims))


def _is_counted(values: Sequence[Value]) -> bool:
    """Return whether sizes contain that of the batch."""
    return any(has_count(v) or isinstance(v, Shape) for v in values)


def _selected(on: Value, index: Rows, given: CallArguments) -> Rows:
    """Return elements of a constant along a dimension, one for each sample."""
    dims = known_ints(given.get("dim", 1))
    shape = on.shape if isinstance(on, Constant) else None
    return replace(
        index,
        raw=False,
        whole=False,
        axis=dims[0] if dims and dims[0] >= 0 else None,
        ndim=None if shape is None else len(shape),
        kind=kept_kind("?", index),
    )


def _are_sizes(values: Sequence[Value]) -> bool:
    """Return whether arguments are sizes, one a dimension, rather than elements."""
    return bool(values) and all(
        isinstance(v, Count)
        or (isinstance(v, Constant) and not v.counted and v.shape is None)
        for v in values
    )


def _new(name: str, given: CallArguments) -> Value:
    """Return what ``x.new_zeros`` and similar methods make."""
    if name == "new_full" and is_of_batch(given.get("fill_value", 2) or Constant()):
        return Unproved(Why.ACROSS, given.node)
    sizes = given.args[1:2] if name == "new_full" else given.args[1:]
    size = given.options.get("size")
    return made(sizes if size is None else (size,), uniform=True)


def _sized_by_count(name: str, on: Constant, given: CallArguments) -> Value:
    """Return what a method with the batch's size makes of a constant."""
    rest = list(given.args[1:])
    if name in _ARITHMETIC:
        return combined(_ARITHMETIC[name], on, rest[0], given.node)
    counts = [isinstance(v, Count) for v in with_elements(rest)]
    if name in ("repeat", "tile") and not on.uniform and tiles(on, counts):
        return Rows(axis=counts.index(True), kind="order")
    if name in ("repeat", "tile", "expand", "broadcast_to"):
        return repeated(on, rest)
    one = on.uniform or (on.shape is not None and set(on.shape) <= {1})
    if one and name in ("view", "reshape", "narrow", "repeat_interleave"):
        return replace(on, shape=None, counted=True)
    return Unproved(Why.COUNTED, given.node)


_EVEN = frozenset(
    ["mean", "max", "min", "amax", "amin", "median", "all", "any", "mode"]
)
"""Functions of equal elements that return one of them, however many there are."""


def _transformed(name: str, given: CallArguments) -> list[int]:
    """Return the dimensions of a Fourier transform, or of its shift."""
    shift = name.endswith("shift")
    dims = known_ints(given.options.get("dim", given.get("", 1 if shift else 2)))
    if dims is not None:
        return dims
    if shift or name.endswith("n"):
        return [0]
    return [-2, -1] if name.endswith("2") else [-1]


def _counted_method(name: str, on: Constant, given: CallArguments) -> Value:
    """Return the value of a method of a constant with as many elements as samples."""
    rest = list(given.args[1:])
    node = given.node
    others = with_elements([*rest, *given.options.values()])
    if name in _ARITHMETIC and rest and not given.options:
        return combined(_ARITHMETIC[name], on, rest[0], node)
    if name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_"):
        return as_rows(on)
    if name == "item":
        return Constant(grad=on.grad)
    if name == "tolist":
        return Iter(Constant(), samples=True)
    dim = given.get("dim", 1) or given.get("axis")
    over = known_ints(dim) if dim is not None else None
    axis = sample_axis(on)
    count = len(on.shape) if on.shape is not None else None
    within = axis is not None and count is not None and over is not None
    if within and over is not None and count is not None:
        within = all(d % count != axis for d in over)
    plain = not any(isinstance(v, Rows | Linear | Item | Unproved) for v in others)
    if name in REDUCING and plain and (name in _EVEN or within):
        out = fixed_method(name, on, given)
        pair = over is not None and name in ("max", "min", "median", "mode")
        return Seq((out, out)) if pair else out
    if name in ("sum", "nansum") and plain:
        return Count(exact=False, grad=on.grad)
    keeps = name in EVEN_METHODS or (name in ALONG and within)
    if keeps and plain and not any(map(has_count, others)):
        return fixed_method(name, on, given)
    if name in ("expand", "repeat", "view", "reshape", "tile") and plain:
        return replace(repeated(on, rest), uniform=on.uniform)
    if name in ELEMENTWISE and not plain:
        return elementwise([on, *others], node)
    known = tensor_method(name, replace(given, args=(as_rows(on), *rest)))
    return Unproved(Why.PLACED, node) if known is None else known


def _linear_method(name: str, on: Linear, given: CallArguments) -> Value:
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
        return Constant()
    return Unproved(Why.NONLINEAR, node)


def _rows_method(name: str, on: Rows, given: CallArguments) -> Value | None:
    """Return the value of a method of a tensor of samples."""
    node = given.node
    rest = list(given.args[1:])
    plain = replace(on, raw=False, whole=False)
    sized = name.startswith("new_") and name != "new_tensor"
    if sized or (name == "new" and _are_sizes(rest)):
        return _new(name, given)
    if name in ("size",):
        if not rest and "dim" not in given.options:
            return Shape(on)
        dims = known_ints(given.get("dim", 1))
        if dims is None:
            return Constant()
        return size_of(on, dims[0])
    if name in ("numel", "nelement", "__len__"):
        return Count(1, exact=False) if on.even else Unproved(Why.SELECTED, node)
    if name in ("dim", "ndimension", "get_device", "element_size"):
        given.test_rank(on)
        return Constant() if on.ndim is None else Constant(on.ndim)
    if name in _ARITHMETIC and rest:
        return combined(_ARITHMETIC[name], on, rest[0], node)
    if name == "pad":
        pads = given.get("pad", 1)
        count = len(pads.items) // 2 if isinstance(pads, Seq) else 0
        if None not in (on.axis, on.ndim) and (on.axis or 0) >= (on.ndim or 0) - count:
            return Unproved(Why.ACROSS, node)
    if "fft" in name and any(is_sample_dim(d, on) for d in _transformed(name, given)):
        return Unproved(Why.ACROSS, node)
    if name in ("unfold", "renorm") and not given.options:
        dims = known_ints(given.get("", 1 if name == "unfold" else 2))
        if dims and is_sample_dim(dims[0], on) is (name == "unfold"):
            return Unproved(Why.ACROSS, node)
    if name.startswith(("tril", "triu")):
        ahead = None if on.ndim is None or on.axis is None else on.ndim - on.axis
        if (ahead is None and on.least < 3) or (ahead is not None and ahead < 3):
            return Unproved(Why.UNREAD if ahead is None else Why.ACROSS, node)
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
            Unproved(Why.ACROSS, node)
            if is_sample_dim(dims[0], on)
            else without_dims(on, dims)
        )
    if name == "narrow":
        dims = known_ints(given.get("dim", 1)) or [1]
        return Unproved(Why.ACROSS, node) if is_sample_dim(dims[0], on) else plain
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
        return Unproved(Why.ACROSS, node)
    if name in ("diag", "diagonal"):
        return (
            Unproved(Why.ACROSS, node)
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
        "new_tensor",
    ):
        filled = given.get("fill_value", 1)
        if isinstance(filled, Linear | Unproved):
            return Unproved(Why.ACROSS, node)
        if name == "new_tensor":
            return Constant()
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
