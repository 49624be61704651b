"""Let a block run again after an optimizer has changed parameters.

# Note [A block that is lost within or between optimizer steps]
A block runs again from the parameters before it. With one optimizer, whose step needs
no other rank, they are unchanged until that step, the block's last operation. But an
optimizer with a closure computes gradients within its step, so a rank may be lost after
it has changed parameters; and with two optimizers, such as a GAN's, a rank may be lost
between their steps. The state is copied before the first of such steps in a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from stretto.resume.snapshots import copy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


@final
class StepUndo:
    """Watches a run's optimizers within its blocks."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        state_of: Callable[[], dict[str, Any]],
    ) -> None:
        """Watch these.

        Args:
            optimizers: whose steps change what a block began with.
            state_of: returns everything that a block that runs again must have.
        """
        self._state_of = state_of
        self._optimizers = optimizers
        self._is_in_block = False
        self.before: dict[str, Any] | None = None
        """The state before the block's first step, if it was copied."""

        self.began = self.ended = 0
        """Steps of optimizers in the block."""

        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def zero_grad(self) -> None:
        """Release the gradients of all optimizers."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def begin_block(self) -> None:
        """Forget the last block; a new one begins."""
        self.before, self.began, self.ended = None, 0, 0
        self._is_in_block = True

    def end_block(self) -> None:
        """Release the copy."""
        self.before, self._is_in_block = None, False

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_in_block:
            return
        given = [*args, *kwargs.values()]  # args[0] is the optimizer
        closure = next((each for each in given if each is not optimizer), None)
        if not self.began and (len(self._optimizers) > 1 or closure is not None):
            self.before = copy_of(self._state_of())
        self.began += 1

    def _after_step(self, *_: Any) -> None:
        if self._is_in_block:
            self.ended += 1
