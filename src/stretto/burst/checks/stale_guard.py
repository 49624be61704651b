"""Guard a rank's values of layers that it does not run against being read.

Their values are those of an earlier refresh. If they are not current, every read
raises: by ``state_dict``, the module itself, or an exponential average. See Note
[Guarded parameters] in `stretto.burst.checks.guarded_tensors`.

# Note [Changes by hand]
A program may change current values by hand, the same on all ranks: clamp them, for
instance. What it writes looks like the step of an optimizer of its own, which changes
the layers that this rank runs and leaves the others behind. The versions of
parameters distinguish the two: a change by hand writes to the layers of other ranks as
often as to those of this rank. Operations in place, such as ``clamp_``, are therefore
allowed on current values, also while a program has only come to half of them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.burst.checks.guarded_tensors import Leftover, guards_of, plain_class
from stretto.burst.checks.separable import is_known
from stretto.burst.tracing.source_lines import line_of_program
from stretto.errors import StrettoError
from stretto.runtime.torch_compat import is_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from stretto.runtime.agreement import Ranks


@final
class StaleParameterGuard:
    """Tracks whether one module's values on one rank are current."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        tell: Callable[[StrettoError], None],
        zeroes: Callable[[nn.Parameter], None],
    ) -> None:
        """Prepare.

        Args:
            module: the user's.
            ranks: of the model.
            tell: called with each error that is raised here.
            zeroes: called with parameters whose gradient the program may zero, though
                this rank has none.
        """
        self._ranks = ranks
        self._tell = tell
        self._zeroes = zeroes
        self.is_stepping = False
        """Whether an optimizer's step runs."""
        self._own: tuple[nn.Parameter, ...] = ()
        self._has_foreign = False
        """Whether there are tensors of layers that do not run here."""
        self._guarded: list[tuple[torch.Tensor, type[torch.Tensor]]] = []
        """Each guarded tensor with its own class."""
        self._leftover = Leftover()
        self._guard, self._buffer_guard = guards_of(self, self._leftover)
        self._foreign_parameters: tuple[nn.Parameter, ...] = ()
        self._versions: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        """Versions of the parameters that run here and of the others, on arrival."""
        self._is_unstepped = False
        """Whether there may be gradients that no known optimizer has applied."""
        self._has_operands = False
        """Whether others' parameters were changed by tensors since they arrived."""
        self._open = 0
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        for part in module.modules():
            part.register_state_dict_pre_hook(_Callback(self, "check"))
        loaded = _Callback(self, "loaded", self._leftover)
        module.register_load_state_dict_post_hook(loaded)

    @property
    def is_stale(self) -> bool:
        """Whether values may have changed since the other ranks' parameters arrived."""
        return self._leftover.is_stale

    @is_stale.setter
    def is_stale(self, value: bool) -> None:
        self._leftover.is_stale = value

    def runs(
        self,
        own: Sequence[torch.Tensor],
        foreign: Sequence[tuple[str, Sequence[torch.Tensor]]],
    ) -> None:
        """Record the tensors of layers that run here, and other layers with theirs.

        Of buffers only those that forward changes. A tensor that another burst model
        over the same module guards becomes this one's.
        """
        self.release()
        for tensor in (*own, *(t for _, tensors in foreign for t in tensors)):
            if (kind := plain_class(tensor)) is not type(tensor):
                tensor.__class__ = kind
        self._own = tuple(t for t in own if isinstance(t, nn.Parameter))
        self._foreign_parameters = tuple(
            t for _, tensors in foreign for t in tensors if isinstance(t, nn.Parameter)
        )
        self._versions = None
        mine = {id(tensor) for tensor in own}
        others = [
            (name, held)
            for name, tensors in foreign
            if (held := [t for t in tensors if id(t) not in mine])
        ]
        self._has_foreign = bool(others)
        if others:
            self._leftover.hold(self._ranks.name(self._ranks.rank), others)
        guards = {nn.Parameter: self._guard, torch.Tensor: self._buffer_guard}
        for _, tensors in foreign:
            for tensor in tensors:
                kind = type(tensor)
                if kind in guards and id(tensor) not in mine:
                    tensor.__class__ = guards[kind]
                    self._guarded.append((tensor, kind))

    def release(self) -> None:
        """Make the guarded tensors ordinary ones again."""
        for tensor, kind in self._guarded:
            if type(tensor) in (self._guard, self._buffer_guard):
                tensor.__class__ = kind
        self._guarded = []

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Allow reading, for code that sends or captures parameters."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def refreshed(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Record that all parameters, and these optimizers' states, have arrived."""
        self.is_stale = False
        self._has_operands = False
        self._versions = _versions(self._own), _versions(self._foreign_parameters)
        self._is_unstepped &= any(_has_gradient(p) for p in self._own)
        for optimizer in optimizers:
            self._stepped.discard(optimizer)

    def changed(self) -> None:
        """Record that layers' values may now differ from those that this rank holds.

        Called at the same time on all ranks, because a rank may hold nothing that
        changes.
        """
        self.is_stale |= self._ranks.size > 1

    def loaded(self, missing: Sequence[str]) -> None:
        """Record that a state was loaded; only a complete one makes values current."""
        if missing:
            return
        self.is_stale = False
        self._versions = None

    def check(self, part: nn.Module) -> None:
        """Require that all values are current, of code that uses those of a part.

        Raises:
            StrettoError: naming a layer of which they are not.
        """
        self._check(part, is_of_all=True)

    def _check(self, values: Any, *, is_of_all: bool, is_change: bool = False) -> None:
        if not self._has_foreign or self._open:
            return
        own, foreign = self._writes()
        # A program's own optimizer is only seen by what it writes. Where there is
        # nothing left to apply, a write changes current values, on all ranks equally.
        # See Note [Changes by hand].
        is_step = (
            any(own)
            and self._is_unstepped
            and (self._has_operands or (set(own) != set(foreign) and not is_change))
        )
        if self.is_stale or is_step:
            raise self._reported(
                f"{self._missing(values)} and has no current parameters of it: let "
                "all ranks call full_state_dict(), or refresh() after optimizer.step()"
            )
        # Except where only the parameters that this rank runs were written: by an
        # optimizer whose state it has for these alone, such as a schedule-free one. In
        # a loop over all parameters, the others may be about to follow.
        replaces = self._has_replacing_optimizer()
        is_behind = any(own) and (
            set(own) != set(foreign) if replaces else not any(foreign)
        )
        if is_behind and not is_change and (is_of_all or replaces):
            raise self._reported(
                f"{self._missing(values)}, whose parameters were not changed with the "
                "others after the last refresh(), as an optimizer's eval() or train() "
                "does: let all ranks call refresh() after the change, or "
                "refresh(optimizer) before it"
            )

    def _missing(self, values: Any) -> str:
        if isinstance(values, nn.Module):
            values = [*values.parameters(), *values.buffers()]
        return self._leftover.missing(values)

    def _writes(self) -> tuple[list[int], list[int]]:
        """Return how often own and others' parameters were written since they came."""
        if self._versions is None:
            return [], []
        now = _versions(self._own), _versions(self._foreign_parameters)
        own, foreign = (
            [a - b for a, b in zip(later, before, strict=True)]
            for later, before in zip(now, self._versions, strict=True)
        )
        return own, foreign

    def _has_replacing_optimizer(self) -> bool:
        return any(
            not is_known(found) and _does_more_than_step(type(found))  # type: ignore[arg-type]
            for found in self._stepped
        )

    def check_change(self, values: Any, *, is_by_values: bool) -> None:
        """Require that guarded parameters may be changed in place.

        ``is_by_values``: by other tensors, which may be gradients.

        Raises:
            StrettoError: its values are not current.
        """
        if not self._open:
            self._has_operands |= is_by_values
            self.check_reading(values, is_change=True)

    def check_reading(
        self, values: Any, *, is_of_all: bool = False, is_change: bool = False
    ) -> None:
        """Require that guarded parameters may be read.

        ``is_of_all``: by code that does not only change parameters one by one;
        ``is_change``: only to be changed in place.

        Raises:
            StrettoError: its values are not current.
        """
        if self._has_foreign and not self._open and is_tracing():
            raise self._reported(
                "torch.compile reads all parameters in code that it compiles, but a "
                "rank has current values only of the layers that it runs: call "
                "optimizer.step() and other code that uses parameters outside of the "
                "compiled function"
            )
        try:
            self._check(values, is_of_all=is_of_all, is_change=is_change)
        except StrettoError as exc:
            raise StrettoError(
                f"{exc}. For a penalty on parameters use the optimizer's weight_decay "
                "or add its gradient to .grad where that is not None"
            ) from None

    def _reported(self, text: str) -> StrettoError:
        """Return an error of which the other ranks are informed (`burst.refusals`).

        It names the line of the program.
        """
        error = StrettoError(f"{line_of_program()}{text}")
        self._tell(error)
        return error

    def note_gradient(self, parameter: nn.Parameter, caller: FrameType) -> None:
        """Record that code asks for the gradient of a guarded parameter, or sets it.

        This rank has no such gradient. Code of PyTorch asks for gradients to use them,
        and to zero them in ``zero_grad`` only.
        """
        if not self._open and (
            caller.f_code.co_name == "zero_grad"
            or not (self.is_stepping or _is_library(caller.f_globals.get("__name__")))
        ):
            self._zeroes(parameter)

    # Optimizers.

    def backward_begins(self) -> None:
        """Record that parameters get gradients."""
        self.is_stepping = False
        self._is_unstepped = True
        self.changed()

    def before_step(self, optimizer: Optimizer) -> None:
        """Record that an optimizer of these parameters takes a step."""
        self._stepped.add(optimizer)
        self.changed()
        self._is_unstepped = False
        if all(known is not optimizer for known in self.optimizers()):
            self._optimizers.append(weakref.ref(optimizer))
            # A wrapper that does not initialize its base class returns the state of
            # the optimizer inside it.
            if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
                hook = _Callback(self, "check_optimizer")
                optimizer.register_state_dict_pre_hook(hook)

    def is_preparing(self, optimizer: Optimizer) -> bool:
        """Return whether a step only makes the state of all parameters.

        `torch.distributed.checkpoint` takes such a step: with gradients of 0 for all
        parameters, also of layers that do not run here, and a learning rate of 0.
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        # Reading a learning rate or a gradient may wait for an accelerator.
        return (
            not optimizer.state
            and all((p.grad is not None) == p.requires_grad for p in held)
            and not any(group.get("lr") for group in optimizer.param_groups)
            and not any(bool(p.grad.any()) for p in held if p.grad is not None)
        )

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have taken a step, in the order of their first."""
        return [found for known in self._optimizers if (found := known()) is not None]

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Require that an optimizer's state is complete.

        Raises:
            StrettoError: the current state of a layer is missing.
        """
        if self._has_foreign and not self._open and optimizer in self._stepped:
            held = [group["params"] for group in optimizer.param_groups]
            raise self._reported(
                f"{self._missing(held)} and has no current optimizer state of it: let "
                "all ranks call refresh(optimizer) after optimizer.step()"
            )


def _versions(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return tuple(parameter._version for parameter in parameters)  # noqa: SLF001


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _is_library(name: object) -> bool:
    return str(name).partition(".")[0] in ("torch", "stretto")


@functools.cache
def _does_more_than_step(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer has methods besides those of every optimizer.

    Such as ``eval``, which may replace parameters.
    """
    known = {name for base in Optimizer.__mro__ for name in vars(base)}
    return any(
        name not in known and name[:1] != "_" and isinstance(value, FunctionType)
        for base in kind.__mro__
        if base.__module__.partition(".")[0] != "torch"
        for name, value in vars(base).items()
    )


@final
class _Callback:
    """Calls a method while its object exists; a copied module's copy calls nothing."""

    def __init__(
        self,
        target: StaleParameterGuard | None,
        method: str,
        leftover: Leftover | None = None,
    ) -> None:
        self._target = None if target is None else weakref.ref(target)
        self._method = method
        self._leftover = leftover

    def __call__(self, *args: Any) -> None:
        target = None if self._target is None else self._target()
        if target is None:
            if self._leftover is not None and not args[1].missing_keys:
                self._leftover.is_stale = False
            return
        if self._method == "check_optimizer":
            target.check_optimizer(args[0])
        elif self._method == "loaded":
            target.loaded(args[1].missing_keys)
        else:
            target.check(args[0])

    def __reduce__(self) -> Any:
        return _Callback, (None, self._method)
