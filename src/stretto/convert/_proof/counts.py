"""Numbers of samples in the arguments of calls.

A rank has a part of a batch, so what a call makes of the number of its samples differs
from one process. Few calls are known to keep it as a size or in proportion; any other
result cannot be followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.convert._proof.batch_values import NONE, Unproved, Why, has_count
from stretto.convert._proof.tensor_names import DRAWS, MAKES

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments

_SIZED = frozenset(
    [
        *("view", "reshape", "expand", "repeat", "tile", "unflatten", "broadcast_to"),
        *("chunk", "split", "tensor_split", "split_with_sizes", "narrow"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "bernoulli", "randperm"),
        *("arange", "range", "resize_", "as_strided", "rand_like", "new"),
    ]
)
"""Functions of tensors for which a number is a size, and which look at it."""

_ARITHMETIC = frozenset(
    [
        *("add", "add_", "sub", "sub_", "subtract", "mul", "mul_", "multiply", "div"),
        *("div_", "divide", "true_divide", "tensor", "as_tensor", "array", "asarray"),
        *("float", "to", "long", "int", "double", "clone", "detach", "item", "numpy"),
    ]
)

_PYTHON = frozenset(
    [
        *("print", "len", "enumerate", "zip", "sum", "float", "int", "list", "tuple"),
        *("iter", "next", "map", "filter", "getattr", "setattr", "dict", "isinstance"),
        *("type", "id", "hasattr", "reversed", "slice", "max", "min", "abs", "round"),
        *("append", "add", "extend", "insert", "update", "put", "get", "setdefault"),
        *("functools.partial", "manual_seed", "callable", "setattr"),
    ]
)
"""Functions of Python that keep what they are given, or look at it."""

_SIZES = ("size", "shape", "sizes", "split_size_or_sections", "repeats", "steps")
"""Names of arguments that are sizes."""

_KEEPING = MAKES | DRAWS | _SIZED | _ARITHMETIC | _PYTHON


def followed(name: str, given: CallArguments, out: Value) -> Value:
    """Return a call's value, or what says that it depends on a number of samples.

    Args:
        name: The name of what is called.
        given: Its arguments.
        out: Its value.
    """
    if isinstance(out, Unproved) or out == NONE:
        return out
    last = name.rpartition(".")[2]
    keeps = name in _KEEPING or last in _KEEPING or last.endswith("Tensor")
    keeps = keeps or name.startswith(("random.", "numpy.random."))
    named = [v for k, v in given.options.items() if not (keeps and k in _SIZES)]
    placed = () if keeps else given.args
    if any(map(has_count, (*placed, *named))):
        if last in ("dict", "update", "partial") or last[:1].isupper():
            return out
        return Unproved(Why.COUNTED, given.node)
    return out
