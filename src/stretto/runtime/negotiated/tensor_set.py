"""Tensors that every rank submits once per step, for instance all gradients."""

from __future__ import annotations

import abc
import dataclasses
import json
import threading
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import SpecError, StrettoError
from stretto.runtime import backends
from stretto.runtime.lanes import LanePool
from stretto.runtime.negotiated.pending import (
    ReducedTensor,
    Undelivered,
    writable,
)
from stretto.runtime.negotiated.reductions import dtype_of
from stretto.runtime.negotiated.requests import CollectiveKind, Request
from stretto.runtime.negotiated.stable_order import (
    BucketFailed,
    OrderWatch,
    StableOrder,
    common_order,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.runtime.negotiated.api import EngineOptions, Handle
    from stretto.runtime.negotiated.ledger import EndStep
    from stretto.runtime.negotiated.rounds import Control
    from stretto.runtime.ranks import Ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The result of a step, known to all ranks."""

    unused: frozenset[int]
    """Indices of members that no rank used."""

    whole: bool
    """Whether every rank's step was complete; see `TensorSet.abandon`."""


class AbstractControlLoop(abc.ABC):
    """The part of the engine's control loop that steps of a tensor set use."""

    ranks: Ranks

    options: EngineOptions

    @abc.abstractmethod
    def submit(
        self,
        rows: Sequence[tuple[Request, torch.Tensor | None, torch.Tensor | None]],
    ) -> list[Handle]:
        """Accept requests, all or none."""

    @abc.abstractmethod
    def submit_member(self, set_id: int, index: int) -> None:
        """Record that a tensor set's member is ready here."""

    @abc.abstractmethod
    def vote(self, set_id: int, *, in_order: bool, whole: bool, unused: int) -> None:
        """Record that all of a tensor set's members are submitted here."""

    @abc.abstractmethod
    def use_device(self, place: str, device: torch.device) -> None:
        """Require that a request's device is the one that this rank uses."""

    @abc.abstractmethod
    def report(self, place: str, cause: BaseException) -> StrettoError:
        """Return the engine's one error, after a failure of its communication."""


@final
class TensorSet:
    """Tensors reduced in place, once per step: submit every one, then wait.

    While ranks submit in orders that change, readiness is negotiated as for any
    request. When every rank's order has been the same for some steps, it is the stable
    order, and buckets leave without negotiation. When some rank's order changes, all
    ranks leave the stable order at the same step. The results are the same either way.
    """

    def __init__(self, engine: object, steps: SetSteps, names: Sequence[str]) -> None:
        # This reference keeps the engine open; its own threads must not.
        self._engine = engine
        self._steps = steps
        member_of = {request.name: i for i, request in enumerate(steps.members)}
        self._member_of = [member_of[name] for name in names]
        self._index_of = {m: i for i, m in enumerate(self._member_of)}

    def __len__(self) -> int:
        """Number of members."""
        return len(self._member_of)

    @property
    def in_stable_order(self) -> bool:
        """Whether buckets leave in a stable order now."""
        return self._steps.stable is not None

    def submitter(self, index: int) -> Callable[..., None]:
        """Return `submit` for one member, with all look-ups done."""
        return partial(self._steps.submit, self._member_of[index])

    def submit(self, index: int, tensor: torch.Tensor, *, used: bool = True) -> None:
        """Submit the member at ``index`` of the registered requests.

        The result replaces the tensor's values; do not touch it before `wait` has
        returned. ``used=False`` marks zeros that stand for a missing value.

        Raises:
            SpecError: it was already submitted in this step, or differs from its
                registration.
            CommTimeout: a rank is lost.
        """
        self._steps.submit(self._member_of[index], tensor, used=used)

    def missing(self) -> list[int]:
        """Return the indices not yet submitted in this step."""
        return sorted(self._index_of[m] for m in self._steps.missing())

    def wait(self) -> StepEnd:
        """End the step: sleep until all members are reduced on this rank.

        Raises:
            SpecError: some members are not submitted yet; the message names one.
            CommTimeout: a rank is lost.
        """
        unused, whole = self._steps.wait()
        indices = frozenset(self._index_of[m] for m in unused)
        return StepEnd(unused=indices, whole=whole)

    def abandon(self) -> None:
        """End a step that an error cut short, with zeros for the missing members.

        All ranks see it in `StepEnd.whole`. It takes part in one step of the others,
        even if nothing was submitted yet.
        """
        self._steps.abandon()

    def close(self) -> None:
        """End the set; every rank must call it, between steps."""
        self._steps.close()


@final
class SetSteps:
    """The steps of one tensor set on this rank."""

    def __init__(
        self, loop: AbstractControlLoop, set_id: int, request: Request
    ) -> None:
        self.members = request.members
        self._dtypes = [dtype_of(member) for member in request.members]
        self.place = f"a step of {request.name}"
        self.stall_warnings = 0
        self.waits_since_s = 0.0
        self.stable: StableOrder | None = None
        self._loop = loop
        self._id = set_id
        self._name = request.name
        # NCCL needs one launch order for all its communicators. Buckets of a stable
        # order are not ordered with others, so they are not supported on it.
        on_cpu = all(member.device == "cpu" for member in self.members)
        self._watch = OrderWatch(loop.options.stable_steps if on_cpu else 0)
        self._pool: LanePool | None = None
        self._built_order: StableOrder | None = None
        self._next_stable: StableOrder | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: StrettoError | None = None
        self._reset()

    def _reset(self) -> None:
        self._tensors: list[torch.Tensor | None] = [None] * len(self.members)
        self._order: list[int] = []
        self._unused = 0
        self._left = len(self.members)
        self._events: tuple[Any, ...] = ()
        self._cuda_events: dict[int, Any] = {}
        self._result: tuple[list[int], bool] | None = None
        self._whole = True
        self.waits = False
        """Whether it is submitted here, and perhaps not on other ranks."""
        self.is_launched = False
        """Whether it is submitted on all ranks, and has not ended here."""
        self._ended.clear()

    # Called by users' threads.

    def submit(self, member: int, tensor: torch.Tensor, *, used: bool = True) -> None:
        """Accept a member's tensor."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._tensors[member] is not None:
                raise SpecError(
                    f"{self.members[member].place} was submitted twice in "
                    f"{self.place}: call wait() between two steps."
                )
            self._check(member, tensor)
            if tensor.is_inference():
                tensor = writable(tensor)
            self._tensors[member] = tensor
            self._order.append(member)
            if not used:
                self._unused |= 1 << member
            stable = self.stable
            failed: Exception | None = None
            if stable is not None:
                try:
                    stable.submit(member, tensor)
                except Exception as exc:  # noqa: BLE001
                    failed = exc
            elif tensor.is_cuda:
                self._loop.use_device(self.members[member].place, tensor.device)
                event = self._cuda_events[member] = torch.cuda.Event()
                event.record(torch.cuda.current_stream(tensor.device))
            complete = len(self._order) == len(self.members)
        if stable is None:
            self._loop.submit_member(self._id, member)
        elif failed is not None:
            raise self._failed(failed)
        if complete:
            self._vote()

    def _check(self, member: int, tensor: torch.Tensor) -> None:
        request = self.members[member]
        if (
            tensor.shape != request.shape
            or tensor.dtype is not self._dtypes[member]
            or tensor.layout is not torch.strided
            or tensor.device.type != request.device
        ):
            raise SpecError(
                f"{request.place} of {self._name} is registered as a dense "
                f"{request.dtype} tensor on {request.device} of shape "
                f"{list(request.shape)}, got "
                f"{tensor.layout} {tensor.dtype} on {tensor.device.type} of shape "
                f"{list(tensor.shape)}"
            )

    def _vote(self) -> None:
        in_order = self._watch.end_step(self._order, in_use=self.stable is not None)
        self.waits_since_s = perf_counter()
        self.stall_warnings = 0
        self.waits = True
        self._loop.vote(
            self._id, in_order=in_order, whole=self._whole, unused=self._unused
        )

    def missing(self) -> list[int]:
        """Return the members not yet submitted in this step."""
        return [m for m, tensor in enumerate(self._tensors) if tensor is None]

    def wait(self) -> tuple[list[int], bool]:
        """End the step; return the members no rank used, and whether it was whole."""
        missing = self.missing()
        if missing:
            if self._error is not None:
                raise self._error
            raise SpecError(
                f"wait() was called before all of {self._name} were submitted: "
                f"{self.members[missing[0]].name!r} and {len(missing) - 1} more are "
                "missing. Submit zeros for missing values, with used=False."
            )
        stable = self.stable
        if stable is not None:
            self._finish(stable)
        self._ended.wait()
        if self._error is not None:
            raise self._error
        for event in self._events:
            torch.cuda.current_stream(event.device).wait_event(event)
        if self._result is None:
            raise AssertionError(f"{self.place} ended without a result")
        result = self._result
        self.stable = self._next_stable
        self._reset()
        return result

    def _finish(self, stable: StableOrder) -> None:
        try:
            stable.finish()
        except Exception as exc:
            raise self._failed(exc) from exc

    def _failed(self, error: Exception) -> StrettoError:
        """Return the engine's one error after a failure in a stable order."""
        if isinstance(error, BucketFailed):
            return self._loop.report(str(error), error.__cause__ or error)
        return self._undelivered(Undelivered(self.place, error))

    def _undelivered(self, error: Undelivered) -> StrettoError:
        # This rank can't continue to the next step, so the others can't either.
        ranks = self._loop.ranks
        reported = StrettoError(f"{ranks.name(ranks.rank)}: {error}")
        reported.__cause__ = error.__cause__
        return self._loop.report(self.place, reported)

    def abandon(self) -> None:
        """End a step that was cut short."""
        self._whole = False
        for member in self.missing():
            self.submit(member, self._zeros(member), used=False)
        self.wait()

    def _zeros(self, member: int) -> torch.Tensor:
        request = self.members[member]
        dtype = getattr(torch, request.dtype)
        return torch.zeros(request.shape, dtype=dtype, device=request.device)

    def require_between_steps(self, what: str) -> None:
        """Require that no step is partly submitted."""
        if self._order:
            raise SpecError(
                f"{what} was called within {self.place}: {len(self._order)} of "
                f"{len(self.members)} members are submitted. Call wait() for it first."
            )

    def close(self) -> None:
        """End the set on all ranks."""
        self.require_between_steps("close()")
        request = Request(
            name=f"end of {self._name}",
            kind=CollectiveKind.UNREGISTER,
            shape=(self._id,),
        )
        self._loop.submit([(request, None, None)])[0].wait()

    # The control thread.

    def ready_tensors(self, members: Sequence[int]) -> list[ReducedTensor]:
        """Return the tensors of members that are ready on all ranks."""
        found = []
        for member in members:
            request, tensor = self.members[member], self._tensors[member]
            if tensor is None:  # this rank has joined
                found.append(ReducedTensor(request, None, None, _ignore))
                continue
            event = self._cuda_events.get(member)
            tensor = tensor.detach()
            end = self._member_ended
            found.append(ReducedTensor(request, tensor, tensor, end, event))
        return found

    def _member_ended(
        self, error: StrettoError | None, events: tuple[Any, ...]
    ) -> None:
        if isinstance(error, Undelivered):
            error = self._undelivered(error)
        with self._lock:
            if error is not None:
                self._error = error
            self._events += events
            self._left -= 1
            if self._error is not None or (not self._left and self._result):
                self._ended.set()

    def end_step(self, decision: EndStep, control: Control) -> None:
        """Handle that every rank has submitted all; choose the next step's order."""
        took_part = len(self._order) == len(self.members)
        stable = self.stable
        if stable is not None and not took_part:  # this rank has joined
            for member in range(len(self.members)):
                stable.submit(member, self._zeros(member))
            stable.finish()
        following = stable
        if stable is not None and not decision.in_order:
            following = None
        elif stable is None and decision.in_order:
            following = self._new_stable_order(control)
        unused = [m for m in range(len(self.members)) if decision.unused >> m & 1]
        with self._lock:
            if stable is not None:
                self._left = 0
            # This step ends in its own order; wait() changes it.
            self._next_stable = following
            self._result = (unused, decision.whole)
            self.waits, self.is_launched = False, took_part
            if not took_part:
                self.stable = following
                self._reset()
            elif not self._left:
                self._ended.set()

    def _new_stable_order(self, control: Control) -> StableOrder:
        """Return the order of all ranks from the next step on, in a round."""
        count = len(self.members)
        room = count * (len(str(count)) + 2) + 2
        mine = json.dumps(list(self._watch.order)).encode()
        order = common_order([json.loads(row) for row in control.exchange(mine, room)])
        if self._built_order is not None and self._built_order.order == order:
            return self._built_order
        loop = self._loop
        if self._pool is None:
            store = PrefixStore(f"set/{self._id}", loop.ranks.store)
            self._pool = LanePool(
                dataclasses.replace(loop.ranks, store=store),
                serial=0,
                backend=backends.ON_HOST,
                device=torch.device("cpu"),
            )
        lanes = self._pool.open([(i, None) for i in range(loop.options.lanes)])
        self._built_order = StableOrder(
            self.members,
            order,
            unit_bytes=loop.options.unit_bytes,
            lanes=lanes,
            size=loop.ranks.size,
        )
        return self._built_order

    # Ending.

    def fail(self, error: StrettoError) -> None:
        """End the step with an error, and every later step."""
        with self._lock:
            self._error = self._error or error
            self._ended.set()

    def abort(self) -> None:
        """End every connection."""
        if self._pool is not None:
            self._pool.abort()

    def release(self) -> None:
        """Release the lanes."""
        self.stable = self._built_order = None
        if self._pool is not None:
            self._pool.close()


def _ignore(error: StrettoError | None, events: tuple[Any, ...]) -> None:
    """Ignore the end of a joined rank's zeros: there is no handle for them."""
