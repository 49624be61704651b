"""What a check of layers by computing depends on, besides what forward reads.

# Note [A check is valid while what it ran is unchanged]
Layers are checked once, after their capture, and then trusted. What they run as it is
may change later, without another forward: code that a backward calls reads other
values, one of PyTorch's functions or the forward of one of its classes or modules is
replaced, or the program calls the model within a mode of its own, or with hooks on
saved tensors. Each step
compares these with what they were, which takes a few calls; where they differ the
layers are checked again.
"""

from __future__ import annotations

import operator
from itertools import islice
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from stretto.burst.tracing.freezing import may_read_users

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from stretto.burst.tracing.backward_reads import Place
    from stretto.burst.tracing.watching import Watch

_C: Any = torch._C  # noqa: SLF001
_saved_hooks: Any = _C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001
_calls_of = operator.attrgetter("forward", "__call__")
_own_forward = operator.methodcaller("get", "forward")

_functions = vars(nn.functional)
_of_torch, _of_tensors = vars(torch), vars(torch.Tensor)
_known_of_torch = len(_of_torch)  # those that are loaded on demand come after

Around = tuple[Any, ...]


def _functions_now() -> tuple[list[Any], list[Any], list[Any]]:
    """Return PyTorch's functions, which a program may replace."""
    return (
        list(_functions.values()),
        list(islice(_of_torch.values(), _known_of_torch)),
        list(_of_tensors.values()),
    )


def around_now() -> Around:
    """Return what of the program's own operations pass through in this thread.

    These are modes of PyTorch's functions and operators, by their classes, and hooks on
    saved tensors, by their code.
    """
    saved = _saved_hooks(True)  # noqa: FBT003
    if not (saved or _C._len_torch_function_stack() or _C._len_torch_dispatch_stack()):  # noqa: SLF001
        return ()
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    found: list[Any] = [type(mode) for mode in modes]
    found += (getattr(hook, "__code__", hook) for hook in saved or ())
    return tuple(x for x in found if may_read_users(_module_of(x)))


def _module_of(what: Any) -> str:
    if (file := getattr(what, "co_filename", None)) is not None:
        is_torch = file.startswith(torch.__path__[0])
        return "torch" if is_torch else ""
    return str(getattr(what, "__module__", ""))


@final
class Proven:
    """What the last check of a capture's layers depends on.

    Args:
        module: the model.
        watch: what backwards read; None if nothing.
        active: hooks of modules that changed gradients.
        changing: names of hooks on values that change their own state.
    """

    def __init__(
        self,
        module: nn.Module,
        watch: Watch | None,
        active: Iterable[Place],
        changing: Collection[str],
    ) -> None:
        self.changing = frozenset(changing)
        self.watch = watch
        self.active = frozenset(active)
        self.around = {around_now()}
        self._functions = _functions_now()
        parts = list(module.modules())
        self._kinds = list(dict.fromkeys(map(type, parts)))
        self._calls = list(map(_calls_of, self._kinds))
        self._held = list(map(vars, parts))
        self._own = list(map(_own_forward, self._held))

    def changed(self) -> str | None:
        """Return what is no longer as it was, or None."""
        inside = self.changed_inside()
        if inside is None and around_now() not in self.around:
            return "a mode, or hooks on saved tensors"
        return inside

    def changed_inside(self) -> str | None:
        """Return what is no longer as it was, apart from modes; or None."""
        if _functions_now() != self._functions:
            return "a function of PyTorch"
        if list(map(_calls_of, self._kinds)) != self._calls:
            return "the forward of a class"
        if list(map(_own_forward, self._held)) != self._own:
            return "the forward of a module"
        return None if self.watch is None else self.watch.changed()
