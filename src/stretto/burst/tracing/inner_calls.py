"""Find operations that read other samples, by the calls that they consist of.

# Note [Inner calls]
A function of torch, a custom function or a module calls operators, which give tensors
of their own. Whether an operation reads other samples may depend on values: in a scale
``x.abs().max().clamp(min=12)``, or in ``isin`` with few hits. Such values may not come
at capture. The shapes of the tensors inside show it without values: an operator reads
all samples if its result does not follow their number, or follows it in two dimensions.
Some operators read other samples without such a result; they are listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from stretto.burst.tracing.fakes import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Shape = tuple[int, ...]
Sides = tuple[int, ...]
"""Dimensions that follow the number of samples, counted from the last."""


@final
@dataclass(frozen=True, slots=True)
class InnerCall:
    """One call of an operator."""

    operator: str
    """For instance ``amax``; with its library if it is not torch's."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    dim: int | None = None
    """Along which an operator of `_SCANS` goes; of ``renorm`` the one that stays."""

    by_mask: bool = False
    """Whether ``index_put`` writes where a mask is true."""

    place: str = ""
    """The line in user code inside the operation, if it has any."""

    @property
    def is_foreign(self) -> bool:
        """Whether it is an operator of another library than torch."""
        return "::" in self.operator


def inner_call(
    operator: Any, args: Any, kwargs: Any, result: Any, place: str = ""
) -> InnerCall:
    """Return what is recorded of a call."""
    name = operator._opname.removesuffix("_")  # noqa: SLF001
    if operator.namespace not in _OF_TORCH:
        name = f"{operator.namespace}::{operator._opname}"  # noqa: SLF001
    inputs = tuple(_shapes((*args, *kwargs.values())))
    outputs = tuple(_shapes((result,)))
    if name in _SCANS or name == "renorm":
        dim = args[2 if name == "renorm" else 1]
        return InnerCall(name, inputs, outputs, dim=dim, place=place)
    if name == "index_put":
        by_mask = any(i is not None and i.dtype is torch.bool for i in args[1])
        return InnerCall(name, inputs, outputs, by_mask=by_mask, place=place)
    return InnerCall(name, inputs, outputs, place=place)


def _shapes(values: Iterable[Any]) -> Iterator[Shape]:
    return (tuple(tensor.shape) for tensor in _tensors(values))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


@final
class CallsOfModule:
    """The inner calls of a module with code or hooks of the user's.

    Such code may compute what no result of the module depends on, for instance a term
    that a hook keeps for the loss. Tensors are kept until the module has ended, so that
    no other one gets their memory.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[InnerCall, list[Tensor], list[Tensor]]] = []

    def add(self, call: InnerCall, args: Any, kwargs: Any, result: Any) -> None:
        """Add a call."""
        read = list(_tensors((*args, *kwargs.values())))
        self._rows.append((call, read, list(_tensors((result,)))))

    def before(self, results: Iterable[Tensor]) -> list[InnerCall]:
        """Return the calls on which results, or what is written, depend."""
        needed = {storage_of(tensor) for tensor in results}
        found = []
        for call, read, made in reversed(self._rows):
            if needed.isdisjoint(map(storage_of, made)):
                continue
            needed.update(map(storage_of, read))
            found.append(call)
        return found[::-1]


@final
@dataclass(frozen=True, slots=True)
class Mixing:
    """An operator that reads other samples."""

    operator: str
    how: str
    place: str = ""


def mixing(
    one: Sequence[InnerCall], two: Sequence[InnerCall], batches: tuple[int, int]
) -> Mixing | None:
    """Return the first operator in an operation that reads other samples.

    Args:
        one: its inner calls with a number of samples.
        two: the same with a larger number.
        batches: these numbers.
    """
    pairs: list[tuple[InnerCall, InnerCall]] | None = list(zip(one, two, strict=False))
    if [c.operator for c in one] != [c.operator for c in two]:
        pairs = _paired(one, two, batches)
    if pairs is None:
        return Mixing("", "calls other operators for another number of samples")
    for first, second in pairs:
        inputs = _sides(first.inputs, second.inputs)
        outputs = _sides(first.outputs, second.outputs)
        if inputs is None or outputs is None:
            how = "has other dimensions for more samples"
            return Mixing(first.operator, how, first.place)
        if any(inputs) and (found := _found(first, inputs, outputs)):
            return Mixing(first.operator, found, first.place)
    return None


def _paired(
    one: Sequence[InnerCall], two: Sequence[InnerCall], batches: tuple[int, int]
) -> list[tuple[InnerCall, InnerCall]] | None:
    """Return the calls that may have samples in pairs, in order, if there are any.

    Others may differ: autocast converts a weight once for several operations.
    """
    large = batches[1]
    left = iter(one)
    pairs = []
    for second in two:
        if not any(size and size % large == 0 for s in second.inputs for size in s):
            continue
        first = next((c for c in left if _is_same_call(c, second, batches)), None)
        if first is None:
            return None
        pairs.append((first, second))
    return pairs


def _is_same_call(
    first: InnerCall, second: InnerCall, batches: tuple[int, int]
) -> bool:
    small, large = batches
    return (
        first.operator == second.operator
        and len(first.inputs) == len(second.inputs)
        and all(
            len(a) == len(b)
            and all(x == y or x * large == y * small for x, y in zip(a, b, strict=True))
            for a, b in zip(first.inputs, second.inputs, strict=True)
        )
    )


def _sides(ones: Sequence[Shape], twos: Sequence[Shape]) -> list[Sides] | None:
    if [len(one) for one in ones] != [len(two) for two in twos]:
        return None
    return [
        tuple(i - len(one) for i in range(len(one)) if one[i] != two[i])
        for one, two in zip(ones, twos, strict=True)
    ]


def _found(call: InnerCall, inputs: list[Sides], outputs: list[Sides]) -> str:
    name = call.operator
    if name in _SCANS and _along(call, inputs):
        return (
            "sums or compares along a dimension with the samples, so that each sample "
            "depends on those before it"
        )
    reads = _READS.get(name)
    if reads is not None and reads(call, inputs):
        return "reads other samples, depending on values"
    if any(len(sides) > 1 for sides in outputs):
        return "compares each sample with the others"
    if call.outputs and not any(outputs) and not name.startswith("new_"):
        return "gives one result for all samples"
    return ""


def _along(call: InnerCall, inputs: list[Sides]) -> bool:
    dim, dims = call.dim, len(call.inputs[0])
    if not isinstance(dim, int):  # a name
        return bool(inputs[0])
    return (dim - dims if dim >= 0 else dim) in inputs[0]


def _besides(call: InnerCall, inputs: list[Sides]) -> bool:
    return bool(inputs[0]) and not _along(call, inputs)


def _second(_call: InnerCall, inputs: list[Sides]) -> bool:
    return len(inputs) > 1 and bool(inputs[1])


def _sorted_values(call: InnerCall, inputs: list[Sides]) -> bool:
    boundaries = 0 if call.operator == "searchsorted" else len(inputs) - 1
    return -1 in inputs[boundaries]


def _masked(call: InnerCall, inputs: list[Sides]) -> bool:
    return call.by_mask and bool(inputs[-1])


def _keys(_call: InnerCall, inputs: list[Sides]) -> bool:
    return -2 in inputs[1]


def _sequence(_call: InnerCall, inputs: list[Sides]) -> bool:
    return -2 in inputs[0]


_OF_TORCH = frozenset({"_quantized", "aten", "mkldnn", "prim", "prims", "quantized"})
"""Libraries of operators whose shapes and names show what they read."""

_SCANS = frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"})
"""Operators that compute a row from all rows before it."""

_READS: dict[str, Callable[[InnerCall, list[Sides]], bool]] = {
    "isin": _second,
    "masked_scatter": _second,
    "index_put": _masked,
    "renorm": _besides,
    "searchsorted": _sorted_values,
    "bucketize": _sorted_values,
    "_scaled_dot_product_attention_math": _keys,
    "_scaled_dot_product_cudnn_attention": _keys,
    "_scaled_dot_product_efficient_attention": _keys,
    "_scaled_dot_product_flash_attention": _keys,
    "_scaled_dot_product_flash_attention_for_cpu": _keys,
    "_scaled_dot_product_fused_attention_overrideable": _keys,
    "_native_multi_head_attention": _sequence,
    "_transformer_encoder_layer_fwd": _sequence,
}
"""Whether an operator reads other samples, though its result has a row for each."""
