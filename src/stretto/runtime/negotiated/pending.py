"""A rank's state of a request while it is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from stretto.errors import SpecError, StrettoError
from stretto.runtime.negotiated.api import Handle
from stretto.runtime.negotiated.reductions import row_bounds
from stretto.runtime.negotiated.requests import Kind, Request

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
    told: int = 0
    """Number of stall warnings logged."""


@dataclass(slots=True)
class RequestSlice:
    """A tensor to reduce: of a job, of a set, or a joined rank's zeros."""

    request: Request
    tensor: torch.Tensor | None
    output: torch.Tensor | None
    ended: Callable[[StrettoError | None, tuple[Any, ...]], None]
    event: Any = None
    left: int = 0
    events: tuple[Any, ...] = ()
    flat: torch.Tensor | None = None
    """The output as one row; a separate copy if the output is not contiguous."""
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
                out.view(-1)
                if out.is_contiguous()
                else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
            )
        return self.flat

    def piece_ended(
        self, error: StrettoError | None, events: tuple[Any, ...] = ()
    ) -> None:
        """Record the end of one of its pieces; the last one ends the part."""
        with self.lock:
            self.left -= 1
            self.events += events
            last = self.left <= 0
        if not last:
            if error is not None:
                self.ended(error, ())
            return
        output, flat = self.output, self.flat
        gaps = output is not None and not output.is_contiguous()
        if error is None and output is not None and flat is not None and gaps:
            output.copy_(flat.view(output.shape))
        self.ended(error, self.events)


def request_of(name: str, kind: Kind, tensor: torch.Tensor, **more: Any) -> Request:
    """Return the request for a tensor: its type, shape, device and first dimension.

    ``more`` are further fields of `Request`. The caller must add an all-to-all's
    ``splits``.
    """
    shape = tuple(tensor.shape)
    if kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        if not shape:
            raise SpecError(
                f"{kind} {name!r}: a scalar has no first dimension. Add one with "
                "reshape(1)."
            )
        if kind is Kind.ALLGATHER:
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
    if request.kind in (Kind.BARRIER, Kind.REGISTER, Kind.UNREGISTER):
        if tensor is not None:
            raise SpecError(f"{place} takes no tensor")
        return
    if tensor is None:
        raise SpecError(f"{place} needs a tensor")
    _check_is(place, "tensor", tensor, request, input_shape(request))
    if request.kind is Kind.BROADCAST and not 0 <= request.root < size:
        raise SpecError(
            f"{place}: root must be a rank from 0 to {size - 1}, got {request.root}"
        )
    if request.kind is Kind.ALLTOALL and (
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
    if request.kind is Kind.ALLGATHER:
        return (request.rows, *request.shape)
    if request.kind is Kind.ALLTOALL:
        return (sum(request.splits), *request.shape)
    return request.shape


def output_shape(request: Request, *, rank: int, size: int) -> tuple[int, ...] | None:
    """Return the shape of a rank's result, or ``None`` if it depends on other ranks."""
    if request.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        return None
    if request.kind is Kind.REDUCESCATTER:
        bounds = row_bounds(request.shape[0], size)
        return (bounds[rank + 1] - bounds[rank], *request.shape[1:])
    return request.shape


def new_output(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return a new tensor for a result."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
