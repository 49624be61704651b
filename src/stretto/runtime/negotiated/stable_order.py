"""Detect a stable order of tensor sets, agree on it, and launch in it.

# Note [A stable order]
Each rank submits every tensor of a set exactly once in every step, and waits only after
it has submitted all. So a launch in any order that is the same everywhere
terminates: the next bucket in that order has all its tensors once every rank has
submitted its step, which no rank's waiting delays. Each rank's own order therefore only
affects how early buckets leave, never whether they leave. That is why a stable order
needs no rounds, and why a tensor that is late, or is zeros because it was not used,
costs only time.

All ranks decide on the stable order at the end of one step, in the round in which the
last of them reports "I have submitted all" (its vote). They leave it in the same way:
the vote says whether this rank's order was the same as before. All ranks read the same
round, so all change at the same step. Buckets in a stable order have lanes of their
own, because the order between them and negotiated buckets is not agreed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from stretto.runtime.negotiated import reductions
from stretto.runtime.negotiated.buckets import LaneLoads, form_buckets, row_of
from stretto.runtime.negotiated.pending import as_row, is_row, write
from stretto.runtime.sender import BucketSender, PlainWatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.runtime.backends.base import Need
    from stretto.runtime.bucket_schedule import BucketSchedule, Slice
    from stretto.runtime.negotiated.requests import Request


@final
class OrderWatch:
    """Counts for how many steps a rank submitted in the same order."""

    def __init__(self, stable_steps: int) -> None:
        self._stable_steps = stable_steps
        self._last: list[int] = []
        self._equal_steps = 0

    def end_step(self, order: list[int], *, in_use: bool) -> bool:
        """Add a step's order; return whether the order is stable.

        With an order in which buckets leave already (``in_use``), one equal step is
        enough; before that, ``stable_steps`` equal steps are needed.
        """
        if order == self._last:
            self._equal_steps += 1
        else:
            self._last = order
            self._equal_steps = 1
        if self._stable_steps == 0:
            return False
        return self._equal_steps >= (2 if in_use else self._stable_steps)

    @property
    def order(self) -> Sequence[int]:
        """The last step's order."""
        return self._last


def common_order(orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return one order for all ranks, near that in which tensors are ready everywhere.

    A tensor is ready everywhere when the last rank has it, so tensors are sorted by
    their latest position, then by the sum of positions, then by index.
    """
    latest = [0] * len(orders[0])
    total = [0] * len(orders[0])
    for order in orders:
        for place, index in enumerate(order):
            latest[index] = max(latest[index], place)
            total[index] += place
    return tuple(
        sorted(range(len(latest)), key=lambda i: (latest[i], total[i], i)),
    )


class BucketFailed(Exception):
    """A bucket's collective failed; the message names the bucket and the lane."""


class _Packed(NamedTuple):
    """A member that is packed with others."""

    bucket: int

    slot: int

    view: torch.Tensor
    """Its place in the bucket's buffer, with the member's shape."""


@final
class StableOrder:
    """Launches the buckets of each step in one order, from the submitting thread.

    See Note [A stable order]. Buffers take as many bytes as the packed members;
    a member that forms a bucket of its own is sent from its own memory.
    """

    def __init__(
        self,
        members: Sequence[Request],
        order: Sequence[int],
        *,
        unit_bytes: int,
        lanes: Mapping[Need, Any],
        size: int,
    ) -> None:
        self.order = tuple(order)
        self._members = members
        self._size = size
        buckets = _buckets(members, order, unit_bytes, len(lanes))
        self._buckets = buckets
        self._requests = [members[bucket.parameters[0]] for bucket in buckets]
        self._options = [reductions.options(request) for request in self._requests]
        self._changes = [reductions.changes(request) for request in self._requests]
        self._sender = BucketSender(lanes, PlainWatch(_failed))
        self._launchers = [self._sender.launcher(bucket) for bucket in buckets]
        self._buffers: list[torch.Tensor | None] = [None] * len(buckets)
        self._views: list[list[torch.Tensor]] = [[] for _ in buckets]
        self._packed: dict[int, _Packed] = {}
        self._alone: dict[int, int] = {}
        for number, bucket in enumerate(buckets):
            if len(bucket.parameters) > 1:
                self._pack(number, bucket)
            else:
                self._alone[bucket.parameters[0]] = number
        self._counts = [len(bucket.parameters) for bucket in buckets]
        self._begin()

    def _pack(self, number: int, bucket: BucketSchedule) -> None:
        dtype = reductions.dtype_of(self._requests[number])
        wire = reductions.wire_dtype(dtype)
        buffer = torch.empty(bucket.elements, dtype=wire, device="cpu")
        self._buffers[number] = buffer
        at = 0
        for slot, position in enumerate(bucket.parameters):
            member = self._members[position]
            view = buffer[at : at + member.elements].view(member.shape)
            at += member.elements
            self._views[number].append(view)
            self._packed[position] = _Packed(number, slot, view)

    def _begin(self) -> None:
        self._missing = list(self._counts)
        self._next = 0
        self._sender.forget()
        self._tensors: list[list[Any]] = [[None] * n for n in self._counts]
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def submit(self, member: int, tensor: torch.Tensor) -> None:
        """Accept a member's values; launch the buckets that are now complete.

        Raises:
            BucketFailed: a lane is closed.
        """
        packed = self._packed.get(member)
        if packed is not None:
            number, slot, view = packed
            prescale = self._members[member].prescale
            if prescale == 1.0:
                view.copy_(tensor)
            elif tensor.is_floating_point():
                torch.mul(tensor, prescale, out=view)
            else:
                view.copy_(tensor)
                reductions.scale(view, prescale)
            self._tensors[number][slot] = tensor
            self._missing[number] -= 1
        elif member in self._alone:
            self._submit_alone(member, tensor)
        missing = self._missing
        while self._next < len(missing) and missing[self._next] == 0:
            self._launch(self._next)
            self._next += 1

    def _submit_alone(self, member: int, tensor: torch.Tensor) -> None:
        wire = reductions.wire_dtype(tensor.dtype)
        if is_row(tensor) and wire is tensor.dtype:
            flat = as_row(tensor)
        else:
            flat = tensor.to(wire, copy=True).reshape(-1)
            self._moved.append((tensor, flat))
        reductions.scale(flat, self._members[member].prescale)
        number = self._alone[member]
        self._buffers[number] = flat
        self._missing[number] = 0

    def _launch(self, number: int) -> None:
        buffer = self._buffers[number]
        if buffer is None:
            raise AssertionError(f"bucket {number} has no values")
        try:
            self._launchers[number](buffer, self._options[number])
        except RuntimeError as exc:
            raise self._sender.report(self._buckets[number], exc) from exc

    def finish(self) -> None:
        """Wait for the step's buckets, in order, and copy results into place.

        Raises:
            BucketFailed: a lane's collective failed.
        """
        for number in range(self._next):
            # Not made before: a callback in a field would keep this object, and lanes.
            ended = partial(self._ended, number) if self._changes[number] else None
            self._sender.wait(self._buckets[number], ended)
            if self._views[number]:
                torch._foreach_copy_(self._tensors[number], self._views[number])
            else:
                self._buffers[number] = None  # the caller's own memory
        for tensor, flat in self._moved:
            write(tensor, flat.view(tensor.shape))
        self._begin()

    def _ended(self, number: int, part: Slice) -> None:
        buffer = self._buffers[number]
        if buffer is not None:
            values = buffer[part.start : part.end]
            reductions.finish(values, self._requests[number], self._size)


def _failed(place: str, cause: BaseException) -> BucketFailed:
    error = BucketFailed(place)
    error.__cause__ = cause
    return error


def _buckets(
    members: Sequence[Request], order: Sequence[int], unit_bytes: int, lanes: int
) -> list[BucketSchedule]:
    """Return buckets in the order in which they are complete."""
    rows = [row_of(member, members[member]) for member in order]
    place = {member: i for i, member in enumerate(order)}
    buckets = form_buckets(
        [row for row in rows if row.elements], unit_bytes, LaneLoads(lanes)
    )
    buckets.sort(key=lambda bucket: max(place[m] for m in bucket.parameters))
    return buckets
