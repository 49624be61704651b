"""Hooks of all modules that `torch.compile` does not compile.

# Note [Hooks that compiled code must not have]
Dynamo compiles the hooks that are there when it compiles a module. One that it can't
compile leaves the module uncompiled for good, and one that it can compile is a guard:
the module is compiled again when the hook is removed. So these hooks are removed while
Dynamo compiles, and called in eager code only: a program that is observed compiles what
it would compile otherwise. Where Dynamo does not report its compilations, for instance
after `torch._dynamo.reset`, they return at once in code that is compiled.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, final

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from stretto.measure.hook_warnings import QuietHooks

if TYPE_CHECKING:
    from collections.abc import Callable

disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001


def in_eager(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a module's hook that is not called in compiled code."""

    def run(*args: Any, **kwargs: Any) -> None:
        hook(*args, **kwargs)

    eager = disable_dynamo(run)

    def called(*args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            eager(*args, **kwargs)

    return called


@final
class EagerHooks:
    """Calls hooks before and after each module's forward, until `remove`.

    Args:
        called: gets the module and its positional arguments.
        returned: gets the module, its positional arguments and its output.
    """

    def __init__(
        self, called: Callable[..., None], returned: Callable[..., None]
    ) -> None:
        self._called, self._returned = in_eager(called), in_eager(returned)
        self._quiet = QuietHooks()
        self._handles: list[Any] = []
        self._is_removed = False
        dynamo = sys.modules.get("torch._dynamo")  # loaded by the first torch.compile
        self._handler: Any = getattr(dynamo, "callback_handler", None)
        if self._handler is not None:
            self._handler.register_start_callback(self._suspend)
            self._handler.register_end_callback(self._resume)
        self._resume()

    def remove(self) -> None:
        """Remove the hooks."""
        self._is_removed = True
        self._suspend()
        if self._handler is not None:
            with contextlib.suppress(ValueError):  # Dynamo was reset
                self._handler.remove_start_callback(self._suspend)
            with contextlib.suppress(ValueError):
                self._handler.remove_end_callback(self._resume)
            self._handler = None
        self._quiet.remove()

    def _suspend(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _resume(self, *_: object) -> None:
        if not self._is_removed and not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._called),
                register_module_forward_hook(self._returned),
            ]
