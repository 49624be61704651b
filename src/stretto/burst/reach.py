"""Track which parameters a backward reaches, by the outputs that it starts from.

# Note [Outputs that no loss uses]
Layers pass one tensor, so a model's outputs leave the last layer as one, and the
gradient of an output that no rank's loss uses is zero there. Layers that only that
output reads would get zero gradients, where one process leaves ``.grad`` at None: an
optimizer with weight decay or momentum would still move their parameters. The capture
finds which parameters each output's gradient reaches. Each rank records from which
outputs a backward starts, and the ranks join these records when it ends. Parameters
that no output reaches, because of ``detach()`` or an index between them, get no
gradient. A gradient that arrives there all the same is kept if it is not zero: a
backward of the user's may return ``None`` when it is checked, and a gradient later.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stretto.burst.tracing.packing import PackedResults


@final
class Reached:
    """Parameters that backward passes have reached since gradients were last sent."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._ids = [id(parameter) for _, parameter in parameters]
        self._numbers = {name: i for i, (name, _) in enumerate(parameters)}
        self._of_id = {key: i for i, key in enumerate(self._ids)}
        self._mask = torch.zeros(len(self._ids), dtype=torch.uint8)
        self._is_on = False

    def watch(
        self, results: PackedResults
    ) -> Callable[[int], Callable[[Tensor], None]]:
        """Return the function that makes the hook of an output, by its number.

        Every rank calls it for the same forwards.
        """
        self._is_on = True
        return lambda number: partial(self._arrived, results, number)

    def _arrived(self, results: PackedResults, number: int, _grad: Tensor) -> None:
        assert results.output_parameters is not None  # noqa: S101 - hooks are set only then
        self._mark(results.output_parameters[number])

    def _mark(self, names: Iterable[str]) -> None:
        self._mask[[self._numbers[name] for name in names]] = 1

    def arrived_at_all(self, results: PackedResults) -> None:
        """Record a backward from outputs that reach the same parameters."""
        if results.output_parameters is None:
            self._mask.fill_(1)
        else:
            self._mark(results.output_parameters[0])

    def arrived_at(self, parameter: nn.Parameter) -> None:
        """Record that a loss uses a parameter directly."""
        self._mask[self._of_id[id(parameter)]] = 1

    def arrived_at_layers(
        self, gradients: Iterable[tuple[nn.Parameter, Tensor | None]]
    ) -> None:
        """Record the gradients of parameters that no output reached, except zeros."""
        if not self._is_on:
            return
        reached = self._mask.tolist()
        for parameter, grad in gradients:
            number = self._of_id[id(parameter)]
            if grad is not None and not reached[number] and _has_values(grad):
                self._mask[number] = 1

    def join(self, reduce: Callable[[Tensor, Any], None], device: torch.device) -> None:
        """Join the parameters reached on all ranks. Collective."""
        if self._is_on:
            mask = self._mask.to(device)
            reduce(mask, dist.ReduceOp.MAX)
            self._mask = mask.cpu()

    def unreached(self) -> frozenset[int]:
        """Return the ids of the parameters that no backward has reached."""
        if not self._is_on:
            return frozenset()
        return frozenset(
            key
            for key, reached in zip(self._ids, self._mask.tolist(), strict=True)
            if not reached
        )

    def reset(self) -> None:
        """Start again: gradients were sent or dropped."""
        self._mask.zero_()


def _has_values(grad: Tensor) -> bool:
    """Return whether a gradient is finite and not zero somewhere.

    Zero times infinity is not a number also where no loss uses the result.
    """
    values = grad.coalesce().values() if grad.is_sparse else grad
    return bool(((values != 0) & values.isfinite()).any())
