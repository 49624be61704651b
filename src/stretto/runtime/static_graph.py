"""Count how often each gradient arrives in a backward of a static graph.

# Note [A new Reducer for a static graph]
A Reducer of a static graph learns in its first iteration how often each gradient
arrives, and communicates at the end of that backward. A forward under ``no_sync``, a
forward whose loss is dropped or two forwards before a backward break that first
iteration. In DDP it happens once, at the start, where programs are simple; with a new
plan it could happen anywhere. If each gradient arrives once, a Reducer without that
mode does the same without a first iteration, so a new plan gets such a Reducer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

from stretto.runtime.weak_call import weakly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@final
class GradientCounts:
    """Counts how often each parameter's gradient arrives in one iteration."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._counts = [0] * len(parameters)
        # Weak, because objects kept by a parameter's hook are never freed with the
        # parameter.
        count = weakly(self._count)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(count, index))
            for index, parameter in enumerate(parameters)
        ]

    def begin(self) -> None:
        """Start an iteration."""
        self._counts = [0] * len(self._counts)

    def end(self) -> bool:
        """Stop counting; return whether each gradient arrived exactly once."""
        for handle in self._handles:
            handle.remove()
        return all(count == 1 for count in self._counts)

    def _count(self, index: int, _parameter: nn.Parameter) -> None:
        self._counts[index] += 1
