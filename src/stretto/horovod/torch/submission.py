"""Submit calls to the engine: names, operations under way, waiting."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch

from stretto.errors import StrettoError
from stretto.horovod import world
from stretto.horovod.exceptions import HorovodInternalError
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.runtime.negotiated import CollectiveKind, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.horovod.world import JoinedSet
    from stretto.runtime.negotiated import Handle

_under_way: weakref.WeakValueDictionary[tuple[int, str], Handle] = (
    weakref.WeakValueDictionary()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """One tensor of an operation."""

    tensor: torch.Tensor

    output: torch.Tensor | None = None
    """Receives the result; ``None`` means a new tensor."""

    shape: tuple[int, ...]
    """The shape in the form of `Request`."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request."""


@final
class Operation:
    """An operation under way, as returned by asynchronous calls."""

    def __init__(
        self,
        handles: Sequence[Handle],
        outputs: Sequence[torch.Tensor | None],
        *,
        grouped: bool,
        splits_like: torch.Tensor | None,
    ) -> None:
        self._handles = handles
        self._outputs = outputs
        self._grouped = grouped
        self._splits_like = splits_like

    def poll(self) -> bool:
        """Return whether it has ended."""
        return all(handle.poll() for handle in self._handles)

    def wait(self) -> Any:
        """Wait until it has ended, and return its result.

        Raises:
            HorovodInternalError: it failed.
        """
        try:
            found = [handle.wait() for handle in self._handles]
        except StrettoError as exc:
            raise HorovodInternalError(str(exc)) from exc
        results = [
            result if output is None else output
            for result, output in zip(found, self._outputs, strict=True)
        ]
        if self._grouped:
            return results
        if self._splits_like is not None:
            like = self._splits_like
            counts = torch.tensor(
                self._handles[0].received_splits, dtype=like.dtype, device=like.device
            )
            return results[0], counts
        return results[0]

    @property
    def received_rows(self) -> list[tuple[int, ...]]:
        """Rows received from each rank, for each tensor; once it has ended."""
        return [handle.received_splits for handle in self._handles]


def submit(
    kind: CollectiveKind,
    rows: Sequence[OperationRow],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool,
    splits_like: torch.Tensor | None = None,
) -> Operation:
    """Submit an operation to the engine of its process set.

    Raises:
        ValueError: `init` was not called, this rank is not in the set, an operation of
            that name is under way, or a tensor can't be sent.
        HorovodInternalError: communication has already failed.
    """
    member = world.current().member(process_set)
    with member.lock:  # numbers must be unique across threads
        handles = _submit(member, kind, rows, name, grouped=grouped)
    outputs = [row.output for row in rows]
    return Operation(handles, outputs, grouped=grouped, splits_like=splits_like)


def _submit(
    member: JoinedSet,
    kind: CollectiveKind,
    rows: Sequence[OperationRow],
    name: str | None,
    *,
    grouped: bool,
) -> list[Handle]:
    number = member.numbered.get(kind, 0) + 1
    label = f"{kind}.noname.{number}" if name is None else f"{kind}.{name}"
    labels = [label]
    if grouped:
        # Without the group's size, so that groups of different sizes match and fail.
        labels = [f"{label}.{i}" for i in range(len(rows))]
    if name is not None:
        _require_free(member, labels)
    requests = [
        Request(
            name=each,
            kind=kind,
            dtype=str(row.tensor.dtype).removeprefix("torch."),
            shape=row.shape,
            device=row.tensor.device.type,
            **row.fields,
        )
        for each, row in zip(labels, rows, strict=True)
    ]
    try:
        if grouped:
            triples = [
                (request, row.tensor, row.output)
                for request, row in zip(requests, rows, strict=True)
            ]
            handles = member.engine.submit_group(label, triples)
        else:
            handles = [
                member.engine.submit(request, row.tensor, row.output)
                for request, row in zip(requests, rows, strict=True)
            ]
    except ValueError:
        raise
    except StrettoError as exc:
        raise HorovodInternalError(str(exc)) from exc
    if name is None:
        # Only now: a failed submission takes no number, as on ranks without it.
        member.numbered[kind] = number
    else:
        for each, handle in zip(labels, handles, strict=True):
            _under_way[id(member), each] = handle
    return handles


def _require_free(member: JoinedSet, labels: Sequence[str]) -> None:
    # The engine frees a name when it is launched, which other ranks can't see; then it
    # would depend on timing whether a second operation of the name is an error.
    for label in labels:
        handle = _under_way.get((id(member), label))
        if handle is not None and not handle.poll():
            raise ValueError(
                f"{label!r} is under way already: synchronize() the first, or give "
                "each its own name"
            )


def through(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return a differentiable operation's result."""
    apply: Any = function.apply
    return apply(*arguments)


def poll(handle: Operation) -> bool:
    """Return whether an operation has ended; then `synchronize` does not wait.

    Raises:
        ValueError: ``handle`` is not an operation.
    """
    return _operation(handle).poll()


def synchronize(handle: Operation) -> Any:
    """Wait until an operation has ended.

    Returns:
        Its result: a tensor, a list of tensors for grouped operations, a pair for
        `alltoall_async`.

    Raises:
        HorovodInternalError: it failed.
        ValueError: ``handle`` is not an operation.
    """
    return _operation(handle).wait()


def _operation(handle: Operation) -> Operation:
    if not isinstance(handle, Operation):
        raise ValueError(  # noqa: TRY004
            "expected the result of an asynchronous operation, got "
            f"{type(handle).__name__}"
        )
    return handle


def join(device: int = -1) -> int:
    """Contribute zeros to sums and averages until all ranks have joined.

    For a rank that finishes before others; averages are still divided by the number of
    all ranks. Other operations fail on all ranks while a rank has joined.

    Args:
        device: Has no effect.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: a rank is lost.
    """
    del device
    member = world.current().member(global_process_set)
    try:
        last = member.engine.join()
    except StrettoError as exc:
        raise HorovodInternalError(str(exc)) from exc
    # Ranks that joined early submitted fewer operations; nothing is under way now.
    member.numbered.clear()
    member.optimizers.clear()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called it.

    Raises:
        ValueError: this rank is not in the set.
        HorovodInternalError: a rank is lost, or has joined.
    """
    member = world.current().member(process_set)
    with member.lock:
        number = member.numbered["barrier"] = member.numbered.get("barrier", 0) + 1
    try:
        member.engine.barrier(f"barrier.{number}").wait()
    except StrettoError as exc:
        raise HorovodInternalError(str(exc)) from exc
