"""Let a block run again after an optimizer has changed parameters.

# Note [A block that is lost within or between optimizer steps]
A block runs again from the parameters before it. With one optimizer, whose step needs
no other rank, they are unchanged until that step, the block's last operation. But an
optimizer with a closure computes gradients within its step, so a rank may be lost after
it has changed parameters; and with two optimizers, such as a GAN's, a rank may be lost
between their steps. The state is copied before the first of such steps in a block.

A program may also change parameters itself before that step: a momentum encoder in its
forward, or sharpness-aware minimization between two of them. Parameters are copied at
the beginning of each block if they were changed so in one of the first blocks, in which
all are copied. If a lost block has changed another one, it can't run again.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, final

import torch

from stretto.resume.snapshots import copy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LEARNING = 2
"""Blocks that show which parameters a program changes itself."""


@final
class StepUndo:
    """Watches a run's optimizers within its blocks."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        state_of: Callable[[], dict[str, Any]],
    ) -> None:
        """Watch these.

        Args:
            module: its parameters and its modules' extra state belong to the run, too.
            optimizers: whose steps change what a block began with.
            state_of: returns everything that a block that runs again must have.
        """
        self._state_of = state_of
        self._optimizers = optimizers
        self._is_in_block = False
        self._parameters = list(module.parameters())
        self._with_extra = [
            each
            for each in module.modules()
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state
        ]
        self._learning = _LEARNING
        self._changing: set[int] = set()
        self._copies: dict[int, torch.Tensor] = {}
        self._marks: list[tuple[int, int]] = []
        self._early: set[int] = set()
        self._extra: list[Any] = []
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
        copied = range(len(self._parameters)) if self._learning else self._changing
        self._copies = {i: self._parameters[i].detach().clone() for i in copied}
        self._marks = [_mark(parameter) for parameter in self._parameters]
        self._extra = [copy.deepcopy(m.get_extra_state()) for m in self._with_extra]

    def end_block(self) -> None:
        """Release the copies of a block that is committed."""
        if self._is_in_block and not self.began:
            self._learn()
        self._learning = max(self._learning - 1, 0)
        self._release()

    @torch.no_grad()
    def undo(self) -> bool:
        """Set a lost block's own changes of parameters back, before its first step.

        Return false if one of them was not copied.
        """
        changed = self._early if self.began else self._changed()
        for i, value in self._copies.items():
            self._parameters[i].copy_(value)
        for module, extra in zip(self._with_extra, self._extra, strict=True):
            module.set_extra_state(extra)
        is_undone = self.before is not None or changed <= self._copies.keys()
        self._release()
        return is_undone

    def _release(self) -> None:
        self._is_in_block, self.before = False, None
        self._copies, self._marks, self._extra = {}, [], []

    def _changed(self) -> set[int]:
        """Return which parameters were written since the block began, as far as seen.

        What is written by ``parameter.data`` in place shows in the copy only.
        """
        now = [_mark(parameter) for parameter in self._parameters]
        return {i for i, mark in enumerate(now) if mark != self._marks[i]}

    def _learn(self) -> None:
        self._early = self._changed()
        self._changing |= self._early
        if self._learning:
            self._changing |= {
                i
                for i, value in self._copies.items()
                if not torch.equal(self._parameters[i], value)
            }

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_in_block:
            return
        given = [*args, *kwargs.values()]  # args[0] is the optimizer
        closure = next((each for each in given if each is not optimizer), None)
        if not self.began:
            self._learn()
        if not self.began and (len(self._optimizers) > 1 or closure is not None):
            self.before = copy_of(self._state_of())
        self.began += 1

    def _after_step(self, *_: Any) -> None:
        if self._is_in_block:
            self.ended += 1


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a parameter is written, or its memory replaced."""
    version = 0 if parameter.is_inference() else parameter._version  # noqa: SLF001
    return version, parameter.data_ptr()
