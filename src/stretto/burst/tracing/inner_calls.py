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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from stretto.burst.memory import tensors_among
from stretto.burst.tracing.fakes import storage_of
from stretto.errors import SpecError

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

    dims: tuple[Any, ...] = ()
    """Dimensions along which an operator of `_SCANS` goes; of ``renorm`` the one that
    stays."""

    indexed: tuple[int, ...] = ()
    """Dimensions, counted from the last, of the first input, in which the operator
    reads or writes at places that are computed from samples or parameters."""

    is_row_wise: bool = False
    """Whether an operator of another library was declared to keep rows apart."""

    masked: tuple[int, ...] = ()
    """Dimensions, counted from the last, of the first input, in which ``index_put``
    writes where a mask is true."""

    place: str = ""
    """The line in user code inside the operation, if it has any."""

    @property
    def is_foreign(self) -> bool:
        """Whether it is an operator of another library than torch."""
        return "::" in self.operator


def inner_call(
    operator: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    place: str = "",
    varies: Callable[[Tensor], bool] = lambda _: True,
) -> InnerCall:
    """Return what is recorded of a call.

    ``varies`` says whether a tensor is computed from samples, parameters, buffers or
    random numbers.
    """
    name = operator._opname.removesuffix("_")  # noqa: SLF001
    inputs = tuple(_shapes((*args, *kwargs.values())))
    outputs = tuple(_shapes((result,)))
    if operator.namespace not in _OF_TORCH:
        return InnerCall(
            f"{operator.namespace}::{operator._opname}",  # noqa: SLF001
            inputs,
            outputs,
            is_row_wise=is_row_wise(operator),
            place=place,
        )
    if name in _SCANS:
        dims = _dims_of(name, args, kwargs)
        return InnerCall(name, inputs, outputs, dims=dims, place=place)
    if name in _INDEXES:
        masked = tuple(_masked_dims(args) if name == "index_put" else ())
        indexed = tuple(_indexed(name, args, varies))
        return InnerCall(
            name, inputs, outputs, masked=masked, indexed=indexed, place=place
        )
    return InnerCall(name, inputs, outputs, place=place)


def _dims_of(name: str, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the dimensions along which an operator of `_SCANS` goes."""
    place, default = _SCANS[name]
    key = "dims" if name in ("flip", "roll") else "dim"
    value = args[place] if len(args) > place else kwargs.get(key, default)
    if isinstance(value, (tuple, list)):
        return tuple(value) or tuple(range(args[0].dim()))  # roll of all numbers
    return (value,)


def _indices(args: Any) -> Iterator[tuple[int, Tensor | None]]:
    """Yield indices, each with the first dimension of the tensor that it is for."""
    first = 0
    for index in args[1]:
        yield first, index
        is_mask = index is not None and index.dtype is torch.bool
        first += index.dim() if is_mask else 1


def _masked_dims(args: Any) -> Iterator[int]:
    """Yield the dimensions that masks among an operator's indices have."""
    for first, index in _indices(args):
        if index is not None and index.dtype is torch.bool:
            yield from (first + i - args[0].dim() for i in range(index.dim()))


def _indexed(name: str, args: Any, varies: Callable[[Tensor], bool]) -> Iterator[int]:
    """Yield the dimensions in which an operator of `_INDEXES` reads or writes."""
    dims = args[0].dim()
    if name in ("index", "index_put"):
        for first, index in _indices(args):
            if index is None or index.dtype is torch.bool:
                continue
            if varies(index):
                yield first - dims
    elif name in ("take", "put"):
        if varies(args[1]):
            yield from range(-dims, 0)
    elif name == "embedding":
        if varies(args[1]):
            yield -dims
    elif name.startswith("grid_sampler"):
        yield from range(2 - dims, 0)
    elif dims and varies(args[2]):
        yield args[1] - dims if args[1] >= 0 else args[1]


def _shapes(values: Iterable[Any]) -> Iterator[Shape]:
    return (tuple(tensor.shape) for tensor in tensors_among(values))


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
        read = list(tensors_among((*args, *kwargs.values())))
        self._rows.append((call, read, list(tensors_among(result))))

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

    by_index: bool = False
    """Whether it reads or writes rows at computed places."""


def mixing(
    one: Sequence[InnerCall],
    two: Sequence[InnerCall],
    batches: tuple[int, int],
    *,
    indexes: bool = True,
) -> Mixing | None:
    """Return the first operator in an operation that reads other samples.

    Args:
        one: its inner calls with a number of samples.
        two: the same with a larger number.
        batches: these numbers.
        indexes: whether one that reads rows at computed places is among them.
    """
    if _operators(one) != _operators(two):
        one, two = _of_any_algorithm(one), _of_any_algorithm(two)
    pairs: list[tuple[InnerCall, InnerCall]] | None = list(zip(one, two, strict=False))
    if _operators(one) != _operators(two):
        pairs = _paired(one, two, batches)
    if pairs is None:
        return Mixing("", "calls other operators for another number of samples")
    for first, second in pairs:
        inputs = _sides(first.inputs, second.inputs)
        outputs = _sides(first.outputs, second.outputs)
        if inputs is None or outputs is None:
            how = "has other dimensions for more samples"
            return Mixing(first.operator, how, first.place)
        if not any(inputs):
            continue
        if first.is_foreign and not first.is_row_wise:
            return Mixing(first.operator, _OPAQUE, first.place)
        is_indexed = not set(first.indexed).isdisjoint(inputs[0])
        if is_indexed and indexes:
            return Mixing(first.operator, _INDEXED, first.place, by_index=True)
        if found := _found(first, inputs, outputs):
            return Mixing(first.operator, found, first.place)
    return None


def _operators(calls: Sequence[InnerCall]) -> list[str]:
    return [call.operator for call in calls]


def _of_any_algorithm(calls: Sequence[InnerCall]) -> list[InnerCall]:
    """Return calls under one name where torch chooses an algorithm by the numbers.

    For more than 25 rows ``cdist`` computes distances from a product of matrices,
    around which it views tensors in the shape that they have, or with ones before it.
    """
    return [
        replace(call, operator="cdist", inputs=call.inputs[:2])
        if call.operator in _DISTANCES
        else call
        for call in calls
        if call.operator not in _VIEWS
        or _of_many(call.outputs) != _of_many(call.inputs[:1])
    ]


def _of_many(shapes: Sequence[Shape]) -> list[Shape]:
    return [tuple(size for size in shape if size != 1) for shape in shapes]


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
    if name in _SCANS and name != "renorm" and _along(call, inputs):
        if "cum" in name:
            return (
                "sums or compares along a dimension with the samples, so that each "
                "sample depends on those before it"
            )
        return "goes along a dimension with the samples"
    reads = _READS.get(name)
    if reads is not None and reads(call, inputs):
        return "reads other samples, depending on values"
    if any(len(sides) > 1 for sides in outputs):
        return "compares each sample with the others"
    if call.outputs and not any(outputs) and not name.startswith("new_"):
        return "gives one result for all samples"
    return ""


def _along(call: InnerCall, inputs: list[Sides]) -> bool:
    count = len(call.inputs[0])
    if not all(isinstance(dim, int) for dim in call.dims):  # a name
        return bool(inputs[0])
    return any((dim - count if dim >= 0 else dim) in inputs[0] for dim in call.dims)


def _besides(call: InnerCall, inputs: list[Sides]) -> bool:
    return bool(inputs[0]) and not _along(call, inputs)


def _second(_call: InnerCall, inputs: list[Sides]) -> bool:
    return len(inputs) > 1 and bool(inputs[1])


def _sorted_values(call: InnerCall, inputs: list[Sides]) -> bool:
    boundaries = 0 if call.operator == "searchsorted" else len(inputs) - 1
    return -1 in inputs[boundaries]


def _masked(call: InnerCall, inputs: list[Sides]) -> bool:
    return bool(inputs[-1]) and not set(call.masked).isdisjoint(inputs[0])


def _keys(_call: InnerCall, inputs: list[Sides]) -> bool:
    return -2 in inputs[1]


def _last(_call: InnerCall, inputs: list[Sides]) -> bool:
    return -1 in inputs[0]


def _sequence(_call: InnerCall, inputs: list[Sides]) -> bool:
    return -2 in inputs[0]


_DISTANCES = frozenset({"_cdist_forward", "_euclidean_dist"})

_VIEWS = frozenset({"detach", "expand", "view"})

_OF_TORCH = frozenset({"_quantized", "aten", "mkldnn", "prim", "prims", "quantized"})
"""Libraries of operators whose shapes and names show what they read."""

_SCANS: dict[str, tuple[int, int]] = {
    "_log_softmax": (1, -1),
    "_softmax": (1, -1),
    "cummax": (1, -1),
    "cummin": (1, -1),
    "cumprod": (1, -1),
    "cumsum": (1, -1),
    "flip": (1, 0),
    "logcumsumexp": (1, -1),
    "renorm": (2, 0),
    "roll": (2, 0),
    "sort": (1, -1),
    "topk": (2, -1),
}
"""Operators that compute a row from other rows of some dimensions: the position of the
argument that says which, and its default."""

_INDEXES = frozenset(
    {
        "embedding",
        "gather",
        "grid_sampler_2d",
        "grid_sampler_3d",
        "index",
        "index_add",
        "index_copy",
        "index_fill",
        "index_put",
        "index_reduce",
        "index_select",
        "put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "take",
    }
)
"""Operators that read or write at places given by a tensor."""

_INDEXED = (
    "reads or writes rows at places that are computed, so that they may be those of "
    "other samples for some values"
)
_OPAQUE = (
    "is an operator of another library, which may read other samples for some values; "
    "if it computes each row alone, call stretto.burst.row_wise() with it before"
)

_ROW_WISE: set[str] = {"torchvision::deform_conv2d"}


def row_wise(operator: Any) -> None:
    """Declare that an operator of another library than torch computes each row alone.

    Burst plans run it on some of the samples. What it computes for one sample, forward
    and backward, must not depend on others, for any values and number of samples.

    Args:
        operator: its name, such as ``"mylib::scale"``, or what
            ``torch.library.custom_op`` returned, or one of ``torch.ops``.

    Raises:
        SpecError: it names no operator.
    """
    name = operator if isinstance(operator, str) else ""
    if not name:
        definition = getattr(operator, "_opoverload", operator)
        packet = getattr(definition, "_overloadpacket", definition)
        name = getattr(packet, "_qualified_op_name", "")
    library, _, last = name.partition("::")
    if not library or not last:
        raise SpecError(
            f"row_wise() takes an operator of torch.library or its name, such as "
            f"'mylib::scale', got {operator!r}"
        )
    _ROW_WISE.add(f"{library}::{last.partition('.')[0]}")


def is_row_wise(operator: Any) -> bool:
    """Return whether an operator of another library was declared to keep rows apart."""
    name = f"{operator.namespace}::{operator._opname}"  # noqa: SLF001
    return name in _ROW_WISE or torch.Tag.pointwise in operator.tags


_READS: dict[str, Callable[[InnerCall, list[Sides]], bool]] = {
    "isin": _second,
    "masked_scatter": _second,
    "index_put": _masked,
    "multinomial": _last,
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
    "_sample_dirichlet": _last,
    "_transformer_encoder_layer_fwd": _sequence,
}
"""Whether an operator reads other samples, though its result has a row for each."""
