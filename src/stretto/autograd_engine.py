"""What PyTorch's autograd engine offers under private names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
)
"""Queue a call for the end of the backward that this thread is in."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Return a number of the backward that this thread is in; -1 outside of a backward."""
