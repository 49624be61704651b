"""Record what hooks on gradients and backwards of the user's read and change.

# Note [Backwards that read state]
A check of a backward holds for the values that its code reads: a factor that is zero
now may let samples mix once it is not. While forward is recorded no backward runs, so
what backwards read is recorded while layers are checked with values. A capture is valid
while these values stay as they are, and a forward's backward is refused if one has
changed since that forward.

What this code itself changes, such as a list of norms, can't be compared. If it may
decide what a function returns, the model is refused. A hook of a module that changed
nothing in the check may not change anything later, whatever it reads: see Note [Later
hooks] in `stretto.burst.checks.later_hooks`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.utils import _pytree as pytree

from stretto.burst.hooks import HOOKS, HOOKS_OF_ALL
from stretto.burst.tracing.around import modes_now
from stretto.burst.tracing.reads import Reads
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from stretto.burst.tracing.watching import Watch

Place = tuple[int, str, int]
"""Where a hook is: the id of its module, or 0 for all modules; kind and number."""

BACKWARD_HOOKS = HOOKS[2:]


def backward_hooks(
    parts: Iterable[nn.Module],
) -> Iterator[tuple[int, str, dict[int, Any]]]:
    """Yield each group of hooks on gradients: the first two parts of a place, hooks."""
    for kind in BACKWARD_HOOKS:
        if HOOKS_OF_ALL[kind]:
            yield 0, kind, HOOKS_OF_ALL[kind]
    for part in parts:
        for kind in BACKWARD_HOOKS:
            if held := getattr(part, kind):
                yield id(part), kind, held


@final
class BackwardReads:
    """The reads of one model's backwards, see Note [Backwards that read state]."""

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._reads = Reads(module)
        self._early: Watch | None = None
        self._written: dict[str, Any] = {}
        self._in_forward = 0
        """Number of functions that the first forward called."""
        self.active: set[Place] = set()
        """Hooks of modules that have changed a gradient."""

    @contextlib.contextmanager
    def noted(self, output: Tensor) -> Iterator[None]:
        """Record what the backward of an output reads."""
        if output.device.type != "cpu":  # autograd has a thread for each device
            output.register_hook(self._trace_thread)
        with self._reads.noted():
            yield
        self._early = self._reads.watch_of_backward(in_check=True)

    @contextlib.contextmanager
    def noted_around(self) -> Iterator[None]:
        """Record what modes and hooks on saved tensors around a forward read.

        What they change themselves, such as a count of calls, is not watched.
        """
        self._reads.objects += [x for x in modes_now() if x not in self._reads.objects]
        with self._reads.noted():
            yield
        self._in_forward = self._in_forward or self._reads.num_functions()

    def _trace_thread(self, _grad: Tensor) -> None:
        self._reads.trace_thread()

    @contextlib.contextmanager
    def observed(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Record which hooks of modules change gradients."""
        kept = [
            (held, dict(held), place, kind)
            for place, kind, held in backward_hooks(parts)
        ]
        for held, hooks, place, kind in kept:
            for number, hook in hooks.items():
                held[number] = _Observed(hook, (place, kind, number), self.active)
        try:
            yield
        finally:
            for held, hooks, _, _ in kept:
                held.update(hooks)

    def require_unchanged(self) -> None:
        """Require that no function decides by a value that it changes.

        Values that have changed since the first backward are not watched.

        Raises:
            SpecError: one may; the message names its line.
        """
        if self._early is not None:
            self._written.update(self._early.all_changed())
        for name, key in self._written.items():
            if line := self._reads.line_deciding_by(key, self._in_forward):
                raise SpecError(
                    f"{line}: a backward of {self._name} reads {name!r} and changes it "
                    "in each call, so what it does to gradients may change at any "
                    "time: change it in the training loop, between steps"
                )

    def watch(self) -> Watch | None:
        """Return the values as they are now; None without any."""
        found = self._reads.watch_of_backward().without(self._written)
        return found or None


@final
class _Observed:
    def __init__(self, hook: Any, place: Place, active: set[Place]) -> None:
        self.hook = hook
        self._place, self._active = place, active

    def __call__(self, part: nn.Module, *grads: Any) -> Any:
        given = [x for x in pytree.tree_leaves(grads) if isinstance(x, Tensor)]
        before = [x._version for x in given]  # noqa: SLF001
        found = self.hook(part, *grads)
        leaves = [id(x) for x in pytree.tree_leaves(found)]
        is_same = found is None or leaves == [
            id(x) for x in pytree.tree_leaves(grads[0])
        ]
        if not is_same or [x._version for x in given] != before:  # noqa: SLF001
            self._active.add(self._place)
        return found
