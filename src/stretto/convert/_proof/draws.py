"""Random numbers of torch and NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import (
    NONE,
    Constant,
    Count,
    Draw,
    Iter,
    ObjectRef,
    Rows,
    Seq,
    Shape,
    first_rows,
)
from stretto.convert._proof.fixed_tensors import made_shape
from stretto.convert._proof.given_arguments import known_ints

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments


def numpy_drawn(given: CallArguments) -> Value:
    """Return random numbers of NumPy, which are the same on all ranks."""
    values = list(given.all)
    size = given.options.get("size")
    if size is None and values:
        size = values[-1]
    if isinstance(size, ObjectRef):
        return Constant()
    name = (
        given.node.func.attr.value if isinstance(given.node.func, cst.Attribute) else ""
    )
    asked = (
        given.args if name in ("rand", "randn") else (size,) if size is not None else ()
    )
    sizes = list(size.items) if isinstance(size, Seq) else [size]
    if given.in_step and any(isinstance(s, Count | Shape) for s in (*asked, *sizes)):
        given.repeated.add(given.node)
        return Rows()
    return Constant(
        shape=made_shape(asked) if asked and isinstance(size, Seq | Constant) else None
    )


def note_generator(given: CallArguments) -> None:
    """Note that a generator draws the same numbers on each rank for its samples."""
    generator = given.options.get("generator")
    if given.in_step and generator is not None and generator != NONE:
        given.repeated.add(given.node)


def drawn(last: str, full: str, given: CallArguments) -> Value:
    """Return random numbers: each rank draws its own once training has begun."""
    if full.startswith("numpy."):
        return numpy_drawn(given)
    note_generator(given)
    if last == "randperm":
        return Rows(ndim=1, kind="order") if given.in_step else Constant()
    if last in ("bernoulli", "multinomial", "poisson", "normal") and (
        rows := first_rows(given.args)
    ):
        return replace(rows, raw=False, whole=False)
    if not given.in_step:
        size = given.options.get("size")
        sizes = [v for v in given.args if last != "randint" or isinstance(v, Seq)]
        known = last in ("rand", "randn", "randint")
        return Constant(
            shape=made_shape(sizes if size is None else [size]) if known else None
        )
    sizes = list(given.args)
    size = given.get("size")
    if size is not None:
        sizes = [size]
    elif last == "randint":
        sizes = [v for v in sizes if isinstance(v, Seq | Shape | Iter)]
    elif last == "normal":
        sizes = list(sizes[2:])
    if len(sizes) == 1 and isinstance(sizes[0], Seq):
        sizes = list(sizes[0].items)
    first = sizes[0] if sizes else None
    if isinstance(first, Shape):
        out: Value = replace(first.of, raw=False, whole=False, kind="", opaque=None)
    elif first is None or known_ints(first) == [1]:
        out = Draw()
        if len(sizes) > 1 and isinstance(sizes[1], Count):
            out = Rows(axis=1, ndim=len(sizes))
    else:
        counts = [i for i, s in enumerate(sizes) if isinstance(s, Count)]
        out = Rows(axis=counts[0] if counts else 0, ndim=len(sizes))
    if not isinstance(out, Rows):
        given.repeated.discard(given.node)
    return out
