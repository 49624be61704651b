"""Adds a layer's gradients over the ranks that ran it, while backward goes on.

As in data parallel training gradients are copied into buckets as they come, and a full
bucket goes to a lane, those of one set of ranks in one order on all of them. Added, not
averaged: each rank's loss already counts with its share of the global batch.

# Note [What the sum is put back into]
A gradient from before this backward (accumulation over micro-steps) is the same on all
ranks of the layer already and must not be added over them once more. It is set aside
when the first new gradient comes, and the sum is added to it. After `no_sync` the
gradient is this rank's own and goes into the sum.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from stretto.burst.links import Width

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.burst.clock import StepClock
    from stretto.burst.links import GroupLinks, Links


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedLayer:
    """A layer's parameters that need a gradient, and the ranks that run it."""

    name: str

    width: Width

    parameters: tuple[torch.nn.Parameter, ...]


@final
class _Slot:
    """One parameter's place in its bucket."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.before: torch.Tensor | None = None
        self.is_own = False
        self.ready = False
        self.view: torch.Tensor
        self.mark: torch.Tensor


@final
class _Bucket:
    """Gradients sent together, and after them one mark each: whether it has one."""

    def __init__(
        self, place: str, slots: list[_Slot], lane: Any, group: _Group
    ) -> None:
        self.place = place
        self.slots = slots
        self.lane = lane
        self.group = group
        self.missing = len(slots)
        self.work: Any = None
        sizes = [slot.parameter.numel() for slot in slots]
        first = slots[0].parameter
        self.buffer = torch.zeros(
            sum(sizes) + len(slots), dtype=first.dtype, device=first.device
        )
        parts = self.buffer.split([*sizes, *(1 for _ in slots)])
        for i, slot in enumerate(slots):
            slot.view = parts[i].view(slot.parameter.shape)
            slot.mark = parts[len(slots) + i]


@final
class _Group:
    """The buckets of one set of ranks, in the order in which they are sent."""

    def __init__(self) -> None:
        self.buckets: list[_Bucket] = []
        self.next = 0


@final
class GradientSync:
    """Synchronises the gradients of one rank's layers."""

    def __init__(
        self,
        links: Links,
        clock: StepClock,
        layers: Sequence[SyncedLayer],
        *,
        bucket_bytes: int,
    ) -> None:
        self._links = links
        self._clock = clock
        self._groups: list[_Group] = []
        self._by_layer: dict[str, list[tuple[_Bucket, _Slot]]] = {}
        self._launched: list[_Bucket] = []
        self._handles: list[Any] = []
        self.is_on = True
        rows: dict[Width, list[tuple[str, torch.nn.Parameter]]] = {}
        for layer in reversed(layers):
            if links.group(layer.width) is not None:
                rows.setdefault(layer.width, []).extend(
                    (layer.name, p) for p in reversed(layer.parameters)
                )
        for width in sorted(rows):
            self._add_group(width, rows[width], bucket_bytes)

    def _add_group(
        self,
        width: Width,
        rows: list[tuple[str, torch.nn.Parameter]],
        bucket_bytes: int,
    ) -> None:
        lanes: GroupLinks | None = self._links.group(width)
        assert lanes is not None  # noqa: S101
        group = _Group()
        self._groups.append(group)
        names = self._links.ranks.name_all(range(width[0], sum(width)))
        for some in _cut(rows, bucket_bytes):
            index = len(group.buckets)
            slots = [_Slot(parameter) for _, parameter in some]
            place = f"the all-reduce of bucket {index} of {names}, from layer "
            bucket = _Bucket(
                f"{place}{some[0][0]!r} on",
                slots,
                lanes.lanes[index % len(lanes.lanes)],
                group,
            )
            group.buckets.append(bucket)
            for (layer, parameter), slot in zip(some, slots, strict=True):
                self._by_layer.setdefault(layer, []).append((bucket, slot))
                self._handles += (
                    parameter.register_hook(partial(self._before, slot)),
                    parameter.register_post_accumulate_grad_hook(
                        partial(self._after, bucket, slot)
                    ),
                )

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # While backward runs.

    def _before(self, slot: _Slot, _grad: torch.Tensor) -> None:
        held = slot.parameter.grad
        if held is None:
            slot.before, slot.is_own = None, False
        elif not slot.is_own:
            slot.before, slot.parameter.grad = held, None

    def _after(self, bucket: _Bucket, slot: _Slot, parameter: torch.Tensor) -> None:
        if not self.is_on:
            slot.is_own = True
            return
        self._fill(slot, parameter.grad)
        bucket.missing -= 1
        self._launch_ready(bucket.group)

    def absent(self, layer: str) -> None:
        """Backward came by a layer of which this rank has no samples."""
        if not self.is_on:
            return
        for bucket, slot in self._by_layer.get(layer, ()):
            if not slot.ready:
                self._fill_without(slot)
                bucket.missing -= 1
                self._launch_ready(bucket.group)

    def _fill_without(self, slot: _Slot) -> None:
        """Fills in for a parameter that got no gradient in this backward."""
        held = slot.parameter.grad
        if slot.is_own or held is None:
            self._fill(slot, held)
        else:
            slot.before, slot.parameter.grad = held, None
            self._fill(slot, None)

    def _fill(self, slot: _Slot, grad: torch.Tensor | None) -> None:
        with torch.no_grad():
            if grad is None:
                slot.view.zero_()
            else:
                slot.view.copy_(grad)
            slot.mark.fill_(0.0 if grad is None else 1.0)
        slot.ready = True

    def _launch_ready(self, group: _Group) -> None:
        while group.next < len(group.buckets):
            bucket = group.buckets[group.next]
            if bucket.missing:
                return
            group.next += 1
            with self._links.guard(bucket.place):
                bucket.work = bucket.lane.allreduce([bucket.buffer])
            self._launched.append(bucket)

    # When backward has ended.

    def finish(self) -> None:
        """Sends what is left, waits for all of it and puts the sums in place."""
        if not self.is_on:
            return
        for group in self._groups:
            for bucket in group.buckets[group.next :]:
                for slot in bucket.slots:
                    if not slot.ready:
                        self._fill_without(slot)
                bucket.missing = 0
            self._launch_ready(group)
        for bucket in self._launched:
            with self._links.guard(bucket.place):
                self._clock.wait("synchronisation", bucket.work.wait)
            self._put_back(bucket)
        self.reset()

    @torch.no_grad()
    def _put_back(self, bucket: _Bucket) -> None:
        for slot in bucket.slots:
            parameter = slot.parameter
            held, before = parameter.grad, slot.before
            slot.before, slot.is_own = None, False
            if held is None and not bool(slot.mark.item() > 0):
                parameter.grad = before
                continue
            if held is None:
                held = slot.view.clone()
            else:
                held.copy_(slot.view)
            parameter.grad = held if before is None else before.add_(held)

    def reset(self) -> None:
        """Makes ready for the next backward, also after one that was cut short."""
        self._launched = []
        for group in self._groups:
            group.next = 0
            for bucket in group.buckets:
                bucket.work, bucket.missing = None, len(bucket.slots)
                for slot in bucket.slots:
                    slot.ready = False
                    if slot.before is not None and slot.parameter.grad is None:
                        slot.parameter.grad, slot.before = slot.before, None


def _cut(
    rows: Iterable[tuple[str, torch.nn.Parameter]], bucket_bytes: int
) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Rows in buckets of one type, each full when it has the bytes or more."""
    found: list[list[tuple[str, torch.nn.Parameter]]] = []
    for _, same in itertools.groupby(rows, key=lambda row: row[1].dtype):
        size = bucket_bytes
        for row in same:
            if size >= bucket_bytes:
                found.append([])
                size = 0
            found[-1].append(row)
            size += row[1].nbytes
    return found
