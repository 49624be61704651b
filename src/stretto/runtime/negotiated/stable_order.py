"""Detect a stable order of tensor sets, agree on it, and launch in it.

# Note [An order that is kept]
Each rank submits every tensor of a set exactly once in every step, and waits only after
it has submitted all. So a launch in any fixed order that is the same everywhere
terminates: the next unit in that order has all its tensors once every rank has
submitted its step, which no rank's waiting delays. Each rank's own order therefore only
affects how early units leave, never whether they leave. That is why a kept order needs
no rounds, and why a tensor that is late, or is zeros because it was not used, costs
only time.

All ranks decide on the kept order at the end of one step, in the round in which the
last of them reports "I have submitted all" (its vote). They leave it in the same way:
the vote says whether this rank's order was the same as before. All ranks read the same
round, so all change at the same step. Units in a kept order have lanes of their own,
because the order between them and negotiated units is not agreed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
import torch.distributed as dist

from stretto.runtime.negotiated import reductions
from stretto.runtime.negotiated.pending import as_row, is_row, write
from stretto.runtime.negotiated.requests import DTYPES
from stretto.runtime.negotiated.send import LaneLoads, Row, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.runtime.negotiated.requests import Request
    from stretto.runtime.negotiated.send import Unit


@final
class OrderWatch:
    """Counts for how many steps a rank submitted in the same order."""

    def __init__(self, stable_steps: int) -> None:
        self._stable_steps = stable_steps
        self._last: list[int] = []
        self._equal_steps = 0

    def end_step(self, order: list[int], *, kept: bool) -> bool:
        """Add a step's order; return whether the order is stable.

        With an order that is already kept (``kept``), one equal step is enough; before
        that, ``stable_steps`` equal steps are needed.
        """
        if order == self._last:
            self._equal_steps += 1
        else:
            self._last = order
            self._equal_steps = 1
        if self._stable_steps == 0:
            return False
        return self._equal_steps >= (2 if kept else self._stable_steps)

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


class UnitFailed(Exception):
    """A unit's collective failed; the message names the unit."""


class _Packed(NamedTuple):
    """A member that is packed with others."""

    unit: int

    slot: int

    view: torch.Tensor
    """Its place in the unit's buffer, with the member's shape."""


class _Alone(NamedTuple):
    """Elements ``start`` to ``end`` of a member, which form a unit."""

    unit: int

    start: int

    end: int


@final
class FixedOrder:
    """Launches the units of each step in one order, from the submitting thread.

    See Note [An order that is kept]. Buffers take as many bytes as the packed members;
    a member that forms units of its own is sent from its own memory.
    """

    def __init__(
        self,
        members: Sequence[Request],
        order: Sequence[int],
        *,
        unit_bytes: int,
        lanes: Sequence[Any],
        size: int,
    ) -> None:
        self.order = tuple(order)
        self._members = members
        self._size = size
        units = _units(members, order, unit_bytes, len(lanes))
        self._units = units
        self._requests = [members[unit.pieces[0].position] for unit in units]
        self._launchers = [
            _launcher(lanes[unit.lane], request)
            for unit, request in zip(units, self._requests, strict=True)
        ]
        self._buffers: list[torch.Tensor | None] = [None] * len(units)
        self._views: list[list[torch.Tensor]] = [[] for _ in units]
        self._packed: dict[int, _Packed] = {}
        self._alone: dict[int, list[_Alone]] = {}
        for number, unit in enumerate(units):
            if len(unit.pieces) > 1:
                self._pack(number, unit)
            else:
                ((position, start, end),) = unit.pieces
                self._alone.setdefault(position, []).append(_Alone(number, start, end))
        self._counts = [len(unit.pieces) for unit in units]
        self._begin()

    def _pack(self, number: int, unit: Unit) -> None:
        dtype = reductions.dtype_of(self._requests[number])
        wire = reductions.wire_dtype(dtype)
        buffer = torch.empty(unit.elements, dtype=wire, device="cpu")
        self._buffers[number] = buffer
        at = 0
        for slot, piece in enumerate(unit.pieces):
            view = buffer[at : at + piece.end].view(self._members[piece.position].shape)
            at += piece.end
            self._views[number].append(view)
            self._packed[piece.position] = _Packed(number, slot, view)

    def _begin(self) -> None:
        self._missing = list(self._counts)
        self._next = 0
        self._works: list[Any] = []
        self._tensors: list[list[Any]] = [[None] * n for n in self._counts]
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def submit(self, member: int, tensor: torch.Tensor) -> None:
        """Accept a member's values; launch the units that are now complete.

        Raises:
            UnitFailed: a lane is closed.
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
        for number, start, end in self._alone[member]:
            self._buffers[number] = flat[start:end]
            self._missing[number] = 0

    def _launch(self, number: int) -> None:
        try:
            work = self._launchers[number]([self._buffers[number]])
        except RuntimeError as exc:
            raise UnitFailed(self._place(number)) from exc
        self._works.append(work)

    def finish(self) -> None:
        """Wait for the step's units, in order, and copy results into place.

        Raises:
            UnitFailed: a lane's collective failed.
        """
        for number, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as exc:
                raise UnitFailed(self._place(number)) from exc
            buffer = self._buffers[number]
            if buffer is not None:
                reductions.finish(buffer, self._requests[number], self._size)
            if self._views[number]:
                torch._foreach_copy_(self._tensors[number], self._views[number])
            else:
                self._buffers[number] = None  # the caller's own memory
        for tensor, flat in self._moved:
            write(tensor, flat.view(tensor.shape))
        self._begin()

    def _place(self, number: int) -> str:
        unit = self._units[number]
        more = len(unit.pieces) - 1
        also = f" and {more} more" if more else ""
        return f"{self._requests[number].place}{also} on lane {unit.lane}"


def _units(
    members: Sequence[Request], order: Sequence[int], unit_bytes: int, lanes: int
) -> list[Unit]:
    """Return units in the order in which they are complete."""
    rows = []
    for member in order:
        request = members[member]
        if request.elements:
            like = (request.dtype, request.op, request.prescale, request.postscale)
            row = Row(member, like, request.elements, DTYPES[request.dtype])
            rows.append(row)
    place = {member: i for i, member in enumerate(order)}
    units = cut(rows, unit_bytes, LaneLoads(lanes))
    units.sort(key=lambda unit: max(place[piece.position] for piece in unit.pieces))
    return units


def _launcher(lane: Any, request: Request) -> Callable[[list[Any]], Any]:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = reductions.REDUCE_OPS[request.op]
    reduce = lane.allreduce
    return lambda buffers: reduce(buffers, options)
