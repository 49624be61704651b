"""Let a block run again after it, or an optimizer, has changed what it began with.

# Note [A block that is lost within or between optimizer steps]
A block runs again from the state before it. With one optimizer, whose step needs no
other rank, the optimizer's state is unchanged until that step, the block's last
operation. But an optimizer with a closure computes gradients within its step, so a rank
may be lost after it has changed parameters; and with two optimizers, such as a GAN's, a
rank may be lost between their steps. The state is copied before the first of such steps
in a block.

# Note [Everything else is copied in each block]
A program may change other things itself before that step: a momentum encoder in its
forward, a learning rate, a loss with a buffer. No mark shows every change: writes by
``.data``, NumPy views or extensions leave a tensor's version as it is, a ``state_dict``
may return new tensors each time, and what blocks change may depend on the step. So
parameters, the optimizers' options and what is in ``scheduler=`` and ``extra=`` are
copied at the beginning of each block, into memory that is kept. That takes as long as
reading and writing the parameters once: 13 ms of one core for 100 MB.

An optimizer's state is larger and is its step's own, so it is only watched: a lost
block that has changed it before the step can't run again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import operator
import pickle
from typing import TYPE_CHECKING, Any, final

import torch

from stretto.resume.snapshots import copy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
        self._parameters: list[torch.Tensor] = list(module.parameters())
        self._modules = list(module.modules())
        self._with_extra = [
            each
            for each in self._modules
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state
        ]
        self._kept = KeptCopies()
        self._copies: list[torch.Tensor] = []
        self._flags: tuple[list[bool], list[bool]] = [], []
        self._extra: list[Any] = []
        self._options: list[Options] = []
        self._options_before: list[Options] = []
        self._marks: tuple[list[Any], list[int]] = [], []
        self._has_early_change = False
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
        self._is_in_block, self._has_early_change = True, False
        self._copies = self._kept.of(self._parameters)
        self._flags = (
            [parameter.requires_grad for parameter in self._parameters],
            [module.training for module in self._modules],
        )
        self._extra = [copy.deepcopy(m.get_extra_state()) for m in self._with_extra]
        self._options = [Options(optimizer) for optimizer in self._optimizers]
        self._marks = self._marks_now()
        for other in self._others:
            other.begin_block()

    def end_block(self) -> None:
        """Release the copies of a block that is committed."""
        self._release()

    @torch.no_grad()
    def undo(self, load: Callable[[dict[str, Any]], None]) -> str | None:
        """Set a lost block's changes back.

        Args:
            load: takes what ``state_of`` has returned.

        Returns:
            Why that was not possible, or ``None``.
        """
        if self.before is None:
            self._note_early_change()
        else:
            for options in self._options_before:
                options.restore()
            load(self.before)
        uncopied = [other for other in self._others if not other.undo()]
        for parameter, value in zip(self._parameters, self._copies, strict=True):
            if parameter.shape != value.shape or parameter.dtype != value.dtype:
                parameter.data = value.clone()
            if parameter.is_inference():
                with torch.inference_mode():
                    parameter.copy_(value)
            else:
                parameter.copy_(value)
        for parameter, flag in zip(self._parameters, self._flags[0], strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        for module, mode in zip(self._modules, self._flags[1], strict=True):
            module.training = mode
        for module, extra in zip(self._with_extra, self._extra, strict=True):
            module.set_extra_state(extra)
        for options in self._options:
            options.restore()
        has_early_change = self._has_early_change
        self._release()
        if has_early_change:
            return "the state of an optimizer before optimizer.step()"
        return "what can't be copied in scheduler= or extra=" if uncopied else None

    def _release(self) -> None:
        self._is_in_block, self.before = False, None
        self._copies, self._extra, self._marks = [], [], ([], [])
        self._options, self._options_before = [], []
        for other in self._others:
            other.release()

    def _marks_now(self) -> tuple[list[Any], list[int]]:
        """Return what differs once an optimizer's state is changed, as far as seen."""
        values = [
            each
            for optimizer in self._optimizers
            for row in optimizer.state.values()
            if isinstance(row, dict)
            for each in row.values()
        ]
        try:
            return values, [each._version for each in values]  # noqa: SLF001
        except (AttributeError, RuntimeError):  # not all are tensors with a version
            return values, [_version_of(each) for each in values]

    def _note_early_change(self) -> None:
        """Note whether an optimizer's state was changed before its step."""
        (values, versions), (now, versions_now) = self._marks, self._marks_now()
        self._has_early_change = (
            len(values) != len(now)
            or versions != versions_now
            or any(map(operator.is_not, values, now))
        )

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_in_block:
            return
        given = [*args, *kwargs.values()]  # args[0] is the optimizer
        closure = next((each for each in given if each is not optimizer), None)
        if not self.began and (len(self._optimizers) > 1 or closure is not None):
            self._note_early_change()
            self._options_before = [Options(each) for each in self._optimizers]
            self.before = copy_of(self._state_of())
        self._marks = [], []  # which hold what the step may replace
        self.began += 1

    def _after_step(self, *_: Any) -> None:
        if self._is_in_block:
            self.ended += 1


@final
class KeptCopies:
    """Copies tensors again and again, into memory that is kept."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._kept: list[torch.Tensor] = []
        self._kinds: Any = None
        """Sizes, types and devices of the copied tensors."""

    @torch.no_grad()
    def of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors, on their devices, valid until the next call."""
        kinds = (
            # Shapes that differ have other numbers, or can't be copied to each other.
            [tensor.numel() for tensor in tensors],
            [tensor.dim() for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.device for tensor in tensors],
            [type(tensor) for tensor in tensors],
        )
        if tensors and kinds == self._kinds:
            with contextlib.suppress(RuntimeError):
                torch._foreach_copy_(self._kept, tensors)
                return self._kept
        self._kept = [tensor.detach().clone() for tensor in tensors]
        is_plain = all(
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            for tensor in tensors
        )
        self._kinds = kinds if is_plain else None
        return self._kept

    def forget(self) -> None:
        """Let others have the copies."""
        self._kept, self._kinds = [], None


@final
class Options:
    """An optimizer's parameter groups, apart from the parameters' values."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy them."""
        self._optimizer = optimizer
        self._groups = [
            (
                group,
                list(group["params"]),
                [
                    (name, value, value if type(value) in _PLAIN else _copied(value))
                    for name, value in group.items()
                    if name != "params"
                ],
            )
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Set them back: also groups that were added, and values of tensors."""
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
        for group, parameters, options in self._groups:
            group["params"][:] = parameters
            for name in group.keys() - {name for name, _, _ in options} - {"params"}:
                del group[name]
            for name, value, copied in options:
                if isinstance(value, torch.Tensor):
                    value.copy_(copied)  # others may refer to it
                    group[name] = value
                else:
                    group[name] = copied


@final
class OtherState:
    """Sets the state of an object back to that before a lost block."""

    def __init__(self, value: Any) -> None:
        """Prepare for an object with ``state_dict`` and ``load_state_dict``."""
        self._value = value
        self._kept = KeptCopies()
        self._copy: Any = None
        self._stages: Any = None
        self._uncopied: list[Any] = []

    def begin_block(self) -> None:
        """Copy the state."""
        tensors: list[torch.Tensor] = []
        self._uncopied = []
        if isinstance(self._value, torch.amp.GradScaler):
            self._stages = _copied(self._value._per_optimizer_states)  # noqa: SLF001
        state = self._value.state_dict()
        _each_tensor(state, tensors.append)
        copies = iter(self._kept.of(tensors))
        self._copy = _copied(state, lambda _: next(copies), self._uncopied.append)

    def undo(self) -> bool:
        """Undo a lost block; return false if what it may have changed isn't copied."""
        if not _is_same(self._copy, self._value.state_dict()):
            self._kept.forget()  # the object may keep what it is given
            self._value.load_state_dict(self._copy)
        if self._stages is not None:
            # Which optimizers have stepped since the last update is in no state_dict.
            stages = self._value._per_optimizer_states  # noqa: SLF001
            stages.clear()
            stages.update(self._stages)
        return not self._uncopied

    def release(self) -> None:
        """Forget the block."""
        self._copy, self._stages, self._uncopied = None, None, []


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _version_of(value: Any) -> int:
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_counted else 0  # noqa: SLF001


def _ignore(_: Any) -> None:
    pass


def _each_tensor(value: Any, take: Callable[[torch.Tensor], None]) -> None:
    """Pass on each tensor of a state, in the order in which `_copied` copies them."""
    if isinstance(value, torch.Tensor):
        take(value)
    elif isinstance(value, dict):
        for each in value.values():
            _each_tensor(each, take)
    elif type(value) in (list, tuple):
        for each in value:
            _each_tensor(each, take)


def _copied(
    value: Any,
    copied: Callable[[torch.Tensor], torch.Tensor] = _clone,
    refuse: Callable[[Any], None] = _ignore,
) -> Any:
    """Return a copy of a state.

    Args:
        value: the state.
        copied: returns the copy of a tensor.
        refuse: called with an object that can't be copied; it is itself in the copy.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return copied(value)
    if isinstance(value, dict):
        result = copy.copy(value)  # keeps its class and a state_dict's metadata
        for key, each in value.items():
            result[key] = _copied(each, copied, refuse)
        return result
    if type(value) in (list, tuple):
        return type(value)(_copied(each, copied, refuse) for each in value)
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - whatever an object's own code raises
        refuse(value)
        return value


def _is_same(one: Any, two: Any) -> bool:
    """Return whether two states are known to be equal, bit for bit."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return _has_same_bits(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(
            _is_same(value, two[key]) for key, value in one.items()
        )
    if type(one) in (list, tuple):
        return len(one) == len(two) and all(map(_is_same, one, two))
    content = _content_of(one)
    return content is not None and content == _content_of(two)


def _has_same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype or one.device != two.device:
        return False
    if one.layout is not torch.strided or two.layout is not torch.strided:
        return False
    ones, twos = (each.detach().reshape(-1).view(torch.uint8) for each in (one, two))
    return torch.equal(ones, twos)


def _content_of(value: Any) -> bytes | None:
    """Return what is equal for objects of equal content, and else differs."""
    try:
        return hashlib.sha256(pickle.dumps(value)).digest()
    except Exception:  # noqa: BLE001 - whatever an object's own code raises
        return None


_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})
