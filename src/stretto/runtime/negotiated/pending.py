"""A rank's state of a request between its submission and its end."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stretto.errors import SpecError, StrettoError
from stretto.runtime.negotiated.api import Handle
from stretto.runtime.negotiated.reductions import row_bounds
from stretto.runtime.negotiated.requests import CollectiveKind, Request

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class PendingRequest:
    """A submitted request with its tensors."""

    request: Request
    tensor: torch.Tensor | None
    output: torch.Tensor | None
    handle: Handle
    event: Any = None
    """On a GPU: recorded when the tensor's values are ready."""
    submitted_s: float = field(default_factory=perf_counter)
    stall_warnings: int = 0
    """Number of stall warnings logged."""


@dataclass(slots=True)
class ReducedTensor:
    """A tensor to reduce: of a job, of a set, or a joined rank's zeros."""

    request: Request
    tensor: torch.Tensor | None
    output: torch.Tensor | None
    ended: Callable[[StrettoError | None, tuple[Any, ...]], None]
    event: Any = None
    made: list[Any] = field(default_factory=list)
    """On a GPU: recorded when memory that was allocated here may be written."""
    left: int = 0
    events: tuple[Any, ...] = ()
    flat: torch.Tensor | None = None
    """The output as one row; a separate copy if the output is not one in memory."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def source(self, start: int, end: int) -> torch.Tensor | None:
        """Return elements of the input, or ``None`` for zeros."""
        if self.tensor is None:
            return None
        return self.tensor.reshape(-1)[start:end]

    def target(self) -> torch.Tensor | None:
        """Return the output as one row; one thread calls it before others use it."""
        if self.flat is None and self.output is not None:
            out = self.output
            self.flat = (
                as_row(out)
                if is_row(out)
                else new_shared((out.numel(),), out, self.made)
            )
        return self.flat

    def await_memory(self) -> None:
        """On a GPU, let the current stream wait until its memory may be written."""
        for event in self.made:
            torch.cuda.current_stream().wait_event(event)

    def slice_ended(
        self, error: StrettoError | None, events: tuple[Any, ...] = ()
    ) -> None:
        """Record the end of a slice with its elements; the last ends the tensor."""
        with self.lock:
            self.left -= 1
            self.events += events
            last = self.left <= 0
        if not last:
            if error is not None:
                self.ended(error, ())
            return
        output, flat = self.output, self.flat
        apart = output is not None and not is_row(output)
        if error is None and output is not None and flat is not None and apart:
            try:
                self._write_apart(output, flat)
            except Exception as exc:  # noqa: BLE001
                error = Undelivered(self.request.place, exc)
        self.ended(error, self.events)

    def _write_apart(self, output: torch.Tensor, flat: torch.Tensor) -> None:
        if output.is_cuda:
            # This lane's stream writes what other lanes' streams have put into `flat`.
            stream = torch.cuda.current_stream()
            for event in self.events:
                stream.wait_event(event)
            output.record_stream(stream)
        write(output, flat.view(output.shape))
        if output.is_cuda:
            self.events = (stream.record_event(),)


class Undelivered(StrettoError):
    """A collective ended on all ranks, but this one can't use its result."""

    def __init__(self, place: str, cause: BaseException) -> None:
        super().__init__(
            f"{place} ended, but its result can't be written on this rank: {cause}"
        )
        self.__cause__ = cause


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that every thread may write.

    Inference mode is local to a thread, and tensors made in it can be written only in
    it.
    """
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(mode=False):
        found = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        return torch._neg_view(found) if tensor.is_neg() else found  # noqa: SLF001


def is_row(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory contains its values, in order."""
    return tensor.is_contiguous() and not tensor.is_neg()


def as_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor that is a row in memory, with stride 1.

    A contiguous tensor of one element may have any stride, which views keep.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def write(output: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy values into a tensor of the same shape; return it.

    Raises:
        SpecError: elements of ``output`` that share memory get different values.
    """
    target = output
    for d, (length, stride) in enumerate(
        zip(output.shape, output.stride(), strict=True)
    ):
        if stride or length < 2:
            continue
        first = values.narrow(d, 0, 1)
        if not ((values == first) | ((values != values) & (first != first))).all():
            raise SpecError(
                f"elements of the expanded tensor of shape {list(output.shape)} and "
                f"strides {list(output.stride())} share memory but get different "
                "values. Pass tensor.contiguous()."
            )
        target, values = target.narrow(d, 0, 1), first
    target.copy_(values)
    return output


def request_of(
    name: str, kind: CollectiveKind, tensor: torch.Tensor, **more: Any
) -> Request:
    """Return the request for a tensor: its type, shape, device and first dimension.

    ``more`` are further fields of `Request`. The caller must add an all-to-all's
    ``splits``.
    """
    shape = tuple(tensor.shape)
    if kind in (CollectiveKind.ALLGATHER, CollectiveKind.ALLTOALL):
        if not shape:
            raise SpecError(
                f"{kind} {name!r}: a scalar has no first dimension. Add one with "
                "reshape(1)."
            )
        if kind is CollectiveKind.ALLGATHER:
            more["rows"] = shape[0]
        shape = shape[1:]
    return Request(
        name=name,
        kind=kind,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        device=tensor.device.type,
        **more,
    )


def check_tensors(
    request: Request,
    tensor: torch.Tensor | None,
    output: torch.Tensor | None,
    *,
    rank: int,
    size: int,
) -> None:
    """Require that tensors match their request.

    Raises:
        SpecError: with the request, the rule and the value found.
    """
    place = request.place
    if request.kind in (
        CollectiveKind.BARRIER,
        CollectiveKind.REGISTER,
        CollectiveKind.UNREGISTER,
    ):
        if tensor is not None:
            raise SpecError(f"{place} takes no tensor")
        return
    if tensor is None:
        raise SpecError(f"{place} needs a tensor")
    has_memory: bool = not is_traceable_wrapper_subclass(tensor)
    if isinstance(tensor, FakeTensor) or not has_memory:
        raise SpecError(
            f"{place} needs a tensor with memory of its own, got a "
            f"{type(tensor).__name__}"
        )
    _check_is(place, "tensor", tensor, request, input_shape(request))
    if request.kind is CollectiveKind.BROADCAST and not 0 <= request.root < size:
        raise SpecError(
            f"{place}: root must be a rank from 0 to {size - 1}, got {request.root}"
        )
    if request.kind is CollectiveKind.ALLTOALL and (
        len(request.splits) != size or min(request.splits) < 0
    ):
        raise SpecError(
            f"{place}: splits must be {size} numbers >= 0, one for each rank, got "
            f"{list(request.splits)}"
        )
    if output is None:
        return
    wanted = output_shape(request, rank=rank, size=size)
    if wanted is None:
        raise SpecError(
            f"{place} takes no output: its shape depends on what other ranks send. "
            "Leave output out."
        )
    _check_is(place, "output", output, request, wanted)


def _check_is(
    place: str,
    what: str,
    tensor: torch.Tensor,
    request: Request,
    shape: Sequence[int],
) -> None:
    found = (
        str(tensor.dtype).removeprefix("torch."),
        tensor.device.type,
        tuple(tensor.shape),
    )
    wanted = (request.dtype, request.device, tuple(shape))
    if found != wanted or tensor.layout is not torch.strided:
        raise SpecError(
            f"{place}: the {what} must be dense {wanted[0]} on {wanted[1]} of shape "
            f"{list(wanted[2])}, got {tensor.layout} {found[0]} on {found[1]} of shape "
            f"{list(found[2])}"
        )


def input_shape(request: Request) -> tuple[int, ...]:
    """Return the shape of the tensor that a rank submits."""
    if request.kind is CollectiveKind.ALLGATHER:
        return (request.rows, *request.shape)
    if request.kind is CollectiveKind.ALLTOALL:
        return (sum(request.splits), *request.shape)
    return request.shape


def output_shape(request: Request, *, rank: int, size: int) -> tuple[int, ...] | None:
    """Return the shape of a rank's result, or ``None`` if it depends on other ranks."""
    if request.kind in (CollectiveKind.ALLGATHER, CollectiveKind.ALLTOALL):
        return None
    if request.kind is CollectiveKind.REDUCESCATTER:
        bounds = row_bounds(request.shape[0], size)
        return (bounds[rank + 1] - bounds[rank], *request.shape[1:])
    return request.shape


def new_output(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return a new tensor for a result."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def new_shared(
    shape: Sequence[int], like: torch.Tensor, made: list[Any]
) -> torch.Tensor:
    """Return a new tensor that several lanes write.

    On a GPU, the memory may have been that of a tensor which the stream of allocation
    still reads. So it is allocated on a stream of its own, whose event is added to
    ``made``; streams wait for that before they write.
    """
    if not like.is_cuda:
        return new_output(shape, like)
    stream = _allocation_stream(like.device)
    with torch.cuda.stream(stream):
        found = new_output(shape, like)
        made.append(stream.record_event())
    return found


@functools.cache
def _allocation_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
