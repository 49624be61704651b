"""Functions of PyTorch that read a tensor's memory without asking its class.

# Note [Guards only while something is pending]
These functions read addresses, or keep a tensor's implementation, where neither
``__torch_function__`` nor ``__torch_dispatch__`` is asked. From a backward until all of
its buckets are finished, each is replaced by one that first finishes what is among its
arguments. At other times PyTorch is unchanged. ``tests/unit/runtime/forward`` has the
table of what else was tried.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stretto.runtime.forward.lazy import real_gradients
from stretto.runtime.forward.pending import finish_all_in

if TYPE_CHECKING:
    from collections.abc import Callable

_FUNCTIONS = (
    ("torch._C", "_to_dlpack"),
    ("torch._C", "_to_dlpack_versioned"),
    ("torch.utils.dlpack", "to_dlpack"),
    ("torch._C", "_pickle_save"),
    ("torch._C", "_data_address"),
    ("torch._C", "_tensor_impl_raw_handle"),
    ("torch._C", "_swap_tensor_impl"),
    ("torch._C._aoti", "unsafe_alloc_void_ptr_from_tensor"),
    ("torch._C._aoti", "unsafe_alloc_void_ptrs_from_tensors"),
    ("torch._C._autograd", "_get_data_attr"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
)
"""Modules and names, as they are looked up when they are called."""

_RECORDERS = (
    ("torch._C", "_create_function_from_trace"),
    ("torch._C", "_create_function_from_trace_with_dict"),
    ("torch._C", "_create_graph_by_tracing"),
    ("torch.jit._recursive", "create_script_module"),
    ("torch.jit._recursive", "create_script_module_impl"),
    ("torch", "compile"),
)
"""Functions that keep tensors in C++, also those of modules and closures.

``torch.compile`` imports TorchDynamo, whose beginning is seen only afterwards.
"""

_MISSING: Any = object()

_lock = threading.Lock()
_users: dict[int, User] = {}
_before: list[tuple[Any, str, Any]] = []


class User(Protocol):
    """Something that is pending."""

    def finish_all(self, *, keep_hooks: bool = False) -> None:
        """Finish it."""

    def finish_to_compile(self) -> None:
        """Finish it, because TorchDynamo begins to compile."""


def watch(user: User) -> None:
    """Let these functions finish what they get, until no user is left."""
    with _lock:
        _users[id(user)] = user
        _watch_compiler()
        if not _before:
            _replace()


def release(user: User) -> None:
    """End that for one user."""
    with _lock:
        _users.pop(id(user), None)
        if not _users:
            while _before:
                place, name, value = _before.pop()
                if value is _MISSING:
                    delattr(place, name)
                else:
                    setattr(place, name, value)


def _watch_compiler() -> None:
    """Learn of compilations from now on, which see classes of tensors."""
    found: Any = sys.modules.get("torch._dynamo.callback")
    handler = getattr(found, "callback_handler", None)
    # torch._dynamo.reset() forgets it.
    if handler is not None and _compilation_started not in handler.start_callbacks:
        handler.register_start_callback(_compilation_started)


def _compilation_started(*_: Any) -> None:
    for user in list(_users.values()):
        user.finish_to_compile()


def _replace() -> None:
    for module, name in _FUNCTIONS:
        place = sys.modules.get(module)
        function = getattr(place, name, None)
        if function is not None:
            _set(place, name, _asking(function))
    for module, name in _RECORDERS:
        place = sys.modules.get(module)
        function = getattr(place, name, None)
        if function is not None:
            _set(place, name, _finishing(function))
    base: Any = torch._C.TensorBase  # noqa: SLF001
    _set(torch.Tensor, "data", property(base.data.__get__, _assign_data))
    make: Any = _asking(base._make_subclass)  # noqa: SLF001
    _set(torch.Tensor, "_make_subclass", staticmethod(make))


def _set(place: Any, name: str, value: Any) -> None:
    _before.append((place, name, vars(place).get(name, _MISSING)))
    setattr(place, name, value)


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ask(*args: Any, **kwargs: Any) -> Any:
        finish_all_in(args)
        finish_all_in(kwargs.values())
        return function(*real_gradients(args), **real_gradients(kwargs))

    return ask


def _finishing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def finish(*args: Any, **kwargs: Any) -> Any:
        for user in list(_users.values()):
            user.finish_all(keep_hooks=True)
        return function(*args, **kwargs)

    return finish


def _assign_data(self: torch.Tensor, value: Any) -> None:
    finish_all_in((value,))
    base: Any = torch._C.TensorBase  # noqa: SLF001
    base.data.__set__(self, real_gradients(value))
