"""Private names of PyTorch's autograd engine."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
)
"""Queue a call for the end of the backward that this thread is in."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Return a number of the backward that this thread is in; -1 outside of a backward."""


def on_accumulated(
    parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    """Register a hook that runs when the parameter has its gradient.

    PyTorch accepts it only while the parameter requires a gradient. A parameter that is
    frozen now keeps the hook for later: programs that train parts of a model in turn
    freeze the others meanwhile. A parameter that was converted to whole numbers while
    frozen can't have a gradient and gets no hook.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return RemovableHandle(OrderedDict())
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)  # noqa: FBT003 - as PyTorch's
    try:
        register: Any = parameter.register_post_accumulate_grad_hook
        handle: RemovableHandle = register(hook)
    finally:
        if frozen:
            parameter.requires_grad_(False)  # noqa: FBT003 - as PyTorch's
    return handle
