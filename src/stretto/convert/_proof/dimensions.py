"""Shapes of tensors: which dimension is that of the samples, and where it moves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import (
    Constant,
    Count,
    Iter,
    Seq,
    Shape,
    Unproved,
    Why,
    first_rows,
)
from stretto.convert._proof.given_arguments import known_ints

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Rows, Value
    from stretto.convert._proof.given_arguments import CallArguments


def is_sample_dim(dim: int, on: Rows) -> bool:
    """Return whether a dimension is that of the samples."""
    if on.axis is None:
        return False
    if dim < 0:
        return on.ndim is not None and dim + on.ndim == on.axis
    return dim == on.axis


def may_be_sample_dim(dim: int, on: Rows) -> bool:
    """Return whether a dimension counted from the end may be that of the samples."""
    if dim >= 0 or on.ndim is not None or on.axis is None:
        return False
    return dim < -1 or (on.thin and on.axis == 0)


def without_dims(on: Rows, dims: list[int]) -> Rows:
    """Return a tensor without dimensions that are not of samples."""
    axis, ndim = on.axis, on.ndim
    if axis is not None:
        axis -= sum(1 for d in dims if 0 <= d < on.axis) if on.axis else 0
        if ndim is not None and on.axis:
            axis -= sum(1 for d in dims if d < 0 and d + ndim < on.axis)
    least = max(2, *(d + 1 for d in dims), on.least) - len(dims)
    return replace(
        on,
        axis=axis,
        ndim=None if ndim is None else max(ndim - len(dims), 1),
        least=max(least, 1),
        thin=ndim is None and least <= 1 and axis == 0,
        single=False,
        raw=False,
        whole=False,
        kind="",
        rank=on.rank - len(dims),
    )


def _resolved(dim: int, ndim: int | None) -> int | None:
    """Return a dimension counted from the front, if that is known."""
    if dim >= 0:
        return dim
    return None if ndim is None else dim + ndim


def _reshaped(on: Rows, sizes: list[Value], node: cst.CSTNode) -> Value:
    """Return a tensor with another shape."""
    if len(sizes) == 1:
        if isinstance(sizes[0], Shape):
            of = sizes[0].of
            return replace(on, axis=of.axis, ndim=of.ndim, raw=False, whole=False)
        if isinstance(sizes[0], Seq):
            sizes = list(sizes[0].items)
        elif isinstance(sizes[0], Iter) or not isinstance(sizes[0], Constant | Count):
            return replace(on, ndim=None, raw=False, whole=False)
    new = replace(on, ndim=len(sizes), raw=False, whole=False, thin=False, single=False)
    new = replace(new, layer=None)
    counts = [i for i, s in enumerate(sizes) if isinstance(s, Count)]
    if counts:
        return replace(new, axis=counts[0])
    free = [i for i, s in enumerate(sizes) if known_ints(s) == [-1]]
    if any(isinstance(s, Iter) for s in sizes):
        return replace(on, ndim=None, raw=False, whole=False)
    if free == [0]:
        flat = on.ndim == 1 or (on.single and on.ndim in (None, 2))
        if flat and any(known_ints(s) != [1] for s in sizes[1:]):
            return Unproved(Why.ACROSS, node)
        return replace(new, axis=0)
    if free and all(known_ints(s) == [1] for s in sizes[: free[0]]):
        return replace(new, axis=free[0])
    if on.axis == 0 and sizes and known_ints(sizes[0]) != [1]:
        return Unproved(Why.UNREAD, node)
    return replace(new, axis=None)


def _unflattened(on: Rows, given: CallArguments) -> Value:
    """Return a tensor of which one dimension becomes several."""
    at = known_ints(given.get("dim", 1))
    sizes = given.get("sizes", 2)
    if at is None or is_sample_dim(at[0], on) or may_be_sample_dim(at[0], on):
        return Unproved(Why.ACROSS, given.node)
    more = len(sizes.items) - 1 if isinstance(sizes, Seq) else None
    if more is None or on.ndim is None or on.axis is None:
        behind = on.axis == 0
        return replace(on, axis=0 if behind else None, ndim=None)
    place = at[0] % on.ndim
    axis = on.axis + more if place < on.axis else on.axis
    return replace(on, axis=axis, ndim=on.ndim + more)


def moved_dims(name: str, on: Rows, given: CallArguments) -> Value | None:
    """Return what a function that changes a shape makes of a tensor."""
    rest = list(given.args[1:])
    plain = replace(on, raw=False, whole=False, thin=False, single=False, least=1)
    dims = known_ints(Seq(tuple(rest))) if rest else None
    named = known_ints(given.options.get("dim"))
    dims = dims if named is None else named
    if name == "unflatten":
        return _unflattened(plain, given)
    if name in ("view", "reshape", "view_as", "reshape_as"):
        if name.endswith("_as"):
            of = first_rows(rest)
            return plain if of is None else replace(plain, axis=of.axis, ndim=of.ndim)
        return _reshaped(on, rest, given.node)
    if name in ("flatten", "ravel"):
        start = given.get("start_dim", 1)
        first = (known_ints(start) or [0])[0] if start is not None else 0
        if first == 0:
            return replace(plain, axis=0, ndim=1)
        ndim = 2 if first == 1 and given.get("end_dim", 2) is None else None
        return replace(plain, ndim=ndim)
    if name in ("squeeze", "squeeze_"):
        if dims is None:
            axis = 0 if on.axis is not None else None
            if on.ndim == 1 or (on.ndim == 2 and on.single):
                return replace(plain, axis=axis, ndim=1)
            return replace(plain, axis=axis, ndim=None, thin=True)
        at = _resolved(dims[0], on.ndim)
        ndim = None if on.ndim is None else on.ndim - 1
        if on.ndim is None and at in (None, 1):
            return replace(plain, ndim=None, thin=on.axis == 0)
        below = at is not None and on.axis is not None and at < on.axis
        if below and on.axis is not None:
            return replace(plain, axis=on.axis - 1, ndim=ndim)
        return replace(plain, ndim=ndim)
    if name in ("unsqueeze", "unsqueeze_"):
        ndim = None if on.ndim is None else on.ndim + 1
        at = dims[0] if dims else None
        if at is not None and at < 0:
            at = None if ndim is None else at + ndim
        if at is not None and on.axis is not None and at <= on.axis:
            return replace(plain, axis=on.axis + 1, ndim=ndim, least=on.least + 1)
        return replace(plain, ndim=ndim, least=on.least + 1)
    if name in ("transpose", "swapaxes", "transpose_", "swapdims"):
        plain = replace(plain, least=max(on.least, *(d + 1 for d in dims or [0])))
        if dims is None or len(dims) != 2 or on.axis is None:
            return replace(plain, axis=None if dims is None else on.axis)
        if on.ndim is None and on.axis == 0 and sorted(dims) == [-2, -1]:
            return replace(plain, turned=not on.turned)
        a, b = (_resolved(d, on.ndim) for d in dims)
        if on.axis == a:
            return replace(plain, axis=b)
        return replace(plain, axis=a if on.axis == b else on.axis)
    if name in ("mT", "mH", "adjoint"):
        if on.axis is None:
            return plain
        if on.ndim is None:
            return Unproved(Why.UNREAD, given.node)
        swapped = {on.ndim - 1: on.ndim - 2, on.ndim - 2: on.ndim - 1}
        return replace(plain, axis=swapped.get(on.axis, on.axis))
    if name in ("t", "T", "H"):
        if on.axis is None:
            return plain
        if on.ndim == 1:
            return plain
        last = 2 if on.ndim is None else on.ndim
        return replace(plain, axis=last - 1 - on.axis, ndim=last)
    if name in ("permute", "movedim"):
        if dims is None or on.axis is None or name == "movedim":
            return replace(plain, axis=None)
        if on.axis in dims:
            return replace(plain, axis=dims.index(on.axis), ndim=len(dims))
        back = on.axis - len(dims)
        at = dims.index(back) if back in dims else None
        return replace(plain, axis=at, ndim=len(dims))
    if name in ("expand", "expand_as", "repeat", "tile", "broadcast_to"):
        if name == "expand_as" or not rest:
            of = first_rows(rest)
            return replace(plain, ndim=None if of is None else of.ndim)
        sizes = list(rest[0].items) if isinstance(rest[0], Seq) else rest
        if len(rest) == 1 and isinstance(rest[0], Shape | Iter):
            return replace(plain, ndim=None)
        ndim = len(sizes)
        if on.ndim is not None and on.axis is not None:
            return replace(plain, axis=on.axis + ndim - on.ndim, ndim=ndim)
        counts = [i for i, s in enumerate(sizes) if isinstance(s, Count)]
        across = [i for i in counts if i != on.axis]
        repeats = name in ("repeat", "tile") and on.axis is not None
        if repeats and (across or (counts and name == "repeat")):
            return Unproved(Why.ACROSS, given.node)
        return replace(plain, ndim=ndim)
    if name == "repeat_interleave":
        return replace(plain, ndim=plain.ndim)
    return None


def mixes_in_space(name: str, on: Rows) -> bool:
    """Return whether an operation on neighbors, by its name, reaches other samples."""
    plain = name.replace("_", "")
    if on.axis is None:
        return False
    if plain.startswith("scaleddotproduct"):
        at = None if on.ndim is None else on.ndim - on.axis
        return at in (1, 2) or (at is None and (on.axis > 0 or on.least < 3))
    if plain.startswith(("conv", "groupnorm", "instancenorm")):
        return on.axis > 0
    if "pool" in plain or plain.startswith(("upsample", "interpolate")):
        return on.axis > 1 or (on.ndim is not None and on.axis == on.ndim - 1)
    return False


def size_of(on: Rows, dim: int) -> Value:
    """Return the size of one dimension of a tensor."""
    if is_sample_dim(dim, on) or (on.axis is None and dim == 0):
        return (
            Count()
            if on.even and on.copies == 1
            else Count(exact=False)
            if on.even
            else Unproved(Why.SELECTED, on.opaque or cst.Name("x"))
        )
    return Constant()
