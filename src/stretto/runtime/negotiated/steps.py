"""Tensor sets: whether their order is stable, and what ranks say at a step's end.

# Note [An order that is kept]
Each rank submits every tensor of a set exactly once in every step, and waits only when
it has submitted all. So launching in any one order that is the same everywhere ends:
the unit next in that order has all its tensors once every rank has submitted its step,
which no rank's waiting holds up. Each rank's own order therefore only decides how early
units leave, never whether. That is why a kept order needs no rounds, and why a tensor
that comes late, or as zeros because it was not used, costs time and nothing else.

The kept order is decided by all ranks at the end of one step, in the round in which the
last of them says "I have submitted all" (its vote), and left in the same way: the vote
carries whether this rank's order was the same as before. All ranks read the same round,
so all change at the same step. Units in a kept order have lanes of their own, for the
order between them and negotiated units is not agreed.
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
        """Takes a step's order; whether the order is stable.

        Of an order that is kept already (``kept``), one step says so; before that,
        ``stable_steps`` equal ones.
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
    """One order for all ranks, near that in which tensors are ready everywhere.

    A tensor is ready everywhere when the rank that has it last has it, so tensors are
    sorted by their latest place, then by the sum of places, then by index.
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
