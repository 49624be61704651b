"""Learning rates that rise during a warm-up, then fall along a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@final
class LinearDecay(LRScheduler):
    """Linear warm-up to each group's learning rate, then linear decay.

    AIACC-Training uses linear decay in place of steps (section III). The paper gives no
    formula. Here step ``t`` of ``total_steps``, counted from 0, has the factor

    - ``(t + 1) / warmup_steps`` before ``warmup_steps``,
    - ``end + (1 - end) * (total_steps - t) / (total_steps - warmup_steps)`` then,
    - ``end`` from ``total_steps`` on.

    Call ``step()`` after each step of the optimizer.

    Args:
        optimizer: Whose learning rates are set.
        total_steps: Steps of the whole training, warm-up included.
        warmup_steps: Steps of the warm-up.
        end: Factor at the end.
        last_epoch: As in ``torch.optim.lr_scheduler``: the last step that has been
            made, or -1.

    Raises:
        ValueError: a number of steps or the factor is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        end: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"warmup_steps must be at least 0 and below total_steps, which is "
                f"{total_steps}; it is {warmup_steps}"
            )
        if not 0.0 <= end <= 1.0:
            raise ValueError(f"end must be from 0 to 1, not {end}")
        self.total_steps, self.warmup_steps, self.end = total_steps, warmup_steps, end
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Return the factor of a step's learning rates.

        Args:
            step: Its number, from 0.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = max(self.total_steps - step, 0) / (self.total_steps - self.warmup_steps)
        return self.end + (1.0 - self.end) * left

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group."""
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]
