"""Route calls of modules, functions and autocast through the running recorder."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class CallRecorder(Protocol):
    """What calls are routed through: an `OperationRecorder`."""

    _depth: int

    def called_with(self, tensors: Iterable[Tensor]) -> None:
        """Record the tensors with which the model is called."""

    def module(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run a module."""

    def function(
        self, call: Callable[..., Any], kind: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run an ``autograd.Function``."""

    def autocast_entered(self, entry: tuple[str, torch.dtype, bool, bool]) -> None:
        """Record that the module begins an autocast region."""

    def autocast_left(self) -> None:
        """Record that the module ends an autocast region."""


_active: list[CallRecorder] = []


def note_inputs(arguments: Any) -> None:
    """Pass the model's input tensors to the running recorder."""
    leaves = pytree.tree_leaves(arguments)
    for recorder in _active[-1:]:
        recorder.called_with(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _apply_code() -> types.CodeType:
    def outer() -> Any:
        __class__ = None

        def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ANN002, ANN003
            from stretto.burst.tracing.patching import applied

            return applied(cls, args, kwargs, __class__)

        return apply

    return outer().__code__  # type: ignore[no-any-return]


_original: list[Callable[..., Any]] = []


def applied(kind: Any, args: Any, kwargs: Any, _cell: Any) -> Any:
    """Serve `torch.autograd.Function.apply` while a forward is recorded."""
    return _active[-1].function(_original[-1], kind, args, kwargs)


@contextlib.contextmanager
def patched(recorder: CallRecorder) -> Iterator[None]:
    """Route calls of modules, functions and autocast through the recorder.

    The code of ``Function.apply`` is exchanged rather than the attribute, because
    programs keep bound ``apply`` methods.
    """
    module_call = nn.Module.__call__
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.module(module_call, module, args, kwargs)

    def entered(self: Any) -> Any:
        found = enter(self)  # type: ignore[no-untyped-call]
        if not recorder._depth:  # noqa: SLF001
            recorder.autocast_entered(
                (self.device, self.fast_dtype, self._enabled, self._cache_enabled)
            )
        return found

    def left(self: Any, *error: Any) -> Any:
        if not recorder._depth:  # noqa: SLF001
            recorder.autocast_left()
        return leave(self, *error)

    apply: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    code = apply.__code__
    original = types.FunctionType(
        code, apply.__globals__, "apply", apply.__defaults__, apply.__closure__
    )
    _original.append(original)
    _active.append(recorder)
    try:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]
        torch.autocast.__exit__ = left  # type: ignore[method-assign]
        apply.__code__ = _apply_code()
        yield
    finally:
        apply.__code__ = code
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        torch.autocast.__exit__ = leave  # type: ignore[method-assign]
        _active.pop()
        _original.pop()
