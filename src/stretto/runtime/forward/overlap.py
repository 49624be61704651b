"""Overlap a model's communication with its next forward.

# Note [What happens when]
1. Backward: all buckets are launched in the plan's order. The Reducer gets futures that
   are done, so backward returns with communication under way. Gradients of unfinished
   buckets are `LazyGradient`s.
2. ``optimizer.step()``: the step is deferred for parameters with such gradients
   (`steps.py`), which become `PendingParameter`s (`pending.py`).
3. The next forward: each module's call finishes the buckets of its own parameters, and
   so does any other read. To finish a bucket is to wait for its works, to put its
   gradients back, and to execute the optimizer's step on its parameters.
4. The end of forward finishes the rest.

Ranks only wait here, each for itself: all collectives were launched before backward
returned. So ranks may finish at different places.

# Note [Reads that nothing shows]
Code that gets a parameter's address without asking, outside of its module's call, would
read a value before its update. So a parameter counts as *seen* only after a read of it
has finished something; until then its bucket is finished as forward begins, and its
class only watches. In a model whose reads all show, that is one step.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, final

import torch

from stretto import variable_names
from stretto.logs import get_logger
from stretto.runtime.forward import other_threads, raw_access, steps
from stretto.runtime.forward.halves import Halves, why_whole
from stretto.runtime.forward.lazy import is_held, is_shared, uses_of, wrap
from stretto.runtime.forward.member import BucketMember
from stretto.runtime.forward.module_hooks import ModuleHooks
from stretto.runtime.forward.other_threads import other_thread
from stretto.runtime.forward.pending import (
    assign_gradient,
    exchange_back,
    gradient_of,
    guard,
    plainly,
    unguard,
)
from stretto.runtime.forward.undisturbed import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from stretto.foreground_marks import StepMarker
    from stretto.runtime.bucket_schedule import BucketSchedule
    from stretto.runtime.forward.member import DeferredUpdate
    from stretto.runtime.sender import BucketSender

_log = get_logger(__name__)


COMPILATIONS = 4
"""Steps in which code may be compiled; TorchDynamo's limit for a function is 8."""


def is_poisoned() -> bool:
    """Return whether this process fills what is pending with NaN."""
    return os.environ.get(variable_names.POISON) == "1"


_live: weakref.WeakSet[ForwardOverlap] = weakref.WeakSet()


@final
class ForwardOverlap:
    """One model's pending buckets between a backward and the end of a forward."""

    def __init__(
        self,
        root: nn.Module,
        table: Sequence[tuple[str, nn.Parameter]],
        schedules: Sequence[BucketSchedule],
        *,
        views: bool,
        sender: BucketSender,
        marker: StepMarker,
        logs: bool,
        seen: set[str],
        said: set[str],
    ) -> None:
        """Prepare.

        Args:
            root: The model that DDP wraps.
            table: Names and parameters in the order of DDP's list.
            schedules: The plan's buckets.
            views: Whether gradients are views of the buckets.
            sender: Waits for launched buckets.
            marker: Marks waits for a background.
            logs: Whether this rank logs.
            seen: Names of parameters whose reads were seen, under this plan or another
                one of the model.
            said: Warnings that were given.
        """
        self._schedules = tuple(schedules)
        self._views = views
        self._sender = sender
        self._marker = marker
        self._logs = logs
        self._said = said
        self._lock = threading.RLock()
        self._poisons = is_poisoned()
        self._unfinished: dict[int, torch.Tensor] = {}
        """The reduced data of buckets that are not finished, in launch order."""

        self._poisoned: dict[int, torch.Tensor] = {}
        """In poison mode, the Reducer's own buckets."""

        self._addresses: dict[int, int] = {}
        """Addresses of the Reducer's buckets that were launched before."""

        self._parts: dict[int, tuple[int, list[torch.Tensor]]] = {}
        """Addresses of reduced buckets, and the views of their parts."""

        self._pending: dict[BucketMember, None] = {}
        """Members with an update."""

        self._watched: dict[BucketMember, None] = {}
        """Members that are guarded without an update."""

        self._members: tuple[tuple[BucketMember, ...], ...] = tuple(
            self._members_of(schedule, table) for schedule in schedules
        )
        self._seen = seen
        self._module_hooks = ModuleHooks(self, root)
        self._aliased = False
        self._in_forward = False
        self._step = 0
        self._compilations: set[int] = set()
        """Steps in which something was compiled while something was pending."""

        self._halves: Halves | None = None
        self._wrapped: dict[BucketMember, None] = {}
        """Members whose finished gradients are still wrapped, until the step."""

        self.waits = False
        """Whether this backward's communication is waited for as it ends."""

        self.armed = True
        """Whether the next backward may return with communication under way."""

        _live.add(self)
        steps.attach(self)
        other_threads.attach(self)

    def _members_of(
        self, schedule: BucketSchedule, table: Sequence[tuple[str, nn.Parameter]]
    ) -> tuple[BucketMember, ...]:
        found, offset = [], 0
        for place, position in enumerate(schedule.parameters):
            name, parameter = table[position]
            found.append(
                BucketMember(self, name, parameter, schedule.index, place, offset)
            )
            offset += parameter.numel()
        return tuple(found)

    def warn(self, why: str) -> None:
        """Say once, on one rank, why a step does not overlap with forward."""
        if self._logs and why not in self._said:
            self._said.add(why)
            _log.warning("no overlap with forward: %s", why)

    def why_whole(self) -> str | None:
        """Return why buckets can't be exchanged in halves, or ``None``."""
        return why_whole(self._schedules, self._members)

    def exchange_in_halves(self, *, rank: int, ranks: int) -> Halves:
        """Exchange buckets in halves from the next step on, on all ranks."""
        self._halves = Halves(
            self._schedules, self._members, self._sender, rank=rank, ranks=ranks
        )
        return self._halves

    def warn_of_whole(self, why: str) -> None:
        """Say once, on one rank, why buckets are not exchanged in halves."""
        if self._logs and why not in self._said:
            self._said.add(why)
            _log.warning("no clipping by parts: %s", why)

    # Backward.

    def may_be_late(self) -> bool:
        """Return whether the next backward may end before its communication."""
        if not self.armed:
            return False
        why = other_thread()
        if why is not None:
            self.warn(why)
        return why is None

    def begin_backward(self, *, waits: bool) -> None:
        """Finish what is left; forward has done it unless it was another backward."""
        self.waits = waits
        self.finish_all()
        self._put_back()
        if self._halves is not None:
            self._halves.begin()

    def take(self, index: int, bucket: torch.Tensor) -> torch.Tensor:
        """Note a bucket that is being launched; return the tensor to send."""
        sent = bucket
        if self._views and self._is_aliased(index, bucket):
            self._aliased = True
        if self._poisons:
            sent = bucket.clone()
            self._poisoned[index] = bucket
            bucket.fill_(float("nan"))
        self._unfinished[index] = sent
        return sent

    def _is_aliased(self, index: int, bucket: torch.Tensor) -> bool:
        """Return whether the program has tensors of a bucket's memory.

        Besides the bucket, the Reducer has a view for each gradient, and another one
        for its result once it has finished a step with this memory.
        """
        address = bucket.data_ptr()
        views = 2 if self._addresses.get(index) == address else 1
        self._addresses[index] = address
        return uses_of(bucket) > 1 + views * len(self._members[index])

    def before_reducer(self) -> None:
        """Finish the buckets that have arrived, just before the Reducer ends."""
        if self._halves is not None:
            self._sum_up(self._halves)
        elif not self._poisons:
            for index in self._arrived():
                self._sender.wait(self._schedules[index])
                del self._unfinished[index]

    def _sum_up(self, halves: Halves) -> None:
        """Wait for the first halves; second halves are waited for in their order."""
        try:
            with undisturbed():
                order = self._marker.wait("all-reduce", halves.sum_up)
        except BaseException:
            self._give_up()
            raise
        self._unfinished = {index: self._unfinished[index] for index in order}

    def after_reducer(self) -> None:
        """Replace the gradients of unfinished buckets."""
        self._step += 1
        why = None
        if self._unfinished:
            raw_access.watch(self)
        with plainly():
            for index in self._unfinished:
                for member in self._members[index]:
                    why = self._replace_gradient(member) or why
        if self._aliased:
            self._aliased = False
            why = "the program keeps tensors that share the memory of gradients"
        if why is not None:
            self.warn(why)
        if why is not None or self.waits:
            self.finish_all()

    def _replace_gradient(self, member: BucketMember) -> str | None:
        """Set a wrapper as gradient; return why it must be complete at once, if so."""
        parameter = member.parameter
        gradient = parameter.grad
        if gradient is None:  # unused everywhere: the Reducer leaves it
            return None
        held = is_held(gradient) or (not self._views and is_shared(gradient))
        member.note_shape()
        member.gradient = gradient
        member.lazy = wrap(
            gradient,
            self.finish_all,
            member,
            member.lazy,
            by_parts=self._halves is not None,
        )
        parameter.grad = member.lazy
        if gradient.requires_grad:
            return f"the gradient of {member.name!r} requires gradients itself"
        if held:
            return (
                f"the program keeps the gradient of {member.name!r} over steps, and "
                "its reads can't be seen"
            )
        return None

    def _arrived(self) -> list[int]:
        finished = self._sender.is_finished
        return [i for i in self._unfinished if finished(self._schedules[i])]

    # Between backward and forward.

    def refuse(self, why: str) -> None:
        """Finish all for an optimizer's step that can't be deferred; say why."""
        self.show_gradients()
        if why:
            self.warn(why)

    def finish_ended(self) -> None:
        """Finish the buckets whose communication has ended."""
        if not self._poisons:
            with self._lock:
                for index in self._arrived():
                    self._finish((index,))

    def defer(self, update: DeferredUpdate, members: Iterable[BucketMember]) -> None:
        """Execute an optimizer's step on these members when they are finished."""
        with self._lock:
            found = [member for member in members if member.gradient is not None]
            # As after a step: a backward of an older graph must fail.
            torch.autograd.graph.increment_version([m.parameter for m in found])
            weakly: list[BucketMember] = []
            for member in found:
                self._unwatch(member)
                member.update = update
                states = member.states
                if self._poisons:
                    member.poison(states)
                self._pending[member] = None
                if not guard(member, states):
                    weakly.append(member)
            if self._module_hooks.changed():
                self._module_hooks.remove()
                self._module_hooks.build(m for row in self._members for m in row)
            self._module_hooks.install()
            for member in weakly:
                self.warn(
                    f"PyTorch refers weakly to parameter {member.name!r}, whose "
                    "readers can't be seen"
                )
                self.touch(member)

    # Norms before gradients. See Note [Clipping by parts] in `halves`.

    def norm_of(self, member: BucketMember) -> torch.Tensor | None:
        """Return the 2-norm of a gradient that nothing has written; finish nothing."""
        lazy = member.lazy
        if self._halves is None or lazy is None or lazy.target is None:
            return None
        gradient = lazy.target
        with self._lock, undisturbed():
            if lazy.finish is not None:
                if member.factors:
                    return None
            elif member.version != gradient._version:  # noqa: SLF001
                return None
            halves = self._halves
            self._marker.wait("all-reduce", halves.finish)
            dtype = gradient.dtype
            return torch.tensor(halves.norm(member), dtype=dtype, device="cpu")

    def scale(
        self, member: BucketMember, multiply: Callable[..., Any], factor: Any
    ) -> None:
        """Multiply a gradient in place, once it is complete."""
        lazy = member.lazy
        assert lazy is not None  # noqa: S101
        with self._lock, undisturbed():
            if lazy.finish is not None:
                if isinstance(factor, torch.Tensor):
                    factor = factor.detach().clone()
                member.factors.append((multiply, factor))
            else:
                self._write(member, lazy.target, [(multiply, factor)])

    def _write(
        self, member: BucketMember, gradient: Any, factors: Sequence[Any]
    ) -> None:
        """Multiply a complete gradient, after which only its own norm isn't known."""
        before = gradient._version  # noqa: SLF001
        for multiply, factor in factors:
            multiply(gradient, factor)
        member.version = None
        if self._views:  # gradients of a bucket have one version
            for other in self._members[member.bucket]:
                if other.version == before:
                    other.version = gradient._version  # noqa: SLF001

    def show_gradients(self) -> None:
        """Finish all, and put gradients in place of the wrappers that remain."""
        self.finish_all()
        self._put_back()

    def _put_back(self) -> None:
        """Put finished gradients in place of their wrappers."""
        if not self._wrapped:
            return
        with self._lock, undisturbed():
            for member in self._wrapped:
                lazy = member.lazy
                if lazy is not None:
                    if gradient_of(member) is lazy:
                        assign_gradient(member, lazy.target)
                    member.release_lazy()
            self._wrapped.clear()

    # Finish.

    def touch(self, member: BucketMember) -> None:
        """Finish a member's bucket, because something reads the member."""
        with self._lock:
            if self._in_forward:
                self._seen.add(member.name)
            self._unwatch(member)
            if member.update is not None:
                self._finish((member.bucket,))

    def finish_all(self, *, keep_hooks: bool = False) -> None:
        """Finish all buckets."""
        steps.show_hidden()
        with self._lock:
            if self._unfinished or self._pending:
                left = {m.bucket: None for m in self._pending}
                self._finish(tuple({**self._unfinished, **left}))
            if not keep_hooks and not self._watched:
                self._module_hooks.remove()

    def finish_for_thread(self) -> None:
        """Finish all, because a thread starts; it finds the usual parameters."""
        with self._lock:
            self.finish_all(keep_hooks=True)
            for member in list(self._watched):
                self._unwatch(member)

    def finish_to_compile(self) -> None:
        """Finish all, so that code is compiled for the parameters' usual class.

        Where that happens in many steps, compiled code outside of the model reads
        parameters: it would be compiled again in each step.
        """
        self.finish_all(keep_hooks=True)
        self._compilations.add(self._step)
        if self.armed and len(self._compilations) > COMPILATIONS:
            self.armed = False
            self.warn(
                "compiled functions read parameters outside of the model's forward"
            )

    def _finish(self, indices: Sequence[int]) -> None:
        """Wait for buckets and execute the steps on their members."""
        with undisturbed():
            try:
                for index in indices:
                    if index in self._unfinished:
                        self._use_the_wait(index)
                        self._receive(index)
            except BaseException:
                self._give_up()
                raise
            self._execute(
                [m for i in indices for m in self._members[i] if m.update is not None]
            )
        if not self._unfinished and not self._pending:
            raw_access.release(self)

    def _use_the_wait(self, index: int) -> None:
        """Execute steps of other buckets while one is under way."""
        if self._poisons or self._sender.is_finished(self._schedules[index]):
            return
        for other in self._arrived():
            if other in self._unfinished and other != index:
                self._receive(other)
                self._execute([m for m in self._members[other] if m.update is not None])

    def _receive(self, index: int) -> None:
        """Wait for a bucket and put its gradients back."""
        schedule = self._schedules[index]
        if self._sender.is_finished(schedule):
            self._sender.wait(schedule)
        else:
            self._marker.wait("all-reduce", lambda: self._sender.wait(schedule))
        sent = self._unfinished.pop(index)
        bucket = self._poisoned.pop(index, None)
        members = [m for m in self._members[index] if m.gradient is not None]
        with undisturbed():
            if self._halves is not None:
                self._halves.complete(index, sent)
            if bucket is not None:
                bucket.copy_(sent)
            if members and not self._views:
                views = self._views_of(index, sent)
                gradients: Any = [member.gradient for member in members]
                torch._foreach_copy_(gradients, [views[m.place] for m in members])
            if self._halves is not None:
                self._multiply(members)
            for member in members:
                if self._halves is not None and member.update is None:
                    self._stay_wrapped(member)
                    continue
                if gradient_of(member) is member.lazy:
                    assign_gradient(member, member.gradient)
                if member.update is None:
                    member.gradient = None
                member.release_lazy()

    def _multiply(self, members: Sequence[BucketMember]) -> None:
        """Multiply complete gradients by the program's factors."""
        for member in members:
            gradient: Any = member.gradient
            member.version = gradient._version  # noqa: SLF001
        for member in members:
            if member.factors:
                self._write(member, member.gradient, member.factors)
                member.factors = []

    def _stay_wrapped(self, member: BucketMember) -> None:
        """Keep the wrapper of a finished gradient, which answers for its norm.

        Otherwise a rank on which something reads a gradient would compute the norm
        itself, and clip by another factor than the others.
        """
        lazy = member.lazy
        member.gradient = None
        if lazy is not None:
            lazy.finish = lazy.member = None
            self._wrapped[member] = None

    def _views_of(self, index: int, sent: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a reduced bucket, whose memory rarely changes."""
        known = self._parts.get(index)
        address = sent.data_ptr()
        if known is None or known[0] != address:
            parts = [member.view_of(sent) for member in self._members[index]]
            known = self._parts[index] = (address, parts)
        return known[1]

    def _execute(self, members: Sequence[BucketMember]) -> None:
        """Execute the deferred steps on members whose gradients are complete."""
        by_update: dict[int, tuple[DeferredUpdate, list[BucketMember]]] = {}
        for member in members:
            assert member.update is not None  # noqa: S101
            found = by_update.setdefault(id(member.update), (member.update, []))
            found[1].append(member)
            exchange_back(member)
        try:
            for update, some in by_update.values():
                self._execute_one(update, some)
        finally:
            for member in members:
                self._end(member)

    def _execute_one(
        self, update: DeferredUpdate, members: Sequence[BucketMember]
    ) -> None:
        with undisturbed():
            now = [gradient_of(member) for member in members]
            for member in members:
                if member.aside:
                    member.heal()
                assign_gradient(member, member.gradient)
        try:
            update.execute(members)
        finally:
            with undisturbed():
                for member, gradient in zip(members, now, strict=True):
                    # Cleared, replaced or kept by the program in the meantime.
                    assign_gradient(member, gradient)

    def _end(self, member: BucketMember) -> None:
        """Forget what was pending for a member."""
        unguard(member)
        self._pending.pop(member, None)
        member.update = member.gradient = None
        member.states = []

    def _give_up(self) -> None:
        """After a failure, leave parameters and states as before the step."""
        with undisturbed():
            for index in self._unfinished:
                for member in self._members[index]:
                    if member.lazy is not None:
                        if member.parameter.grad is member.lazy:
                            member.parameter.grad = member.gradient
                        member.lazy.finish = member.lazy.member = None
                        member.lazy.part = None
                        member.lazy = None
                    member.factors = []
                    if member.update is None:
                        member.gradient = None
            for member in list(self._pending):
                member.heal()
                self._end(member)
        self._unfinished.clear()
        self._poisoned.clear()
        raw_access.release(self)

    # Forward.

    def begin_forward(self) -> None:
        """Finish what this forward could read unseen."""
        steps.show_hidden()
        self._put_back()
        self._in_forward = torch.is_grad_enabled()
        if not (self._unfinished or self._pending or self._watched):
            return
        if not torch.is_grad_enabled():
            self.finish_all()
            return
        self._module_hooks.install()
        self.enter()

    def enter(self) -> None:
        """Finish what no read has shown yet, as the model's forward begins."""
        if not self._pending:
            return
        with self._lock:
            unseen = [m for m in self._pending if m.name not in self._seen]
            buckets = dict.fromkeys(m.bucket for m in unseen)
            for member in self._module_hooks.at_entry:
                if member.update is not None:
                    buckets[member.bucket] = None
            if buckets:
                self._finish(tuple(buckets))
                at_entry = set(self._module_hooks.at_entry)
                self._watch([member for member in unseen if member not in at_entry])

    def end_forward(self) -> None:
        """Finish the rest; watch what was read by nothing."""
        self._in_forward = False
        if not (self._unfinished or self._pending or self._watched):
            return
        with self._lock:
            left = list(self._pending)
            self.finish_all()
            self._seen.difference_update(member.name for member in left)
            self._watch(left)
            self._module_hooks.remove()

    def _watch(self, members: Iterable[BucketMember]) -> None:
        if other_thread() is not None:
            return
        for member in members:
            if guard(member, []):
                self._watched[member] = None

    def _unwatch(self, member: BucketMember) -> None:
        if member in self._watched:
            del self._watched[member]
            unguard(member)

    def wait_at_exit(self) -> None:
        """Wait for what is under way, without any step."""
        with contextlib.suppress(Exception):  # a lost rank; nothing is left to do
            for index in list(self._unfinished):
                self._sender.wait(self._schedules[index])
            if self._halves is not None:
                self._halves.wait_at_exit()

    def release(self) -> None:
        """End this; whatever is pending is finished first."""
        if not self._members:
            return
        self.armed = False
        try:
            self.finish_all()
        except Exception:  # noqa: BLE001 - often called as a model is freed
            _log.exception("an optimizer's step on a released model was not executed")
        self._put_back()
        self._halves = None
        for member in list(self._watched):
            self._unwatch(member)
        self._module_hooks.remove()
        _live.discard(self)
        steps.detach(self)
        other_threads.detach(self)
        # Break the cycles, so that parameters and lanes are freed at once.
        for row in self._members:
            for member in row:
                member.twin = None
        self._members = ()
        self._parts.clear()
        self._module_hooks.clear()
        del self._sender


def wait_at_exit() -> None:
    """Wait for communication that is under way: other ranks need it to end."""
    for overlap in list(_live):
        overlap.wait_at_exit()


def _before_fork() -> None:
    """Finish everything: a child process has none of the threads that communicate."""
    for overlap in list(_live):
        try:
            overlap.finish_all()
        except Exception:  # noqa: BLE001 - the next forward raises it again
            _log.debug("a process forks after a failure", exc_info=True)


atexit.register(wait_at_exit)
os.register_at_fork(before=_before_fork)
