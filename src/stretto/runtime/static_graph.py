"""Count how often each gradient arrives in a backward of a static graph.

# Note [A new Reducer for a static graph]
A Reducer of a static graph learns in its first step how often each gradient arrives,
and communicates at the end of that backward. A forward under ``no_sync``, a forward
whose loss is dropped or two forwards before a backward break that first step. In DDP it
happens once, at the start, where programs are simple; with a new plan it could happen
anywhere. If each gradient arrives once, a Reducer without that mode does the same
without a first step, so a new plan gets such a Reducer.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, final

from stretto.runtime.weak_call import weakly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn


@final
class GradientCounts:
    """Counts how often each parameter's gradient arrives in one step."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._names = [name for name, _ in parameters]
        self._counts = [0] * len(parameters)
        # Weak, because objects kept by a parameter's hook are never freed with the
        # parameter.
        count = weakly(self._count)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(count, index))
            for index, (_, parameter) in enumerate(parameters)
        ]

    def begin(self) -> None:
        """Start a step."""
        self._counts = [0] * len(self._counts)

    def end(self) -> dict[str, int]:
        """Stop counting; return the counts other than one by the parameter's name."""
        for handle in self._handles:
            handle.remove()
        counts = zip(self._names, self._counts, strict=True)
        return {name: count for name, count in counts if count != 1}

    def _count(self, index: int, _parameter: nn.Parameter) -> None:
        self._counts[index] += 1


_UNFINISHED = re.compile(
    r"(Expected to have finished reduction.*?) This error .*?(?=Param|$)", re.DOTALL
)


def raise_as_static(error: RuntimeError) -> None:
    """Raise DDP's error on a changed static graph in place of its new Reducer's.

    Other errors are left alone.

    Raises:
        RuntimeError: a parameter had no gradient in the last step.
    """
    found = _UNFINISHED.match(str(error))
    if found is None or "static_graph" in str(error):
        return
    raise RuntimeError(
        f"{found[1]} This error indicates that your training graph has changed in this "
        "iteration, e.g., one parameter is used in first iteration, but then got "
        "unused in the second iteration. this is not compatible with static_graph set "
        f"to True.\n{str(error)[found.end() :]}"
    ) from error


def unsupported(counts: Mapping[str, int]) -> str:
    """Return why a static graph's gradients, with these counts, take no new plan.

    See Note [A new Reducer for a static graph].
    """
    text = (
        "static_graph=True supports a new plan only where each parameter gets one "
        "gradient in a backward"
    )
    if not counts:
        return f"{text}, and these gradients have not been counted yet."
    name, count = next(iter(counts.items()))
    more = f" ({len(counts) - 1} more differ)" if len(counts) > 1 else ""
    instead = (
        "Pass find_unused_parameters=True instead of static_graph=True"
        if not any(counts.values())
        else "Pass the plan when the model is created"
    )
    return f"{text}, but {name!r} gets {count or 'none'}{more}. {instead}."
