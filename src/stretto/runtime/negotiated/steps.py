"""Tensor sets: detect a stable order, and agree on it at a step's end.

# Note [An order that is kept]
Each rank submits every tensor of a set exactly once in every step, and waits only after
it has submitted all. So a launch in any fixed order that is the same everywhere
terminates: the next unit in that order has all its tensors once every rank has
submitted its step, which no rank's waiting delays. Each rank's own order therefore only
affects how early units leave, never whether they leave. That is why a kept order needs
no rounds, and why a tensor that is late, or is zeros because it was not used, costs
only time.

All ranks decide on the kept order at the end of one step, in the round in which the
last of them reports "I have submitted all" (its vote). They leave it in the same way:
the vote says whether this rank's order was the same as before. All ranks read the same
round, so all change at the same step. Units in a kept order have lanes of their own,
because the order between them and negotiated units is not agreed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class OrderWatch:
    """Counts for how many steps a rank submitted in the same order."""

    def __init__(self, stable_steps: int) -> None:
        self._stable_steps = stable_steps
        self._last: list[int] = []
        self._equal_steps = 0

    def end_step(self, order: list[int], *, kept: bool) -> bool:
        """Add a step's order; return whether the order is stable.

        With an order that is already kept (``kept``), one equal step is enough; before
        that, ``stable_steps`` equal steps are needed.
        """
        if order == self._last:
            self._equal_steps += 1
        else:
            self._last = order
            self._equal_steps = 1
        if self._stable_steps == 0:
            return False
        return self._equal_steps >= (2 if kept else self._stable_steps)

    @property
    def order(self) -> Sequence[int]:
        """The last step's order."""
        return self._last


def common_order(orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return one order for all ranks, near that in which tensors are ready everywhere.

    A tensor is ready everywhere when the last rank has it, so tensors are sorted by
    their latest position, then by the sum of positions, then by index.
    """
    latest = [0] * len(orders[0])
    total = [0] * len(orders[0])
    for order in orders:
        for place, index in enumerate(order):
            latest[index] = max(latest[index], place)
            total[index] += place
    return tuple(
        sorted(range(len(latest)), key=lambda i: (latest[i], total[i], i)),
    )
