"""The backward of a burst model on one rank, from its first gradient to its last.

# Note [Forwards that wait for their backward]
Other forwards may run before a forward's backward, with other shares of the batch and
other parameters frozen. So each output refers to its own forward. A backward belongs to
the forward of the first output that it reaches: the one computed last, on every rank. A
gradient that reaches a parameter directly may arrive earlier, and waits for that
output. Outputs that one backward can't treat equally are refused, from what all ranks
know.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.burst import torch_calls
from stretto.burst.boundary import require_values
from stretto.burst.captures import Trained
from stretto.burst.gradient_sync import GradientSync
from stretto.burst.reach import Reached
from stretto.burst.refusals import text_of
from stretto.burst.shadows import MODEL_GONE
from stretto.burst.tracing.packing import PackedResults
from stretto.burst.tracing.proven import Proven
from stretto.errors import StrettoError
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stretto.burst.activation_transfer import ActivationTransfer
    from stretto.burst.checks.backward_use import BackwardUse
    from stretto.burst.checks.changes import Changes
    from stretto.burst.checks.hook_use import HookUse
    from stretto.burst.checks.optimizer_use import OptimizerUse
    from stretto.burst.checks.stale_guard import StaleParameterGuard
    from stretto.burst.ownership import Ownership
    from stretto.burst.rank_groups import RankGroups
    from stretto.burst.timings import StepClock, Timings
    from stretto.burst.torch_seam import TorchSeam
    from stretto.burst.tracing.watching import Watch

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndedForward:
    """The record of a forward that backward needs."""

    results: PackedResults | None
    """The results of its outputs; ``None`` if backward reached none."""

    shares: tuple[float, ...]
    """Each rank's part of the global batch."""

    trained: Trained

    sync: GradientSync
    """Sends the gradients of these parameters."""

    plan: int
    """Number of the plan that it followed."""

    proven: Proven | None
    """The check of its layers, with what their backward reads."""

    is_hooked: bool
    """Whether some rank had hooks on parameters, so that gradients are sent in
    `no_sync` too."""


@final
class BackwardPass:
    """Receives gradients from autograd, and hands them to their senders.

    Args:
        rank_groups: the model's connections.
        ownership: which rank runs which parameter.
        seam: the model, for `torch_calls`.
        activations: moves samples between ranks.
        stale_guard: learns that parameters are about to change.
        changes: what the program does to gradients.
        uses: how optimizers use gradients.
        backwards: the backward passes that ranks compare.
        hooks: the program's hooks on parameters.
        timings: of steps that are measured.
        clock: the model's.
        device: of the parameters.
    """

    def __init__(
        self,
        *,
        rank_groups: RankGroups,
        ownership: Ownership,
        seam: TorchSeam,
        activations: ActivationTransfer,
        stale_guard: StaleParameterGuard,
        changes: Changes,
        uses: OptimizerUse,
        backwards: BackwardUse,
        hooks: HookUse,
        timings: Timings,
        clock: StepClock,
        device: torch.device,
    ) -> None:
        self._rank_groups = rank_groups
        self._ownership = ownership
        self._seam = seam
        self._activations = activations
        self._stale_guard = stale_guard
        self._changes = changes
        self._uses = uses
        self._backwards = backwards
        self._hooks = hooks
        self._timings = timings
        self._clock = clock
        self._device = device
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._queued = False
        self._handles: list[Any] = []
        self._left_over: list[tuple[str, nn.Parameter, Tensor]] = []
        size = rank_groups.ranks.size
        self._last_shares: tuple[float, ...] = (1 / size,) * size
        """Shares of the batch in the last forward."""
        self._plan = 0
        self._trained: Trained = ()
        self._running: EndedForward | None = None
        """See Note [Forwards that wait for their backward]."""
        self._direct: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients of the loss's own use of parameters, before the first output."""
        self._has_direct = False
        self._is_sent_early = False
        """Whether the backward that runs is in `no_sync`, and sends for its hooks."""
        self.sync: GradientSync | None = None
        """Sends the gradients of the parameters that are trained now."""
        self.reached = Reached(())
        seam.backward_failed = weakref.WeakMethod(self.failed)
        seam.why_unsent = weakref.WeakMethod(self.why_unsent)

    def follow(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Expect gradients of a model's parameters, which may be a later plan's."""
        self._plan += 1
        self._parameters = tuple(p for _, p in parameters)
        self.reached = Reached(parameters)
        self._backwards.follow(name for name, _ in parameters)
        for handle in self._handles:
            handle.remove()
        # Also of frozen parameters: a forward may wait while they are unfrozen.
        self._handles = [
            handle
            for parameter in self._parameters
            if (handle := _hooked(parameter, _DirectHook(self, parameter))) is not None
        ]

    def note_left_over(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Record the gradients from before the model was set up."""
        self._left_over = [
            (name, p, p.grad) for name, p in parameters if p.grad is not None
        ]

    def use(self, sync: GradientSync, trained: Trained) -> None:
        """Send the gradients of later forwards by this sender."""
        if self.sync is not None:
            sync.is_on = self.sync.is_on
        self.sync = sync
        self._trained = trained
        rows = zip(self._parameters, trained, strict=True)
        runs = self._ownership.runs_parameter
        self._backwards.holds_trained(any(is_on and runs(p) for p, is_on in rows))

    def forward_ended(
        self, results: PackedResults, counts: tuple[int, ...], proven: Proven | None
    ) -> EndedForward:
        """Return what the backward of a forward with these samples by rank needs."""
        assert self.sync is not None  # noqa: S101
        self._last_shares = tuple(count / sum(counts) for count in counts)
        self._backwards.forward_ended(self._last_shares)
        return EndedForward(
            results=results,
            shares=self._last_shares,
            trained=self._trained,
            sync=self.sync,
            plan=self._plan,
            proven=proven,
            is_hooked=self._hooks.is_on_parameters,
        )

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layers that this rank runs."""
        return (p for p in self._parameters if self._ownership.runs_parameter(p))

    def output_arrived(self, forward: EndedForward, grad: Tensor, why_not: str) -> None:
        """Record that backward comes from a forward's output, with its gradient.

        ``why_not`` says why it can't run, or is empty.
        """
        with self._rank_groups.inside_step():
            if why_not:
                raise StrettoError(why_not)
            require_values(grad)
            if forward.plan != self._plan:
                raise StrettoError(
                    "this backward's forward ran before apply_plan(), which gave its "
                    "layers to other ranks: call apply_plan between optimizer.step() "
                    "and the next forward"
                )
            if forward.proven is not None and forward.proven.watch is not None:
                _require_same(forward.proven.watch)
            results = forward.results
            if results is not None and not results.differs:
                self.reached.arrived_at_all(results)  # else outputs' own hooks do it
            self._begin()
            if self._running is None:
                self._run(forward)
            else:
                self._join(forward, self._running)

    def _begin(self) -> None:
        if not self._queued:
            self._queued = True
            if any(self._trained):
                self._stale_guard.backward_begins()
            with self._rank_groups.inside_step():
                self._require_none_left_over()
                self._hooks.require_callable()
                self._uses.backward_begins(self._changes.backward_begins())
            _queue_callback(self._ended)

    def _run(self, forward: EndedForward) -> None:
        """Follow the first forward whose output backward reaches.

        Raises:
            StrettoError: other parameters are trained now, and gradients must be kept.
        """
        now = self.sync
        assert now is not None  # noqa: S101
        if forward.sync is not now:
            now.require_nothing_kept(
                "a backward whose forward ran before parameters were frozen or unfrozen"
            )
            if not now.is_on:
                raise StrettoError(
                    "parameters were frozen or unfrozen after the forward whose "
                    "backward runs in no_sync(): do it after optimizer.step()"
                )
            forward.sync.is_on = True
        self._running = forward
        if forward.results is not None:
            self._note_shares(forward)
        self._is_sent_early = forward.is_hooked and not forward.sync.is_on
        forward.sync.is_on |= forward.is_hooked
        forward.sync.begin()
        direct, self._direct = self._direct, []
        for parameter, grad in direct:
            self._add_direct(parameter, grad, forward)

    def _join(self, forward: EndedForward, first: EndedForward) -> None:
        """Require that one backward can serve another forward too.

        Raises:
            StrettoError: it can't.
        """
        more = zip(forward.trained, first.trained, strict=True)
        if any(here and not there for here, there in more):
            raise StrettoError(
                "one backward covers two forwards, and parameters were frozen between "
                "them: call backward() for each, or freeze after the last forward"
            )
        self._note_shares(forward)

    def _require_one_share(self) -> None:
        """Check it when backward ends: only the order differs between ranks.

        Raises:
            StrettoError: a parameter's gradient has no single weight.
        """
        if self._has_direct and len(self._shares_here()) > 1:
            raise StrettoError(
                "the loss uses a parameter directly and outputs of two forwards in "
                "which ranks have different parts of the batch, so the parameter's "
                "gradient has no single weight: give each rank the same part of both "
                "batches, or call backward() for each forward's loss"
            )

    def _add_direct(
        self, parameter: nn.Parameter, grad: Tensor, forward: EndedForward
    ) -> None:
        self._has_direct = True
        share = forward.shares[self._rank_groups.ranks.rank]
        forward.sync.add_direct(parameter, grad * share)

    def _require_none_left_over(self) -> None:
        """Refuse gradients from before the model was set up, except zeros.

        Raises:
            StrettoError: the backward would add to one.
        """
        for name, parameter, grad in self._left_over:
            if parameter.grad is not grad:
                continue
            if bool(grad.count_nonzero()):
                raise StrettoError(
                    f"parameter {name!r} still has a gradient from before the burst "
                    "model was built, which no other rank has: call "
                    "optimizer.zero_grad() or model.zero_grad() before backward()"
                )
            if not self._ownership.runs_parameter(parameter):
                parameter.grad = None  # an optimizer would take a step with zeros
        self._left_over = []

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Record that a layer's gradient of a parameter is complete."""
        sync = self.sync if self._running is None else self._running.sync
        assert sync is not None  # noqa: S101
        with self._rank_groups.inside_step():
            sync.arrived(parameter)

    def direct_gradient(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """Store the gradient of the loss's own use of a parameter.

        Return the gradient that autograd must add to ``.grad``.

        Raises:
            StrettoError: not every rank runs the parameter's layer.
        """
        with self._rank_groups.inside_step():
            if not self._ownership.is_everywhere(parameter):
                layer = self._ownership.layer_of(parameter)
                raise StrettoError(
                    f"the loss uses a parameter of layer {layer!r} directly, but not "
                    "every rank runs this layer: use the optimizer's weight_decay, or "
                    "after backward() add the penalty's gradient to .grad where that "
                    "is not None, or give the layer all ranks. If the loss is of the "
                    "module inside, call the burst model instead"
                )
            self._begin()
            self.reached.arrived_at(parameter)
            if self._running is None:
                self._direct.append((parameter, grad.clone()))
            else:
                self._add_direct(parameter, grad, self._running)
            return torch.zeros_like(grad)

    @without_dynamo
    def _ended(self) -> None:
        if self._timings.is_on:
            self._clock.other()
        with self._rank_groups.inside_step():
            sync = self._sync_to_end()
            self._require_one_share()
            # See Note [Outputs that no loss uses] in `stretto.burst.reach`.
            self.reached.arrived_at_layers(sync.layer_gradients())
            with self._rank_groups.guard("joining the outputs that losses use"):
                self.reached.join(self._rank_groups.reduce_number, self._device)
            sync.finish(self.reached.unreached())
            self._activations.finish_sends()
        is_sent = sync.is_on
        sync.is_on = is_sent and not self._is_sent_early
        self._queued = False
        self._forget_running()
        if is_sent:
            self._clock.marker.end_step()
            self.reached.reset()
        torch_calls.backward_ended(self._seam)
        self._backwards.ended()
        if is_sent:
            self._changes.backward_ended(self.own_parameters())
            self._hooks.backward_ended()
        self._timings.step_ended()

    def _sync_to_end(self) -> GradientSync:
        """Return the sender of the backward that ends."""
        if self._running is None:  # of a loss that uses parameters only
            assert self.sync is not None  # noqa: S101
            self._run(
                EndedForward(
                    results=None,
                    shares=self._shares_without_output(),
                    trained=self._trained,
                    sync=self.sync,
                    plan=self._plan,
                    proven=None,
                    is_hooked=self._hooks.is_on_parameters,
                )
            )
        assert self._running is not None  # noqa: S101
        return self._running.sync

    def _shares_without_output(self) -> tuple[float, ...]:
        """Return the shares of a loss that uses parameters only.

        See Note [A backward without an output] in `stretto.burst.checks.backward_use`.
        """
        known = self._shares_here()
        numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._backwards.used_without_output(
            [(numbers[id(p)], grad) for p, grad in self._direct], is_known=bool(known)
        )
        return known[0] if known else self._last_shares

    def _note_shares(self, forward: EndedForward) -> None:
        torch_calls.note_shares(self._rank_groups.ranks, forward.shares)

    def _shares_here(self) -> list[tuple[float, ...]]:
        """Return the shares of all models' outputs that this backward has reached."""
        return torch_calls.shares_of_backward(self._rank_groups.ranks)

    def _forget_running(self) -> None:
        self._is_sent_early = False
        self._running, self._direct = None, []
        self._has_direct = False

    def failed(self, error: BaseException, *, has_ended: bool) -> None:
        """Inform the other ranks that an exception ended a backward.

        ``has_ended`` says whether this model's part of it had ended.
        """
        if not has_ended and not self._queued:
            return
        self._backwards.failed(error, had_ended=has_ended)
        failures, refusals = self._rank_groups.failures, self._rank_groups.refusals
        if failures.error is None and not refusals.is_published(error):
            text = f"its backward was ended by an exception: {text_of(error)}"
            refusals.tell(StrettoError(text), inside=True)
        if self._queued:
            self._clear()

    def why_unsent(self, parameters: Iterable[Tensor] | None = None) -> str:
        """Return why gradients are not those of the global batch, or nothing.

        Of any layer, or of these parameters.
        """
        if self.sync is None or not self.sync.keeps_own(parameters):
            return ""
        return (
            "the last backward was in no_sync(), so that gradients have this rank's "
            "own part until a backward outside of it sends them"
        )

    def cut_short(self) -> None:
        """Clear the state of a backward whose end was not seen."""
        if self._queued:
            error = StrettoError("its backward was ended by an exception")
            self._backwards.failed(error, had_ended=False)
            self._rank_groups.refusals.tell(error, inside=True)
            self._clear()

    def _clear(self) -> None:
        """Clear the state of a backward that an exception ended."""
        self._queued = False
        if self._running is not None:
            self._running.sync.reset()
        self._forget_running()
        assert self.sync is not None  # noqa: S101
        self.sync.reset()
        self.reached.reset()
        self._changes.reset()
        self._uses.cut_short()
        self._activations.drop()


@final
class _DirectHook:
    """Receives gradients that reach a parameter directly, not through a layer."""

    is_stretto = True

    def __init__(self, backward: BackwardPass, parameter: nn.Parameter) -> None:
        # See Note [Hooks hold nothing] in `stretto.burst.shadows`.
        self._backward = weakref.ref(backward)
        self._parameter = weakref.ref(parameter)

    @without_dynamo
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Return the gradient that autograd must add to ``.grad``."""
        backward, parameter = self._backward(), self._parameter()
        if grad is None or torch_calls.only_returns_gradients():
            return None
        if backward is None or parameter is None:
            raise StrettoError(MODEL_GONE)
        return backward.direct_gradient(parameter, grad)


def _require_same(watch: Watch) -> None:
    """Require that a backward reads the values for which its layers were checked.

    Raises:
        StrettoError: one has changed since the forward.
    """
    if (name := watch.changed()) is not None:
        raise StrettoError(
            f"{name!r}, which the model's backward reads, changed after the forward, "
            "so that it is unknown whether backward keeps samples apart: change it "
            "between backward and the next forward"
        )


def _hooked(parameter: nn.Parameter, hook: Any) -> Any:
    """Register a hook on a parameter that may be frozen; return its handle, if any."""
    if parameter.is_inference() or not (
        parameter.is_floating_point() or parameter.is_complex()
    ):
        return None
    was = parameter.requires_grad
    try:
        parameter.requires_grad_(True)  # noqa: FBT003
        return parameter.register_hook(hook)
    finally:
        parameter.requires_grad_(was)
