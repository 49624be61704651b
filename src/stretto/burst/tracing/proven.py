"""The inputs of a check of layers by computing, besides those that forward reads.

# Note [A check is valid while what it ran is unchanged]
Layers are checked once, after their capture, and then trusted. What they run as it is
may change later, without another forward: code that a backward calls reads other
values, one of PyTorch's functions or the forward of one of its classes or modules is
replaced, or the program calls the model within a mode of its own, or with hooks on
saved tensors. Each step compares these with what they were, which takes a few calls;
where they differ the layers are checked again.
"""

from __future__ import annotations

import operator
from itertools import islice
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from stretto.burst.tracing.around import around_now

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from stretto.burst.tracing.around import Around
    from stretto.burst.tracing.backward_reads import Place
    from stretto.burst.tracing.watching import Watch

    Trained = tuple[bool, ...]

_calls_of = operator.attrgetter("forward", "__call__")
_own_forward = operator.methodcaller("get", "forward")

_functions = vars(nn.functional)
_of_torch, _of_tensors = vars(torch), vars(torch.Tensor)
_known_of_torch = len(_of_torch)  # those that are loaded on demand come after


def _functions_now() -> tuple[list[Any], list[Any], list[Any]]:
    """Return PyTorch's functions, which a program may replace."""
    return (
        list(_functions.values()),
        list(islice(_of_torch.values(), _known_of_torch)),
        list(_of_tensors.values()),
    )


@final
class Proven:
    """The inputs of the last check of a capture's layers.

    Args:
        module: the model.
        watch: what backwards read; None if nothing.
        active: hooks of modules that changed gradients.
        changing: names of hooks on values that change their own state.
        before: what was around before the check; what it changed is not compared.
        behavior: what ranks compare, see `behavior`.
    """

    def __init__(
        self,
        module: nn.Module,
        watch: Watch | None,
        active: Iterable[Place],
        changing: Collection[str],
        before: Around,
        behavior: float = 0.0,
    ) -> None:
        self._behavior = behavior
        self.changing = frozenset(changing)
        self.watch = watch
        self.active = frozenset(active)
        around = around_now()
        self._counting = {
            (number, key)
            for number, ((_, one), (_, two)) in enumerate(
                zip(before, around, strict=False)
            )
            for key, _ in {*one} ^ {*two}
        }
        self.around = {self._settled(around)}
        self._functions = _functions_now()
        # A backward of the user's may give or withhold gradients of what is unfrozen.
        self._parameters = [] if watch is None else list(module.parameters())
        self._trained = {id(p) for p in self._parameters if p.requires_grad}
        self._needed = tuple(p.requires_grad for p in module.parameters())
        parts = list(module.modules())
        self._kinds = list(dict.fromkeys(map(type, parts)))
        self._calls = list(map(_calls_of, self._kinds))
        self._held = list(map(vars, parts))
        self._own = list(map(_own_forward, self._held))

    def behavior_with(self, trained: Trained) -> float:
        """Return what ranks compare while these parameters are trained; 0 if unknown.

        Gradients are part of it, and the check had those of the parameters that were
        trained then. Ranks may have checked at different times.
        """
        return self._behavior if trained == self._needed else 0.0

    def changed(self) -> str | None:
        """Return what is no longer as it was, or None."""
        inside = self.changed_inside()
        if inside is None and self._settled(around_now()) not in self.around:
            return "a mode, or hooks on saved tensors"
        return inside

    def _settled(self, around: Around) -> Around:
        return tuple(
            (what, tuple(one for one in held if (number, one[0]) not in self._counting))
            for number, (what, held) in enumerate(around)
        )

    def changed_inside(self) -> str | None:
        """Return what is no longer as it was, apart from modes; or None."""
        if _functions_now() != self._functions:
            return "a function of PyTorch"
        if list(map(_calls_of, self._kinds)) != self._calls:
            return "the forward of a class"
        if list(map(_own_forward, self._held)) != self._own:
            return "the forward of a module"
        if any(
            p.requires_grad and id(p) not in self._trained for p in self._parameters
        ):
            return "a parameter that was frozen"
        return None if self.watch is None else self.watch.changed()
