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
all are copied. If a lost block has changed another one, it can't run again. The same
holds for what else ranks give each other, such as a loss with a buffer (`OtherState`).
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils import _pytree as pytree

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
        others: Sequence[Any],
        state_of: Callable[[], dict[str, Any]],
    ) -> None:
        """Watch these.

        Args:
            module: its parameters and its modules' extra state belong to the run, too.
            optimizers: whose steps change what a block began with.
            others: what else ranks give each other: has ``state_dict`` and
                ``load_state_dict``.
            state_of: returns everything that a block that runs again must have.
        """
        self._state_of = state_of
        self._optimizers = optimizers
        self._others = [OtherState(each) for each in others]
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
        for other in self._others:
            other.begin_block(learns=bool(self._learning))

    def end_block(self) -> None:
        """Release the copies of a block that is committed."""
        if self._is_in_block and not self.began:
            self._learn()
        for other in self._others:
            other.end_block(learns=bool(self._learning))
        self._learning = max(self._learning - 1, 0)
        self._release()

    @torch.no_grad()
    def undo(self) -> bool:
        """Set a lost block's own changes back, those before its first step.

        Return false if one of what it changed was not copied.
        """
        changed = self._early if self.began else self._changed()
        for i, value in self._copies.items():
            self._parameters[i].copy_(value)
        for module, extra in zip(self._with_extra, self._extra, strict=True):
            module.set_extra_state(extra)
        is_undone = self.before is not None or changed <= self._copies.keys()
        others = [other.undo() for other in self._others]
        self._release()
        return is_undone and all(others)

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


@final
class OtherState:
    """Sets the state of an object back to that before a lost block."""

    def __init__(self, value: Any) -> None:
        """Prepare for an object with ``state_dict`` and ``load_state_dict``."""
        self._value = value
        self._changes = False
        self._has_marks = True
        """Whether marks are equal while values are: not if it returns copies."""

        self._copy: Any = None
        self._began: Any = None
        self._marks: list[Any] = []

    def begin_block(self, *, learns: bool) -> None:
        """Begin a block; in the first ones learn whether blocks change the state."""
        self._copy = self._began = None
        if not (learns or self._changes or self._has_marks):
            return
        state = self._value.state_dict()
        self._marks = _marks_of(state)
        if learns or self._changes:
            self._copy = copy_of(state)
        if learns:
            self._began = state  # no other tensor gets its memory meanwhile

    def end_block(self, *, learns: bool) -> None:
        """End a block that is committed."""
        if learns and self._copy is not None:
            now = self._value.state_dict()
            is_same = _is_equal(self._copy, copy_of(now))
            self._changes = self._changes or not is_same
            if is_same and _marks_of(now) != self._marks:
                self._has_marks = False
        self._copy = self._began = None

    def undo(self) -> bool:
        """Undo a lost block; return false if it changed what was not copied."""
        if self._copy is not None:
            self._value.load_state_dict(self._copy)
            self._copy = None
            return True
        return not self._has_marks or _marks_of(self._value.state_dict()) == self._marks


def _marks_of(state: Any) -> list[Any]:
    """Return what changes when a state is written, as far as that is known."""
    return [
        _mark(leaf) if isinstance(leaf, torch.Tensor) else _content_of(leaf)
        for leaf in pytree.tree_leaves(state)
    ]


def _content_of(value: Any) -> Any:
    """Return what is equal for objects of equal content, and else differs."""
    if isinstance(value, _PLAIN):
        return value
    try:
        return hashlib.sha256(pickle.dumps(value)).digest()
    except Exception:  # noqa: BLE001 - whatever an object's own code raises
        return type(value)


def _is_equal(one: Any, two: Any) -> bool:
    """Return whether two copies of a state are equal."""
    ones, kind = pytree.tree_flatten(one)
    twos, other = pytree.tree_flatten(two)
    if kind != other:
        return False
    for a, b in zip(ones, twos, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
                return False
            if not torch.equal(a.to_dense(), b.to_dense()):
                return False
        elif _content_of(a) != _content_of(b):
            return False
    return True


_PLAIN = int | float | complex | str | bytes | bool | None


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a parameter is written, or its memory replaced."""
    version = 0 if parameter.is_inference() else parameter._version  # noqa: SLF001
    has_storage = parameter.layout is torch.strided
    return version, parameter.data_ptr() if has_storage else 0
