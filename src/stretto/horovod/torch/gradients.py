"""Reduce gradients: hooks on parameters, and the wait for the results."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from stretto.background.named_device import open_named
from stretto.errors import RankDisagreement, SpecError, StrettoError
from stretto.foreground_marks import StepMarker
from stretto.horovod import timeline, world
from stretto.horovod.exceptions import HorovodInternalError
from stretto.horovod.reduce_ops import ENGINE_OPS, Average, ReduceOp
from stretto.horovod.torch.compression import FP16Compressor, NoneCompressor
from stretto.horovod.torch.sparse import sparse_allreduce_async
from stretto.horovod.world import UsedOptimizer
from stretto.runtime.negotiated import CollectiveKind, Op, request_of
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stretto.horovod.process_sets import ProcessSet
    from stretto.runtime.negotiated import Engine, Request, TensorSet

_created = itertools.count()

_all: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def discard_gradients() -> None:
    """Begin a step again in all distributed optimizers, without gradients.

    What a lost step has left in them is no part of a state that is restored, and other
    ranks do not have it.
    """
    for reducer in tuple(_all):
        reducer.discard()


# Note [Names of gradients]
# A gradient has its parameter's name, as in Horovod. Optimizers that have a name in
# common are numbered in the order in which they first send a gradient. That order is
# the same on all ranks, since sending is collective, but the order of creation may not
# be: a rank may create an optimizer that it never uses, or may have failed before it
# used one. Numbers begin at 0 again with each init(), and with each join(), before
# which some ranks may have used fewer. If ranks use such optimizers in different
# orders, each request's ``owner`` shows it.


@final
class GradientReducer:
    """Sends each gradient when it is ready; `synchronize` copies results into place.

    The first step's gradients are separate requests, because only then is it known
    which are sparse. After that the dense ones are a tensor set, unless a user's
    compressor may return other shapes in every step.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, torch.Tensor]],
        *,
        compression: Any,
        passes: int,
        op: ReduceOp,
        predivide: float,
        groups: Sequence[Sequence[int]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.passes = passes
        self._process_set = process_set
        world.current()  # raises if init() was not called
        open_named()
        self._active = bool(process_set.included()) and (process_set.size() or 0) > 1
        self._changes_ranks = world.changes_ranks()
        self._created = next(_created)
        self._used = UsedOptimizer(self._created, frozenset(), 0)
        self._owner = ""
        self._names = [name for name, _ in names]
        self._parameters = [parameter for _, parameter in names]
        self._compression = compression
        self._op = op
        self._scales = {}
        if op is Average and predivide != 1.0:
            self._scales = {"prescale": 1.0 / predivide, "postscale": predivide}
        self._sparse_as_dense = sparse_as_dense
        self._group_of = {i: tuple(group) for group in groups for i in group}
        self._keeps_shape = compression in (NoneCompressor, FP16Compressor)
        self._engine: Engine | None = None
        self._sets: list[TensorSet] = []
        self._member_of: dict[int, tuple[TensorSet, int]] = {}
        self._requests: dict[int, Request] = {}
        self._layouts_known: set[int] = set()
        self._sparse_dims: dict[int, int] = {}
        """Sparse dimensions of the gradients that are sparse on any rank."""
        self._hooked: set[int] = set()
        self._hooks: list[Any] = []
        self._marker = StepMarker()
        self._begin()
        weakref.finalize(self, _remove, self._hooks)
        _all.add(self)
        if self._active or self._changes_ranks:
            self._hook()

    @property
    def under_way(self) -> bool:
        """Whether gradients became ready since the last step."""
        return self._came

    def discard(self) -> None:
        """Begin a step again, without gradients, and count steps with other ranks."""
        self._begin()
        self._marker = StepMarker()
        for parameter in self._parameters:
            parameter.grad = None

    def _is_active(self) -> bool:
        """Return whether other ranks have gradients, too.

        Raises:
            ValueError: the process set ended when the job's ranks changed.
        """
        if self._changes_ranks:
            process_set = self._process_set
            if process_set.included() is not False:
                world.current().member(process_set)
            self._active = bool(process_set.included()) and (
                (process_set.size() or 0) > 1
            )
        return self._active

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.passes = passes
        self._left = [passes] * len(self._parameters)

    def _begin(self) -> None:
        self._marker.end_step()
        self._came = False
        self._left = [self.passes] * len(self._parameters)
        self._sent: dict[int, Callable[[], torch.Tensor]] = {}
        self._contexts: dict[int, Any] = {}
        self._since_s: dict[int, float] = {}

    def _hook(self) -> None:
        """Hook all parameters that need a gradient and have no hook."""
        for i, parameter in enumerate(self._parameters):
            if i not in self._hooked and parameter.requires_grad:
                self._hooked.add(i)
                # Weak: a parameter outlives its optimizer.
                hook = partial(_on_gradient, weakref.ref(self), i)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    # During backward.

    def on_gradient(self, i: int) -> None:
        """Record that parameter ``i`` has a gradient."""
        if not self._came and not self._is_active():
            return
        if self._left[i] <= 0:
            raise AssertionError(
                f"the gradient of {self._names[i]} was computed more often than "
                f"backward_passes_per_step = {self.passes} times before step(). Call "
                "step() or synchronize() after that many passes, or increase it."
            )
        gradient = self._parameters[i].grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {self._names[i]} needs a gradient itself "
                "(create_graph=True), which can't be reduced in place. Use "
                "torch.autograd.grad for it."
            )
        if not self._came:
            self._require_engine()
            self._came = True
            self._marker.begin_step()
        self._left[i] -= 1
        if self._left[i]:
            return
        group = self._group_of.get(i)
        if group is None:
            self._send(i)
        elif not any(self._left[j] for j in group):
            for j in group:
                self._send(j)

    def _send(self, i: int) -> None:
        parameter = self._parameters[i]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        gradient = parameter.grad
        if gradient.is_sparse:
            if self._sparse_as_dense or i in self._member_of:
                self._sparse_dims[i] = gradient.sparse_dim()
                gradient = gradient.to_dense()
            else:
                self._send_sparse(i, gradient)
                return
        elif not gradient.is_contiguous() and 0 in gradient.stride():
            # Expanded: its elements share memory, and results must not.
            gradient = parameter.grad = gradient.contiguous()
        tensor, self._contexts[i] = self._compression.compress(gradient.detach())
        member = self._member_of.get(i)
        try:
            if member is not None:
                member[0].submit(member[1], tensor)
                self._sent[i] = partial(_itself, tensor)
                if timeline.recording() and member[0].in_stable_order:
                    self._since_s[i] = perf_counter()
                return
            request = self._request(i, tensor)
            engine = self._require_engine()
            handle = engine.submit(request, tensor, tensor)
        except StrettoError as exc:
            _raise_as_horovod(exc)
        self._requests[i] = request
        self._sent[i] = partial(_waited, handle)

    def _request(self, i: int, tensor: torch.Tensor) -> Request:
        number = self._number()
        more = f".{number}" if number else ""
        return request_of(
            f"allreduce.{self._names[i]}{more}",
            CollectiveKind.ALLREDUCE,
            tensor,
            op=ENGINE_OPS[self._op],
            owner=self._owner,
            **self._scales,
        )

    def _number(self) -> int:
        """Return this optimizer's number: see Note [Names of gradients]."""
        member = world.current().member(self._process_set)
        with member.lock:
            if self._used not in member.optimizers:
                names = frozenset(self._names)
                like = [used for used in member.optimizers if used.names & names]
                number = max((used.number + 1 for used in like), default=0)
                self._used = UsedOptimizer(self._created, names, number)
                member.optimizers.append(self._used)
                earlier = sum(used.created < self._created for used in like)
                self._owner = (
                    f"optimizer {earlier + 1} of {len(like) + 1} in order of creation"
                    if like
                    else ""
                )
            return self._used.number

    def _label(self) -> str:
        """Return a name that no other optimizer has."""
        return f"{self._names[0]}.{self._number()}"

    def _send_sparse(self, i: int, gradient: torch.Tensor) -> None:
        name = f"sparse.{self._number()}.{self._names[i]}"
        self._sent[i] = sparse_allreduce_async(
            gradient, name=name, op=self._op, process_set=self._process_set
        )

    def _require_engine(self) -> Engine:
        """Return the process set's current engine; a later init() opens another."""
        engine = _engine(self._process_set)
        if engine is not self._engine:
            self._engine = engine
            self._sets, self._member_of = [], {}
            # The set's other ranks may be new and know none of these.
            self._requests, self._sparse_dims = {}, {}
            self._layouts_known = set()
        return engine

    # After backward.

    def synchronize(self, groups: Iterable[dict[str, Any]]) -> None:
        """Send the missing gradients, wait, and copy results into place.

        ``groups`` are the optimizer's, to which parameters may have been added.
        """
        self._marker.begin_step()  # unless a gradient has begun it
        if not self._is_active():
            self._marker.end_step()
            return
        self._find_added(groups)
        self._hook()
        self._require_engine()
        error: StrettoError | None = None
        try:
            for i in sorted(self._hooked - self._sent.keys()):
                self._send(i)
        except StrettoError as exc:
            error = exc
        if error is None:
            error = self._finish()
        self._begin()
        if error is not None:
            _raise_as_horovod(error)
        self._register()

    def abandon(self, groups: Iterable[dict[str, Any]]) -> None:
        """End a partly submitted step on all ranks; after `shutdown`, drop it."""
        if not world.is_initialized() or self._engine is not _engine(self._process_set):
            self._begin()
            return
        with contextlib.suppress(StrettoError):
            self.synchronize(groups)

    def _share_layouts(self) -> StrettoError | None:
        """Learn which gradients are sparse on any rank; those come back sparse.

        A rank whose batch does not touch an embedding has no gradient that shows it.
        This is needed once per set of new gradients, which is the same on all ranks.
        """
        new = [i for i in sorted(self._requests) if i not in self._layouts_known]
        if not self._sparse_as_dense or not new:
            return None
        dims = [self._sparse_dims.get(i, 0) for i in new]
        # A sum, so that ranks that have joined contribute zeros.
        both = torch.tensor([dims, [int(dim > 0) for dim in dims]])
        name = f"sparse_dims.{self._label()}.{len(self._layouts_known)}"
        request = request_of(name, CollectiveKind.ALLREDUCE, both, op=Op.SUM)
        try:
            self._require_engine().submit(request, both, both).wait()
        except StrettoError as exc:
            return exc
        self._layouts_known.update(new)
        sums, counts = both.tolist()
        for i, total, count in zip(new, sums, counts, strict=True):
            if count:
                self._sparse_dims[i] = total // count
        return None

    def _finish(self) -> StrettoError | None:
        """Wait for the results and put them into place; return the first error."""
        results: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            error = self._marker.wait("all-reduce", partial(self._await, results))
            for i, result in results.items():
                self._put(i, result)
        return error

    def _await(self, results: dict[int, torch.Tensor]) -> StrettoError | None:
        """Wait for all results, even after a failure; return the first error."""
        error = self._share_layouts()
        if error is not None:
            return error
        for tensor_set in self._sets:
            try:
                tensor_set.wait()
            except StrettoError as exc:
                error = error or exc
        # In a stable order nothing is negotiated, and the engine reports no spans.
        for i, since_s in self._since_s.items():
            name = self._requests[i].name
            timeline.add_span(
                name, CollectiveKind.ALLREDUCE.value, since_s, perf_counter()
            )
        for i, result_of in self._sent.items():
            try:
                results[i] = result_of()
            except StrettoError as exc:
                error = error or exc
        return error

    def _put(self, i: int, result: torch.Tensor) -> None:
        parameter = self._parameters[i]
        if i in self._contexts:
            result = self._compression.decompress(result, self._contexts[i])
        gradient = parameter.grad
        sparse_dim = self._sparse_dims.get(i)
        if sparse_dim is not None and not result.is_sparse:
            # Some optimizers accept only sparse gradients, such as SparseAdam.
            parameter.grad = result.to_sparse(sparse_dim)
        elif gradient is None or gradient.is_sparse or result.shape != gradient.shape:
            parameter.grad = result
        elif result.data_ptr() != gradient.data_ptr():
            gradient.copy_(result)

    def _find_added(self, groups: Iterable[dict[str, Any]]) -> None:
        known = {id(parameter) for parameter in self._parameters}
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    self._names.append(f"{self._names[0]}.added.{number}.{place}")
                    self._parameters.append(parameter)
                    self._left.append(self.passes)

    def _register(self) -> None:
        """Create a tensor set of the dense gradients that are in no set yet."""
        new = [i for i in sorted(self._requests) if i not in self._member_of]
        if not new or not self._keeps_shape:
            return
        engine = self._require_engine()
        name = f"gradients.{self._label()}.{len(self._sets)}"
        try:
            tensor_set = engine.register(name, [self._requests[i] for i in new])
        except RankDisagreement as exc:
            # A rank that has already joined can't take part in a registration: the next
            # step tries again. The engine has no other error type for it.
            if "ranks have joined" in str(exc):
                return
            _raise_as_horovod(exc)
        except StrettoError as exc:
            _raise_as_horovod(exc)
        self._sets.append(tensor_set)
        for place, i in enumerate(new):
            self._member_of[i] = (tensor_set, place)


@without_dynamo
def _on_gradient(
    reducer: weakref.ref[GradientReducer], i: int, _parameter: torch.Tensor
) -> None:
    found = reducer()
    if found is not None:
        found.on_gradient(i)


def _engine(process_set: ProcessSet) -> Engine:
    return world.current().member(process_set).engine


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _raise_as_horovod(error: StrettoError) -> NoReturn:
    """Raise Horovod's error type; an error that scripts catch stays the same."""
    if isinstance(error, SpecError | HorovodInternalError):
        raise error
    raise HorovodInternalError(str(error)) from error


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _waited(handle: Any) -> torch.Tensor:
    result: torch.Tensor = handle.wait()
    return result
