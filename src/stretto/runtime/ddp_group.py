"""Run DDP's own buckets, with the same error for a lost rank as with a plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.autograd_engine import graph_task_id, queue_callback
from stretto.runtime.launch import Launched, done
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.foreground_marks import StepMarker
    from stretto.runtime.failure import FailureReporter
    from stretto.runtime.nan_check import NanCheck

_PLACE = "the all-reduce of a bucket of DDP's"


@final
class WatchedGroup(dist.ProcessGroup):
    """The process group of a Reducer that keeps DDP's rule.

    Every collective uses the model's own group, as with DDP. On Gloo this group waits
    for the works of a backward just before the Reducer does, so that a failure raises
    the one error of a `FailureReporter` rather than an address and a closed connection.
    """

    def __init__(
        self,
        *,
        base: dist.ProcessGroup,
        device: torch.device,
        failures: FailureReporter,
        marker: StepMarker,
        kind: Any,
        waits: bool = True,
        numerics: NanCheck | None = None,
        buckets: list[list[int]] | None = None,
        rebuilt: Callable[[], Callable[[list[list[int]]], None] | None] | None = None,
        reduced: Callable[[], Callable[[], None] | None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            base: The model's own group.
            device: The device of its gradients.
            failures: Reports a failure.
            marker: Marks the model's steps for a background.
            kind: The type of ``base``'s backend for that device.
            waits: Whether failures are found before the Reducer's end.
            numerics: Checks gradients.
            buckets: The Reducer's buckets, if they are known; positions in DDP's list
                of parameters.
            rebuilt: A weak reference to a callback for the buckets that DDP rebuilds.
            reduced: A weak reference to a callback for the end of each reduced
                backward.
        """
        # Only this form of the constructor lets C++ call the methods below.
        super().__init__(base.rank(), base.size())  # type: ignore[call-arg]
        self._register_backend(device, kind, base._get_backend(device))  # noqa: SLF001
        self._set_default_backend(kind)
        self._base = base
        self._failures = failures
        self._marker = marker
        self._waits = waits
        self._numerics = numerics
        self._buckets = buckets
        self._rebuilt = rebuilt
        self._reduced = reduced
        self._order: list[int] | None = None
        self._task = -1
        self._native = False
        self._works: list[Any] = []

    @without_dynamo
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Launch a bucket on the model's own group."""
        if self._native:
            return self._base.allreduce(tensors, opts)
        task = graph_task_id()
        if task == -1:  # a rank that has joined: no backward would raise
            if not self._waits:
                return self._base.allreduce(tensors, opts)
            future = self._base.allreduce(tensors, opts).get_future()
            return Launched(
                future.then(partial(_pass_through, self._failures, tensors))
            )
        if task != self._task:
            # The first bucket of a backward. A callback queued here runs before the
            # Reducer's own callback, which it queues after its last bucket.
            self._task = task
            self._works.clear()
            queue_callback(self._before_finalize)
        if self._numerics is not None:
            self._numerics.launching(tensors[0])
        if not self._waits:
            return self._base.allreduce(tensors, opts)
        try:
            work = self._base.allreduce(tensors, opts)
        except RuntimeError as exc:
            raise self._failures.report(_PLACE, exc) from exc
        self._works.append(work)
        return work

    @without_dynamo
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Answer with known buckets, or ask the model's own group and record them.

        The Reducer broadcasts once, when it rebuilds its buckets: all parameter
        indices with the number of buckets, then each bucket's number of parameters.
        """
        if self._buckets is not None:
            first = self._order is None
            flat = [i for bucket in self._buckets for i in bucket]
            self._order = flat if first else None
            sizes = [len(bucket) for bucket in self._buckets]
            wanted = [*flat, len(sizes)] if first else sizes
            with torch.no_grad():
                # Set the device explicitly: the script may have set another default.
                tensors[0].copy_(torch.tensor(wanted, dtype=torch.int64, device="cpu"))
            return Launched(done(tensors))
        work = self._base.broadcast(tensors, opts)
        if work is not None:
            self._failures.wait(work, "the agreement on DDP's buckets")
        values = [int(value) for value in tensors[0].tolist()]
        if self._order is None:
            self._order = values[:-1]
            return work
        order, self._order = iter(self._order), None
        buckets = [[next(order) for _ in range(size)] for size in values]
        note = None if self._rebuilt is None else self._rebuilt()
        if note is not None:
            note(buckets)
        return work

    def begin_forward(self, *, reduces: bool) -> None:
        """Raise the last step's error, if any; with ``reduces`` start a step."""
        if self._failures.error is not None:
            raise self._failures.error
        if reduces and self._numerics is not None:
            self._numerics.begin_step()

    def pass_through(self) -> None:
        """Return the works of the model's own group, as DDP's C++ hooks need them."""
        self._native = True

    @without_dynamo
    def _before_finalize(self) -> None:
        if self._works:
            self._marker.wait("all-reduce", self._await_works)
        self._marker.end_step()
        if self._numerics is not None:
            self._numerics.reduced()
        # Behind the Reducer's callback, which was queued after this one.
        queue_callback(self._after_finalize)

    def _await_works(self) -> None:
        works = self._works[:]
        self._works.clear()
        for work in works:
            self._failures.wait(work, _PLACE)

    @without_dynamo
    def _after_finalize(self) -> None:
        call = None if self._reduced is None else self._reduced()
        if call is not None:
            call()


def _pass_through(
    failures: FailureReporter, tensors: list[torch.Tensor], ended: Any
) -> list[torch.Tensor]:
    # Holds no group: see Note [Callbacks hold no group].
    try:
        ended.value()
    except RuntimeError as exc:
        raise failures.report(_PLACE, exc) from exc
    return tensors
