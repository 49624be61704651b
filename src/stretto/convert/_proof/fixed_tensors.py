"""Tensors that do not depend on the batch: their shapes, and whether they are even."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.batch_values import (
    ELLIPSIS,
    NONE,
    UNSET,
    Constant,
    Count,
    Item,
    Rows,
    Seq,
    Shape,
    SliceValue,
    Unproved,
    Why,
    first_bad,
    has_count,
    with_elements,
)
from stretto.convert._proof.given_arguments import known_int, known_ints
from stretto.convert._proof.tensor_names import ELEMENTWISE, LINEAR_SHAPE, REDUCING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import libcst as cst

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments

Sizes = tuple[int | Count | None, ...]

_SAME = frozenset(
    [
        *("to", "cuda", "cpu", "float", "double", "half", "bfloat16", "long", "int"),
        *("bool", "type", "type_as", "clone", "contiguous", "detach", "numpy", "copy"),
        *("requires_grad_", "pin_memory", "share_memory_", "astype", "from_numpy"),
        *("tensor", "as_tensor", "array", "asarray", "FloatTensor", "LongTensor"),
        *("Tensor", "Variable", "float32", "float64", "int64"),
    ]
)
"""Functions whose other arguments do not change the elements of the first."""

RANK_CHANGING = frozenset(
    [
        *("embedding", "unfold", "fold", "diag_embed", "stft", "istft", "affine_grid"),
        *("view_as_complex", "view_as_real", "one_hot", "atleast_1d", "atleast_2d"),
        *("atleast_3d", "unflatten", "addmv", "checkpoint", "data", "tolist"),
    ]
)
"""Functions of elements whose result has another rank than their arguments."""

SIZE_CHANGING = frozenset(
    [
        *("linear", "pad", "interpolate", "upsample", "pixel_shuffle", "rot90"),
        *("pixel_unshuffle", "rfft", "irfft", "rfft2", "irfft2", "rfftn", "irfftn"),
        *("grid_sample", "scaled_dot_product_attention", "addbmm", "expand_as"),
        *("view_as", "reshape_as", "repeat", "movedim", "lp_pool1d", "lp_pool2d"),
    ]
)
"""Functions of elements whose result has other sizes than their arguments."""

_UNEVEN = frozenset(
    [
        *("tril", "triu", "tril_", "triu_", "dropout", "alpha_dropout", "bernoulli"),
        *("normal_", "uniform_", "random_", "rand_like", "randn_like", "randint_like"),
        *("gumbel_softmax", "pad", "where", "masked_fill", "masked_fill_", "tolist"),
    ]
)
"""Functions that make elements differ that were equal."""

EVEN_METHODS = (
    (_SAME | LINEAR_SHAPE | ELEMENTWISE) - _UNEVEN - RANK_CHANGING - SIZE_CHANGING
) - {"expand", "repeat", "view", "reshape", "tile", "conv1d", "conv2d", "tolist"}
"""Functions that keep elements equal that are equal."""


def made_shape(sizes: Sequence[Value]) -> Sizes | None:
    """Return the shape that arguments such as those of ``torch.zeros`` ask for."""
    if len(sizes) == 1:
        only = sizes[0]
        if isinstance(only, Seq):
            return _sizes(only.items)
        number = known_ints(only)
        return None if number is None else (number[0],)
    return _sizes(sizes)


def _sizes(sizes: Sequence[Value]) -> Sizes | None:
    out: list[int | Count | None] = []
    for size in sizes:
        if not isinstance(size, Constant | Count):
            return None
        number = known_ints(size)
        plain = number[0] if number is not None else None
        out.append(size if isinstance(size, Count) else plain)
    return tuple(out)


def made(sizes: Sequence[Value], *, uniform: bool) -> Constant:
    """Return what functions such as ``torch.zeros`` make."""
    shape = made_shape(sizes)
    counted = any(
        has_count(v) or isinstance(v, Shape | Unproved) for v in with_elements(sizes)
    )
    if shape is None and len(sizes) == 1 and isinstance(sizes[0], Shape):
        shape = shape_of(sizes[0].of)
    return Constant(uniform=uniform, shape=shape, counted=counted)


def shape_of(rows: Rows) -> Sizes | None:
    """Return the shape of a tensor of samples, if its rank is known."""
    if rows.ndim is None or rows.axis is None:
        return None
    count = Count(exact=rows.copies == 1)
    return tuple(count if i == rows.axis else None for i in range(rows.ndim))


def sample_axis(on: Constant) -> int | None:
    """Return the dimension of a counted tensor that is that of the samples."""
    places = [i for i, s in enumerate(on.shape or ()) if isinstance(s, Count)]
    return places[0] if len(places) == 1 else None


def as_rows(on: Constant) -> Rows:
    """Return a counted tensor as one with a row for each sample."""
    ndim = None if on.shape is None else len(on.shape)
    return Rows(axis=sample_axis(on), ndim=ndim)


def computed(values: Iterable[Constant]) -> Constant:
    """Return what a function of the elements of its arguments makes of them."""
    shape: Sizes | None = ()
    grad, uniform, several, counted = False, True, False, False
    for value in values:
        counted = counted or value.counted
        number = isinstance(value.value, int | float)
        grad = grad or value.grad
        uniform = uniform and (value.uniform or number)
        several = several or not number
        if not number and shape is not None:
            shape = None if value.shape is None else _broadcast(shape, value.shape)
    known = shape if several else None
    return Constant(grad=grad, uniform=uniform, shape=known, counted=counted)


def multiplied(a: Constant, b: Constant) -> Constant:
    """Return the matrix product of two tensors without samples."""
    out = Constant(grad=a.grad or b.grad)
    if not a.shape or not b.shape or len(b.shape) > 2:
        return out
    return replace(out, shape=(*a.shape[:-1], *b.shape[1:]))


def _broadcast(one: Sizes, other: Sizes) -> Sizes:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    ahead = len(longer) - len(shorter)
    ends = zip(longer[ahead:], shorter, strict=True)
    return (
        *longer[:ahead],
        *(b if a == 1 else a if b == 1 else a or b for a, b in ends),
    )


def fixed_method(name: str, on: Constant, given: CallArguments) -> Constant:
    """Return what a method of a tensor without samples makes of it."""
    grad = on.grad and name not in ("detach", "item", "data")
    rest = given.args[1:]
    same = replace(
        on, value=UNSET, grad=grad, uniform=on.uniform and name not in _UNEVEN
    )
    if name in _SAME:
        return same
    if name in ("fill_", "zero_"):
        return replace(same, uniform=True)
    shape = _moved(name, on.shape, given)
    if shape is not None or name in LINEAR_SHAPE:
        return replace(same, shape=shape)
    if name in ELEMENTWISE - RANK_CHANGING - SIZE_CHANGING:
        others = [
            v for v in (*rest, *given.options.values()) if isinstance(v, Constant)
        ]
        out = computed([same, *others])
        return replace(out, grad=grad, uniform=out.uniform and name not in _UNEVEN)
    if name in REDUCING:
        shape = None if on.shape is None else _reduced(on.shape, given)
        by_dim = given.get("dim", 1) is not None or given.get("axis") is not None
        left = by_dim if shape is None else any(isinstance(s, Count) for s in shape)
        return Constant(grad=grad, shape=shape, counted=on.counted and left)
    return Constant(grad=grad, counted=on.counted)


def _moved(name: str, shape: Sizes | None, given: CallArguments) -> Sizes | None:
    """Return the shape after a function that changes only the shape."""
    rest = given.args[1:]
    if name in ("view", "reshape"):
        made = made_shape(rest)
        return None if made is None else tuple(None if s == -1 else s for s in made)
    if shape is None:
        return None
    dims = known_ints(given.options.get("dim", Seq(tuple(rest))))
    count = len(shape)
    if name in ("unsqueeze", "unsqueeze_", "expand_dims"):
        if dims is None or len(dims) != 1:
            return None
        at = dims[0] % (count + 1)
        return (*shape[:at], 1, *shape[at:])
    if name in ("t", "T") or (name in ("transpose", "swapaxes") and count == 2):
        return shape[::-1]
    if name in ("squeeze", "squeeze_") and dims is not None and len(dims) == 1:
        at = dims[0] % count if count else 0
        gone = bool(count) and shape[at] == 1
        return (*shape[:at], *shape[at + 1 :]) if gone else None
    return None


def _reduced(shape: Sizes, given: CallArguments) -> Sizes | None:
    """Return the shape after a function that combines dimensions."""
    dim = given.get("dim", 1) or given.get("axis")
    dims = known_ints(dim) if dim is not None else None
    if dims is None or not shape:
        return None
    keep = given.get("keepdim", 2) or given.get("keepdims")
    gone = {d % len(shape) for d in dims}
    if isinstance(keep, Constant) and keep.value is True:
        return tuple(1 if i in gone else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in gone) or None


def repeated(on: Constant, sizes: Sequence[Value]) -> Constant:
    """Return what ``expand`` and ``repeat`` make of a tensor by the batch's size."""
    shape = made_shape(sizes)
    if shape is not None and -1 in shape:
        ahead = (None,) * (len(shape) - len(on.shape or ()))
        old = (*ahead, *on.shape) if on.shape is not None else (None,) * len(shape)
        shape = tuple(b if a == -1 else a for a, b in zip(shape, old, strict=False))
    return replace(on, value=UNSET, shape=shape, counted=True)


def tiles(on: Constant, counts: Sequence[bool]) -> bool:
    """Return whether a dimension of several elements is repeated by the batch's size.

    Args:
        on: What is repeated.
        counts: Which numbers of repetitions depend on the batch.
    """
    if on.shape is None or len(counts) < len(on.shape):
        return False
    sizes = (*(1 for _ in range(len(counts) - len(on.shape))), *on.shape)
    pairs = zip(sizes, counts, strict=True)
    return any(counted and size not in (1, None) for size, counted in pairs)


def part_of(on: Constant, parts: Sequence[Value]) -> Constant:
    """Return a part of a tensor without samples, by the parts of an index."""
    out = Constant(grad=on.grad, uniform=on.uniform, counted=on.counted)
    if on.shape is None:
        return out
    left, shape = list(on.shape), list[int | Count | None]()
    for value in parts:
        if value == NONE:
            shape.append(1)
        elif not left:
            return out
        elif isinstance(value, SliceValue):
            shape.append(_sliced(left.pop(0), value))
        elif isinstance(value, Constant) and isinstance(value.value, int):
            left.pop(0)
        else:
            return out
    sizes = (*shape, *left)
    counted = on.counted and any(isinstance(s, Count) for s in sizes)
    return replace(out, shape=sizes, counted=counted)


def _sliced(size: int | Count | None, part: SliceValue) -> int | Count | None:
    """Return the size of a slice of a dimension."""
    if part.is_whole:
        return size
    if isinstance(size, Count):
        upper = known_int(part.upper)
        few = upper is not None and upper >= 0
        return None if few else Count(exact=False, affine=True)
    lower = 0 if part.lower == NONE else known_int(part.lower)
    upper = size if part.upper == NONE else known_int(part.upper)
    if part.step != NONE or lower is None or upper is None:
        return None
    if lower < 0 or upper < lower:
        return None
    return upper - lower if size is None or upper <= size else None


def stored_in(
    on: Constant, parts: Sequence[Value], value: Value, node: cst.CSTNode
) -> Value:
    """Return a counted tensor after some of its elements were set."""
    if (bad := first_bad([value, *parts])) is not None:
        return bad
    if isinstance(value, Item) and value.place:
        return Unproved(Why.PLACED, node)
    axis, place = sample_axis(on), 0
    of_samples = isinstance(value, Rows | Item)
    for part in parts:
        if part == NONE:
            continue
        if part == ELLIPSIS:
            if on.shape is None:
                return Unproved(Why.PLACED, node)
            after = [p for p in parts[parts.index(part) + 1 :] if p != NONE]
            place = len(on.shape) - len(after)
            continue
        here = axis is None or place == axis
        place += 1
        if isinstance(part, Rows) or part == Item(place="here"):
            of_samples = True
        elif here and not (isinstance(part, SliceValue) and part.is_whole):
            return Unproved(Why.PLACED, node)
    if of_samples:
        return as_rows(on)
    if isinstance(value, Constant):
        return replace(on, grad=on.grad or value.grad, uniform=False)
    return value
