"""Refuse hooks of all modules that were registered later and change a result.

# Note [Hooks of all modules]
PyTorch calls hooks such as those of ``register_module_forward_hook`` for each module.
Layers of PyTorch's own run as they are, with these hooks, and changes are noticed when
they happen: see Note [Later hooks] in `later_hooks`. The operations of all other
modules were recorded, and no module is called. So a hook of all modules that is
registered after the capture is tried: the model runs forward and backward on a few
random rows, with other values of its parameters, and the hook is called for those
modules. One that changes something is refused. As it may decide by state, what it
reads is compared in each step, and it is tried again after a change. One that may
decide by what it changes itself, such as a counter, is refused.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, final

from stretto.burst.checks.later_hooks import LaterHook, ObservedHook
from stretto.burst.hooks import HOOKS_OF_ALL, place_of
from stretto.burst.tracing.proof import run_module
from stretto.burst.tracing.reads import Reads
from stretto.burst.tracing.recorder import is_leaf
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from stretto.burst.checks.hook_use import HookUse
    from stretto.burst.checks.stale_guard import StaleParameterGuard
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.burst.tracing.watching import Watch

_Hooks = dict[tuple[str, int], Any]


@final
class LaterHooksOfAllModules:
    """Tries later hooks of all modules, see Note [Hooks of all modules].

    Args:
        module: the user's.
        hooks: the model's.
        stale_guard: opened meanwhile.
    """

    def __init__(
        self, module: nn.Module, hooks: HookUse, stale_guard: StaleParameterGuard
    ) -> None:
        self._module = module
        self._hooks = hooks
        self._stale_guard = stale_guard
        self._known: _Hooks = {}
        self._watch: Watch | None = None
        self._error: StrettoError | None = None

    def __call__(
        self, graph: LayerGraph, examples: Sequence[Tensor]
    ) -> StrettoError | None:
        """Return the error of a hook that changes something; local to this rank.

        Args:
            graph: a capture, which knows the model's arguments.
            examples: the tensors of the example input.
        """
        later = self._hooks.later_of_all()
        if later == self._known and not (self._watch and self._watch.changed()):
            return self._error
        self._known, self._watch, self._error = later, None, None
        root = self._module
        inner = {p for p in root.modules() if p is not root and not is_leaf(p, root)}
        if later and inner:
            try:
                self._try(graph, examples, inner)
            except StrettoError as exc:
                self._error = exc
            except Exception as exc:  # noqa: BLE001 - of the program's hook
                text = (str(exc).splitlines() or [""])[0]
                self._error = StrettoError(
                    f"{self._places()}: a hook of all modules was registered after the "
                    "burst model was built, and can't be tried on random rows "
                    f"({type(exc).__name__}: {text}): register it before building "
                    "BurstParallel"
                )
        return self._error

    def _places(self) -> str:
        return ", ".join(place_of(h).rstrip(": ") for h in self._known.values())

    def _try(
        self, graph: LayerGraph, examples: Sequence[Tensor], inner: set[nn.Module]
    ) -> None:
        reads = Reads(self._module)
        first: Watch | None = None
        for _ in range(2):  # the second shows what hooks themselves change
            with (
                self._stale_guard.opened(),
                self._tried(reads, inner),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # of hooks for inputs without gradients
                run_module(graph, self._module, examples)
            if first is None:
                first = reads.watch_of_backward()
        assert first is not None  # noqa: S101
        written = first.all_changed()
        for name, key in written.items():
            if line := reads.line_deciding_by(key):
                raise StrettoError(
                    f"{line}: a hook of all modules was registered after the burst "
                    f"model was built. It reads {name!r} and changes it in each call, "
                    "so it may change what modules return at any time: register it "
                    "before building BurstParallel, or let it return nothing"
                )
        self._watch = first.without(written)

    @contextlib.contextmanager
    def _tried(self, reads: Reads, inner: set[nn.Module]) -> Iterator[None]:
        """Observe later hooks for some modules, and call them for no others."""
        for (kind, number), hook in self._known.items():
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            later = LaterHook(hook, f"the hook {name} of all modules")
            tried = ObservedHook(_HookWithNotedReads(hook, reads), kind, _ignore, later)
            HOOKS_OF_ALL[kind][number] = _HookOfSomeModules(tried, inner)
        try:
            yield
        finally:
            for (kind, number), hook in self._known.items():
                HOOKS_OF_ALL[kind][number] = hook


@final
class _HookWithNotedReads:
    """A hook; what it reads is noted."""

    def __init__(self, hook: Any, reads: Reads) -> None:
        self._hook, self._reads = hook, reads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._reads.noted():
            return self._hook(*args, **kwargs)


@final
class _HookOfSomeModules:
    """A hook of all modules, which is called for some of them."""

    def __init__(self, hook: ObservedHook, inner: set[nn.Module]) -> None:
        self._hook, self._inner = hook, inner

    def __call__(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._hook(part, *args, **kwargs) if part in self._inner else None


def _ignore(_kind: type, _is_changed: bool) -> None:  # noqa: FBT001
    pass
