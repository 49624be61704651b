"""The program's own modes and hooks around a call of the model."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from stretto.burst.tracing.freezing import may_read_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_C: Any = torch._C  # noqa: SLF001
_saved_hooks: Any = _C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001

Around = tuple[Any, ...]
"""Each mode's class or hook's code, with the numbers and texts that it holds."""


def saved_hooks_now() -> Any:
    """Return the functions of this thread's hooks on saved tensors, or None."""
    return _saved_hooks(True)  # noqa: FBT003


def dispatch_modes_now() -> list[Any]:
    """Return this thread's modes of operators, without those for infrastructure."""
    if not _C._len_torch_dispatch_stack():  # noqa: SLF001
        return []
    return list(_get_current_dispatch_mode_stack())


def is_of_user(what: Any) -> bool:
    """Return whether a mode, or one of the hooks on saved tensors, is the user's."""
    if isinstance(what, tuple):
        return any(map(is_of_user, what))
    if isinstance(what, TorchDispatchMode):
        return may_read_users(type(what).__module__)
    return what is not None and may_read_users(
        _module_of(getattr(what, "__code__", what))
    )


def around_now() -> Around:
    """Return what of the program's own operations pass through in this thread.

    These are modes of PyTorch's functions and operators, by their classes, and hooks on
    saved tensors, by their code; each with its numbers and texts.
    """
    saved = saved_hooks_now()
    if not (saved or _C._len_torch_function_stack() or _C._len_torch_dispatch_stack()):  # noqa: SLF001
        return ()
    found: list[Any] = [(type(mode), _plain_of(mode)) for mode in modes_now()]
    found += (
        (getattr(hook, "__code__", hook), _plain_of(hook))
        for hook in saved or ()
        if is_of_user(hook)
    )
    return tuple(found)


def modes_now() -> list[Any]:
    """Return the user's modes around this thread's operations."""
    return [mode for mode in _all_modes() if may_read_users(type(mode).__module__)]


def _all_modes() -> list[Any]:
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


_OF_MODES = frozenset(vars(TorchDispatchMode()))
_PLAIN = (bool, int, float, str, type(None))


def state_of(mode: Any) -> dict[str, Any]:
    """Return the attributes of a mode that are its class's own."""
    held = getattr(mode, "__dict__", {})
    return {key: value for key, value in held.items() if key not in _OF_MODES}


def _plain_of(what: Any) -> tuple[Any, ...]:
    """Return the numbers and texts that a mode or function holds."""
    if isinstance(what, types.FunctionType):
        cells = _contents(what.__closure__ or ())
        values = enumerate((*cells, *(what.__defaults__ or ())))
        named = (what.__kwdefaults__ or {}).items()
        return tuple(one for one in (*values, *named) if isinstance(one[1], _PLAIN))
    held = state_of(what).items()
    return tuple((key, value) for key, value in held if isinstance(value, _PLAIN))


def _contents(cells: Iterable[types.CellType]) -> Iterator[Any]:
    for cell in cells:
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents


def _module_of(what: Any) -> str:
    if (file := getattr(what, "co_filename", None)) is not None:
        is_torch = file.startswith(torch.__path__[0])
        return "torch" if is_torch else ""
    return str(getattr(what, "__module__", ""))
