"""Execute operations as outside of everything that a program has switched on."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Iterator

_c: Any = torch._C  # noqa: SLF001


def has_modes() -> bool:
    """Return whether modes change what this thread's operations do."""
    return bool(
        _c._len_torch_function_stack()  # noqa: SLF001
        or _c._len_torch_dispatch_stack()  # noqa: SLF001
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or _in_transform()
        or _c._get_tracing_state() is not None  # noqa: SLF001
        or torch.compiler.is_compiling()
    )


def _in_transform() -> bool:
    """Return whether this thread is in a transform of ``torch.func``."""
    functorch: Any = _c._functorch  # noqa: SLF001
    return functorch.peek_interpreter_stack() is not None


class _Inside(threading.local):
    """Whether this thread is undisturbed already."""

    now = False


_inside = _Inside()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Switch off gradients, modes, autocast, transforms and classes of tensors."""
    if _inside.now:
        yield
        return
    _inside.now = True
    try:
        yield from _switched_off()
    finally:
        _inside.now = False


def _switched_off() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if has_modes():
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.inference_mode(mode=False))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(_not_compiling())
            if _in_transform():
                stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.no_grad())
        stack.enter_context(_c.DisableTorchFunction())
        yield


@contextlib.contextmanager
def _not_compiling() -> Iterator[None]:
    """Run optimizers as outside of a compilation, and record nothing in a trace."""
    compiler: Any = torch.compiler
    compiling, trace = compiler._is_compiling_flag, _c._get_tracing_state()  # noqa: SLF001
    compiler._is_compiling_flag = False  # noqa: SLF001
    _c._set_tracing_state(None)  # noqa: SLF001
    try:
        yield
    finally:
        compiler._is_compiling_flag = compiling  # noqa: SLF001
        _c._set_tracing_state(trace)  # noqa: SLF001
