"""Send a model's gradients through the engine, for orders that differ between ranks.

PyTorch's Reducer sends its buckets in one order on every rank, so a rank whose
gradients arrive in another order delays all others, and unused parameters must be found
before backward. Here each gradient is submitted as soon as it is ready.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from stretto.autograd_engine import graph_task_id, queue_callback
from stretto.errors import StrettoError
from stretto.logs import get_logger
from stretto.runtime.negotiated.api import EngineOptions
from stretto.runtime.negotiated.engine import Engine
from stretto.runtime.negotiated.requests import CollectiveKind, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from stretto.foreground_marks import StepMarker
    from stretto.runtime.negotiated.tensor_set import TensorSet
    from stretto.runtime.ranks import Ranks

_log = get_logger(__name__)

STATIC = "static"
NEGOTIATED = "negotiated"


def refused(what: str) -> StrettoError:
    """Return the error for a feature that a negotiated order does not support."""
    return StrettoError(
        f"{what} is not supported with order={NEGOTIATED!r}, where gradients have no "
        f"buckets. Leave it out, or use order={STATIC!r}."
    )


@final
class NegotiatedReducer:
    """Replaces the Reducer: hooks on parameters, and a tensor set.

    A step is a backward. It includes every parameter on every rank: a parameter without
    a gradient on some rank counts as zeros there; one without a gradient on all ranks
    is unchanged.
    """

    def __init__(
        self,
        model: TorchDDP,
        ranks: Ranks,
        table: Sequence[tuple[str, nn.Parameter]],
        *,
        lanes: int | None,
        unit_bytes: int | None,
        marker: StepMarker,
    ) -> None:
        self._marker = marker
        options = EngineOptions()
        self._options = EngineOptions(
            lanes=lanes or options.lanes, unit_bytes=unit_bytes or options.unit_bytes
        )
        # Weak: the model owns this object and ends the engine when it is freed.
        self._model = weakref.ref(model)
        self._parameters = [parameter for _, parameter in table]
        self._engine = Engine(ranks, options=self._options)
        self._set: TensorSet = self._engine.register(
            "gradients",
            [
                Request(
                    name=name,
                    kind=CollectiveKind.ALLREDUCE,
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    shape=tuple(parameter.shape),
                    device=parameter.device.type,
                    # As in DDP: each rank's share is scaled before it is sent.
                    prescale=1.0 / ranks.size,
                )
                for name, parameter in table
            ],
        )
        self._syncs = False
        self._queued = False
        self._task = -1
        self._touched = [False] * len(table)
        self._sent: set[int] = set()
        self._names = [name for name, _ in table]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                partial(self._on_gradient, i, self._set.submitter(i))
            )
            for i, parameter in enumerate(self._parameters)
        ]
        # A module outlives its wrapper: remove the hooks, or they would keep reducing.
        self._end = weakref.finalize(model, _end, self._hooks, self._engine)

    @property
    def in_stable_order(self) -> bool:
        """Whether gradients are now sent in a stable order, without negotiation."""
        return self._set.in_stable_order

    def close(self) -> None:
        """End the engine and remove the hooks; also runs when the model is freed."""
        self._end()

    # Forward.

    def forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's output, after sending buffers as DDP does."""
        model: Any = self._model()
        if model._join_config.enable:  # noqa: SLF001
            raise refused("join()")
        training = torch.is_grad_enabled()
        if training:
            self._marker.begin_step()
            self._abandon()
            self._syncs = model.require_backward_grad_sync
        if model._check_sync_bufs_pre_fwd():  # noqa: SLF001
            model._sync_buffers()  # noqa: SLF001
        if model.device_ids:
            moved, moved_kwargs = model.to_kwargs(inputs, kwargs, model.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        output = model.module(*inputs, **kwargs)
        if model._check_sync_bufs_post_fwd():  # noqa: SLF001
            model._sync_buffers()  # noqa: SLF001
        model.require_forward_param_sync = training and self._syncs
        if training and self._syncs:
            find: Any = torch.nn.parallel.distributed._find_tensors  # noqa: SLF001
            for tensor in find(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_backward)
        return output

    # Backward.

    # Note [Whose end the step ends at]
    # A callback queued from a hook runs at the end of the backward that the hook runs
    # in. Reentrant checkpointing runs backwards within backward. If a parameter's hook
    # in one of those queued the callback, the step would end before the other
    # parameters have their gradients. The hook on the model's output runs in the
    # outermost backward, and before any other hook. A parameter's hook queues the
    # callback only if a backward does not pass the model's output.

    def _on_backward(self, _gradient: torch.Tensor) -> None:
        if not self._syncs:  # the forward's gradients have been reduced
            return
        if self._queued and self._task != graph_task_id():
            self._abandon()
        if not self._queued:
            self._queue()

    def _queue(self) -> None:
        self._queued = True
        self._task = graph_task_id()
        queue_callback(self._end_step)

    def _on_gradient(self, index: int, submit: Any, parameter: nn.Parameter) -> None:
        self._touched[index] = True
        if not self._syncs:
            return
        if not self._queued:
            self._queue()
        if index in self._sent:
            raise refused(
                f"a second gradient of {self._names[index]!r} in one backward (a layer "
                "under several reentrant checkpoints; use_reentrant=False gives one)"
            )
        self._sent.add(index)
        gradient: Any = parameter.grad
        submit(gradient.detach() if gradient.requires_grad else gradient)

    def _end_step(self) -> None:
        """Complete the step after backward: add zeros, wait, place gradients."""
        filled = {}
        for i in self._set.missing():
            parameter = self._parameters[i]
            # Gradients left by earlier micro-steps or steps count: otherwise a rank
            # that has one would lose it to a rank without (PyTorch's issue 69031).
            values = (
                torch.zeros_like(parameter, requires_grad=False)
                if parameter.grad is None
                else parameter.grad.clone()
            )
            filled[i] = values
            self._set.submit(i, values.detach(), used=self._touched[i])
        end = self._marker.wait("all-reduce", self._set.wait)
        self._marker.end_step()
        # As in DDP, a forward is reduced once: gradients that another backward through
        # it adds stay on this rank.
        self._syncs = False
        self._sent.clear()
        self._queued = False
        self._touched = [False] * len(self._touched)
        for i, values in filled.items():
            if i not in end.unused:
                self._put(self._parameters[i], values)
        if not end.whole:
            raise StrettoError(
                "another rank left this step's backward with an error, so the "
                "gradients lack its part. Check the other ranks' logs; call "
                "zero_grad() to continue."
            )

    def _put(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = values
        else:
            parameter.grad.copy_(values)

    def _abandon(self) -> None:
        """End a step that an exception within backward cut short."""
        if self._queued:
            self._queued = False
            self._sent.clear()
            self._touched = [False] * len(self._touched)
            self._set.abandon()


def _end(hooks: Sequence[Any], engine: Engine) -> None:
    for hook in hooks:
        hook.remove()
    engine.close()
