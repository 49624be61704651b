"""Convert PyTorch's hooks into an observer's calls."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from torch import nn

    from stretto.runtime.recorder import AbstractStepObserver

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001


@final
class StepWatch:
    """Converts PyTorch's hooks into an observer's calls."""

    def __init__(self, observer: AbstractStepObserver) -> None:
        self._observer = observer
        self._ending = False

    def forward_started(self, *_: Any) -> None:
        """Forward pre-hook."""
        self._ending = False
        self._observer.forward_started(perf_counter())

    def forward_ended(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Forward hook."""
        now_s = perf_counter()
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_started)
        self._observer.forward_ended(now_s)

    def _backward_started(self, _gradient: torch.Tensor) -> None:
        self._observer.backward_started(perf_counter())

    def gradient_ready(self, index: int, _parameter: nn.Parameter) -> None:
        """Post-accumulate hook of the parameter at ``index``."""
        self._observer.gradient_ready(index, perf_counter())
        if not self._ending:
            self._ending = True
            # Runs when the graph is done, before the Reducer waits for its buckets; a
            # callback that it queues runs after that.
            _queue_callback(self._computed)

    def _computed(self) -> None:
        self._observer.backward_computed(perf_counter())
        _queue_callback(self._ended)

    def _ended(self) -> None:
        self._ending = False
        self._observer.backward_ended(perf_counter())


def _tensors_in(value: Any) -> list[torch.Tensor]:
    find: Any = torch.nn.parallel.distributed._find_tensors  # noqa: SLF001
    return list(find(value))
