"""Add a layer's gradients over the ranks that ran it, while backward continues.

As in data-parallel training, gradients are copied into buckets as they arrive, and a
full bucket goes to a lane. The buckets of one set of ranks go in one order on all of
them. Gradients are added, not averaged: each rank's loss is already weighted with its
share of the global batch.

# Note [Where the sum goes]
Gradients arrive in shadows, see Note [Two gradients of one parameter], so ``.grad`` is
untouched while backward runs. When it has ended, the sum is added to ``.grad``, which
is the same on all ranks of the layer. After `no_sync` the shadow keeps this rank's own
part until the next backward that sends it, and ``.grad`` shows what one rank can know:
the earlier sum and its own part. If the user drops or zeroes it, the part is dropped.

A program's hooks on parameters see the gradient of each backward, as in one process. So
if any rank has such hooks, gradients are sent in `no_sync` too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.burst.hooks import gradient_hooks, post_hooks
from stretto.burst.rank_groups import RankRange
from stretto.errors import StrettoError
from stretto.runtime.bucket_schedule import BucketSchedule, Slice
from stretto.runtime.sender import BucketSender

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from stretto.burst.checks.hook_use import HookUse
    from stretto.burst.rank_groups import GroupLanes, RankGroups
    from stretto.burst.shadows import Shadows
    from stretto.burst.timings import StepClock
    from stretto.runtime.backends.base import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedLayer:
    """A layer's parameters that need a gradient, and the ranks that run it."""

    name: str

    width: RankRange

    parameters: tuple[nn.Parameter, ...]


@final
class _Slot:
    """One parameter's gradient, and its place in a bucket if ranks add theirs."""

    def __init__(self, layer: str, parameter: nn.Parameter) -> None:
        self.layer = layer
        self.parameter = parameter
        self.bucket: _Bucket | None = None
        self.ready = False
        self.before: Tensor | None = None
        self.shown: tuple[Tensor, int] | None = None
        """Value of ``.grad`` after `no_sync`, and its version."""
        self.view: Tensor
        self.mark: Tensor


@final
class _Bucket:
    """Gradients sent together, each followed by a mark: whether the rank has one."""

    def __init__(
        self, schedule: BucketSchedule, slots: list[_Slot], group: _Group
    ) -> None:
        self.schedule = schedule
        self.place = schedule.place
        self.slots = slots
        self.group = group
        self.launch = group.sender.launcher(schedule)
        self.missing = len(slots)
        self.is_sent = False
        sizes = [slot.parameter.numel() for slot in slots]
        first = slots[0].parameter
        self.buffer = torch.zeros(
            schedule.elements, dtype=first.dtype, device=first.device
        )
        every = [*sizes, *(1 for _ in slots)]
        parts = torch.split_with_sizes(self.buffer, every)
        for i, slot in enumerate(slots):
            slot.bucket = self
            slot.view = parts[i].view(slot.parameter.shape)
            slot.mark = parts[len(slots) + i]


@final
class _Group:
    """The buckets of one set of ranks, in the order in which they are sent."""

    def __init__(self, sender: BucketSender) -> None:
        self.sender = sender
        self.buckets: list[_Bucket] = []
        self.next = 0


@final
class _GuardedWatch:
    """Waits under the model's guard, and counts the time as waiting."""

    def __init__(self, rank_groups: RankGroups, clock: StepClock) -> None:
        self._rank_groups = rank_groups
        self._clock = clock

    def report(self, place: str, cause: BaseException) -> Exception:
        """Return the model's one error."""
        return self._rank_groups.report(place, cause)

    def wait(self, work: Any, place: str) -> None:
        """Wait for a bucket's work."""
        with self._rank_groups.guard(place):
            self._clock.wait("synchronization", work.wait)


@final
class GradientSync:
    """Synchronizes the gradients of one rank's layers."""

    def __init__(
        self,
        rank_groups: RankGroups,
        clock: StepClock,
        shadows: Shadows,
        layers: Sequence[SyncedLayer],
        hooks: HookUse,
        *,
        bucket_bytes: int,
    ) -> None:
        self._rank_groups = rank_groups
        self._watch = _GuardedWatch(rank_groups, clock)
        self._sum: Any = torch.distributed.AllreduceOptions()
        self._shadows = shadows
        self._hooks = hooks
        self._groups: list[_Group] = []
        self._slots: dict[int, _Slot] = {}
        self._launched: list[_Bucket] = []
        self._holds_own = False
        self.is_on = True
        rows: dict[RankRange, list[_Slot]] = {}
        for layer in reversed(layers):
            for parameter in reversed(layer.parameters):
                slot = _Slot(layer.name, parameter)
                self._slots[id(parameter)] = slot
                if rank_groups.group(layer.width) is not None:
                    rows.setdefault(layer.width, []).append(slot)
        for width in sorted(rows):
            self._add_group(width, rows[width], bucket_bytes)

    def _add_group(
        self, width: RankRange, rows: list[_Slot], bucket_bytes: int
    ) -> None:
        lanes: GroupLanes | None = self._rank_groups.group(width)
        assert lanes is not None  # noqa: S101
        opened: dict[Need, Any] = {(i, None): o for i, o in enumerate(lanes.lanes)}
        group = _Group(BucketSender(opened, self._watch))
        self._groups.append(group)
        names = self._rank_groups.ranks.name_all(range(width[0], sum(width)))
        for index, slots in enumerate(_cut(rows, bucket_bytes)):
            schedule = _schedule(index, slots, names, lanes=len(opened))
            group.buckets.append(_Bucket(schedule, slots, group))

    # While backward runs.

    def begin(self) -> None:
        """Drop what `no_sync` kept if the user has dropped or zeroed ``.grad``.

        Raises:
            StrettoError: a gradient was changed in another way since `no_sync`.
        """
        if not self._holds_own:
            return
        for slot in self._slots.values():
            if slot.shown is None:
                continue
            (shown, version), slot.shown = slot.shown, None
            held = slot.parameter.grad
            before, slot.before = slot.before, None
            if held is not None and _has_hooks(slot.parameter):
                raise _hooked_late(slot.layer)
            if held is None:
                self._shadows.set_grad(slot.parameter, None)
            elif held is shown and held._version == version:  # noqa: SLF001
                slot.parameter.grad = before
            elif not bool(held.count_nonzero()):
                self._shadows.set_grad(slot.parameter, None)
            else:
                raise StrettoError(
                    f"a gradient of layer {slot.layer!r} was changed after a backward "
                    "in no_sync(): change gradients after a backward outside of it"
                )
        self._holds_own = False

    def keeps_own(self, parameters: Iterable[Tensor] | None = None) -> bool:
        """Return whether ``.grad`` has only this rank's own part of a gradient.

        Of any layer; or, of these parameters, one that other ranks add to.
        """
        if not self._holds_own:
            return False
        if parameters is None:
            return any(map(_keeps_part, self._slots.values()))
        found = (self._slots.get(id(parameter)) for parameter in parameters)
        return any(
            slot is not None and slot.bucket is not None and _keeps_part(slot)
            for slot in found
        )

    def require_nothing_kept(self, what: str) -> None:
        """Require that `no_sync` has kept nothing.

        Raises:
            StrettoError: it has; ``what`` was done too early.
        """
        if self._holds_own:
            raise StrettoError(
                f"{what} between a backward in no_sync() "
                "and the one that sends its gradients: do it after optimizer.step()"
            )

    def arrived(self, parameter: nn.Parameter) -> None:
        """Record that the layers' gradient of a parameter is complete on this rank."""
        slot = self._slots.get(id(parameter))
        if not self.is_on or slot is None or slot.bucket is None:
            return
        if slot.ready:  # see Note [A shadow that was replaced]
            if slot.bucket.is_sent:
                raise StrettoError(
                    f"a parameter of layer {slot.layer!r} got another storage between "
                    "two forwards of one backward: replace values by copy_()"
                )
            self._fill(slot)
            return
        self._fill(slot)
        slot.bucket.missing -= 1
        self._launch_ready(slot.bucket.group)

    def add_direct(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Add the weighted gradient of the loss's direct use of a parameter.

        Raises:
            StrettoError: the parameter's gradient is being sent already, or the
                parameter was frozen in the forward.
        """
        slot = self._slots.get(id(parameter))
        if slot is None:
            raise StrettoError(
                "the loss uses a parameter that was frozen in the model's forward: "
                "freeze and unfreeze parameters before the forward"
            )
        held = self._shadows.grad(parameter)
        self._shadows.set_grad(parameter, grad if held is None else held + grad)
        if not self.is_on or not slot.ready:
            return
        assert slot.bucket is not None  # noqa: S101
        if slot.bucket.is_sent:
            raise StrettoError(
                f"the loss uses a parameter of layer {slot.layer!r} in a term that was "
                "computed before the model's forward, so its gradient came too late: "
                "compute such terms after the forward"
            )
        self._fill(slot)

    def _fill(self, slot: _Slot) -> None:
        grad = self._shadows.grad(slot.parameter)
        if grad is not None and grad.layout != torch.strided:
            raise StrettoError(
                f"layer {slot.layer!r} has a sparse gradient, which can't be added "
                "over ranks: use sparse=False"
            )
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
            with self._rank_groups.guard(bucket.place):
                bucket.launch(bucket.buffer, self._sum)
            bucket.is_sent = True
            self._launched.append(bucket)

    # When backward has ended.

    def layer_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield the parameters with their gradient on this rank, not yet delivered."""
        for slot in self._slots.values():
            yield slot.parameter, self._shadows.grad(slot.parameter)

    @torch.no_grad()
    def finish(self, unreached: Container[int] = ()) -> None:
        """Send the rest, wait for everything and add the sums to ``.grad``.

        ``unreached`` are ids of parameters that no loss of any rank depends on: they
        get no gradient.
        """
        for slot in self._slots.values():
            if id(slot.parameter) in unreached:
                self._shadows.set_grad(slot.parameter, None)
        if not self.is_on:
            self._show_own()
            return
        for group in self._groups:
            for bucket in group.buckets[group.next :]:
                for slot in bucket.slots:
                    if not slot.ready:
                        self._fill(slot)
                bucket.missing = 0
            self._launch_ready(group)
        for bucket in self._launched:
            bucket.group.sender.wait(bucket.schedule)
            for slot in bucket.slots:
                if id(slot.parameter) not in unreached:
                    self._deliver_sum(slot)
        for slot in self._slots.values():
            if slot.bucket is None:
                self._deliver(slot.parameter, self._shadows.grad(slot.parameter))
        self._reset_buckets()

    def _deliver_sum(self, slot: _Slot) -> None:
        own = self._shadows.grad(slot.parameter)
        if own is None and not bool(slot.mark.item() > 0):
            return
        own = slot.view.clone() if own is None else own.copy_(slot.view)
        self._deliver(slot.parameter, own)

    def _deliver(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Add a complete gradient to ``.grad``, through the parameter's own hooks.

        Autograd does not call them: it never reaches the parameter itself. As with
        autograd, a parameter that was frozen after the forward gets no gradient.
        """
        if grad is None:
            return
        self._shadows.set_grad(parameter, None)
        if not parameter.requires_grad:
            return
        grad = self._hooks.run_hooks(parameter, grad)
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)
        self._hooks.call_after(parameter)

    @torch.no_grad()
    def _show_own(self) -> None:
        self._holds_own = True  # also where no gradient arrived: on all ranks
        for slot in self._slots.values():
            if not slot.parameter.requires_grad:
                self._shadows.set_grad(slot.parameter, None)
            own = self._shadows.grad(slot.parameter)
            if own is None:
                continue
            if _has_hooks(slot.parameter):
                raise _hooked_late(slot.layer)
            slot.before = before = slot.parameter.grad
            shown = own.clone() if before is None else before + own
            slot.parameter.grad = shown
            slot.shown = (shown, shown._version)  # noqa: SLF001

    def reset(self) -> None:
        """Prepare for the next backward after one that was aborted."""
        self._shadows.clear()
        for slot in self._slots.values():
            if slot.shown is not None and slot.parameter.grad is slot.shown[0]:
                slot.parameter.grad = slot.before
            slot.before = slot.shown = None
        self._holds_own = False
        self._reset_buckets()

    def _reset_buckets(self) -> None:
        self._launched = []
        for group in self._groups:
            group.next = 0
            group.sender.forget()
            for bucket in group.buckets:
                bucket.missing = len(bucket.slots)
                bucket.is_sent = False
                for slot in bucket.slots:
                    slot.ready = False


def _schedule(
    index: int, slots: Sequence[_Slot], names: str, *, lanes: int
) -> BucketSchedule:
    """Return where a bucket goes: whole, on the lanes in turn."""
    elements = sum(slot.parameter.numel() for slot in slots) + len(slots)
    return BucketSchedule(
        index=index,
        tensors=(),
        parameters=(),
        elements=elements,
        slices=(Slice(lane=index % lanes, resource=None, start=0, end=elements),),
        label=(
            f"the all-reduce of bucket {index} of {names}, from layer "
            f"{slots[0].layer!r} on,"
        ),
    )


def _keeps_part(slot: _Slot) -> bool:
    """Return whether a parameter still has what `no_sync` kept, not zeroed."""
    held = slot.parameter.grad
    if slot.shown is None or held is None:
        return False
    shown, version = slot.shown
    is_same = held is shown and held._version == version  # noqa: SLF001
    return is_same or bool(held.count_nonzero())


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(gradient_hooks(parameter) or post_hooks(parameter))


def _hooked_late(layer: str) -> StrettoError:
    return StrettoError(
        f"a hook was registered on a parameter of layer {layer!r} between a forward "
        "and the backward in no_sync() that it was to see, or before the gradients of "
        "that backward were sent: register hooks on parameters before the forward"
    )


def _cut(rows: Iterable[_Slot], bucket_bytes: int) -> list[list[_Slot]]:
    """Split rows into buckets of one type, each full at the given bytes or more."""
    found: list[list[_Slot]] = []
    for _, same in itertools.groupby(rows, key=lambda slot: slot.parameter.dtype):
        size = bucket_bytes
        for slot in same:
            if size >= bucket_bytes:
                found.append([])
                size = 0
            found[-1].append(slot)
            size += slot.parameter.nbytes
    return found
