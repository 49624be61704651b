"""The backward of a burst model on one rank, from its first gradient to its last."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.burst import torch_calls
from stretto.burst.boundary import require_values
from stretto.burst.reach import Reached
from stretto.burst.shadows import MODEL_GONE
from stretto.errors import StrettoError
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.burst.activation_transfer import ActivationTransfer
    from stretto.burst.changes import Changes
    from stretto.burst.gradient_sync import GradientSync
    from stretto.burst.optimizer_use import OptimizerUse
    from stretto.burst.ownership import Ownership
    from stretto.burst.rank_groups import RankGroups
    from stretto.burst.stale_guard import StaleParameterGuard
    from stretto.burst.timings import StepClock, Timings
    from stretto.burst.torch_seam import TorchSeam
    from stretto.burst.tracing.packing import Results

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001


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
        self._timings = timings
        self._clock = clock
        self._device = device
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._queued = False
        self._handles: list[Any] = []
        self._left_over: list[tuple[str, nn.Parameter, Tensor]] = []
        self.share = 1 / rank_groups.ranks.size
        """This rank's part of the global batch of the last forward."""
        self.sync: GradientSync | None = None
        """Sends the gradients of the parameters that are trained now."""
        self.reached = Reached(())

    def follow(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Expect gradients of a model's parameters, which may be a later plan's."""
        self._parameters = tuple(p for _, p in parameters)
        self.reached = Reached(parameters)

    def note_left_over(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Record the gradients from before the model was set up."""
        self._left_over = [
            (name, p, p.grad) for name, p in parameters if p.grad is not None
        ]

    def use(self, sync: GradientSync) -> None:
        """Send gradients by this sender, and hook the parameters trained now."""
        if self.sync is not None:
            sync.is_on = self.sync.is_on
        self.sync = sync
        for handle in self._handles:
            handle.remove()
        self._handles = [
            parameter.register_hook(_DirectHook(self, parameter))
            for parameter in self._parameters
            if parameter.requires_grad
        ]

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layers that this rank runs."""
        return (p for p in self._parameters if self._ownership.runs_parameter(p))

    def output_arrived(self, results: Results, grad: Tensor) -> None:
        """Record that backward comes from the model's output, with its gradient."""
        with self._rank_groups.inside_step():
            require_values(grad)
        if not results.differs:  # else the outputs' own hooks record them
            self.reached.arrived_at_all(results)
        self._begin()

    def _begin(self) -> None:
        if not self._queued:
            self._queued = True
            assert self.sync is not None  # noqa: S101
            if self._handles:  # some parameter is trained
                self._stale_guard.backward_begins()
            with self._rank_groups.inside_step():
                self._require_none_left_over()
                self._uses.backward_begins(self._changes.backward_begins())
                self.sync.begin()
            _queue_callback(self._ended)

    def _require_none_left_over(self) -> None:
        """Reject gradients from before the model was set up, except zeros.

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
        assert self.sync is not None  # noqa: S101
        with self._rank_groups.inside_step():
            self.sync.arrived(parameter)

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
                    "is not None, or give the layer all ranks"
                )
            self._begin()
            self.reached.arrived_at(parameter)
            assert self.sync is not None  # noqa: S101
            self.sync.add_direct(parameter, grad * self.share)
            return torch.zeros_like(grad)

    @without_dynamo
    def _ended(self) -> None:
        if self._timings.is_on:
            self._clock.other()
        self._queued = False
        assert self.sync is not None  # noqa: S101
        with self._rank_groups.inside_step():
            # See Note [Outputs that no loss uses] in `stretto.burst.reach`.
            with self._rank_groups.guard("joining the outputs that losses use"):
                self.reached.join(self._rank_groups.reduce_number, self._device)
            self.sync.finish(self.reached.unreached())
            self._activations.settle()
        if self.sync.is_on:
            self.reached.reset()
        torch_calls.backward_ended(self._seam)
        if self.sync.is_on:
            self._changes.backward_ended(self.own_parameters())
        self._timings.step_ended()

    def cut_short(self) -> None:
        """Clear the state of a backward that an exception ended."""
        if self._queued and self.sync is not None:
            self._queued = False
            error = StrettoError("its backward was ended by an exception")
            self._rank_groups.refusals.tell(error, inside=True)
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
        if grad is None:
            return None
        if backward is None or parameter is None:
            raise StrettoError(MODEL_GONE)
        return backward.direct_gradient(parameter, grad)
