"""Threads that may read parameters while another one trains.

# Note [Nothing is pending beside another thread]
A pending parameter changes its implementation in C++ when it is finished, and gradients
are exchanged. A thread that is inside an operator on one of them does not hold the
interpreter's lock, and would use what is no longer there. So nothing is pending
while a thread of the program runs beside the training, and a thread that is started
finishes everything first. Threads of this package and of libraries that only move data
or wait are no reason.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from typing import Any, Protocol

_HARMLESS = (
    "IPython",
    "_pydevd_bundle",
    "concurrent.futures.process",
    "debugpy",
    "execnet",
    "ipykernel",
    "jupyter_client",
    "logging.handlers",
    "mlflow",
    "multiprocessing.connection",
    "multiprocessing.managers",
    "multiprocessing.queues",
    "multiprocessing.resource_sharer",
    "pydevd",
    "ray",
    "stretto",
    "tensorboard",
    "tensorboardX",
    "torch._inductor",
    "torch.distributed.elastic",
    "torch.utils.data",
    "tornado",
    "tqdm",
    "wandb",
    "zmq",
)
"""Modules and packages whose threads read no parameters."""

_NAMES = "stretto-"
"""Begin of the names of this package's threads, wherever their function is."""


class _User(Protocol):
    """A model or step whose tensors may be pending."""

    def finish_for_thread(self) -> None:
        """Finish it, and leave parameters and gradients as they are without it."""


_users: weakref.WeakSet[_User] = weakref.WeakSet()
_start: Any = None
"""The function that starts a thread, while it is replaced."""


def other_thread() -> str | None:
    """Return which thread beside this one may read parameters, or ``None``."""
    if threading.active_count() == 1:
        return None
    me = threading.get_ident()
    found = [
        thread
        for thread in threading.enumerate()
        if thread.ident != me and not _is_harmless(thread)
    ]
    compiling = _compiling() if found else ()
    for thread in found:
        if thread not in compiling:
            return (
                f"thread {thread.name!r} runs beside the training, and may read "
                "parameters while they change"
            )
    return None


def _is_harmless(thread: threading.Thread) -> bool:
    if thread.name.startswith(_NAMES):
        return True
    kind = type(thread)
    module = kind.__module__
    if module == "threading":
        if kind is getattr(threading, "_DummyThread", None):
            return True  # a thread of C++, which had called Python once
        target = getattr(thread, "_target", None)
        module = getattr(target, "__module__", None) or ""
    return any(module == name or module.startswith(f"{name}.") for name in _HARMLESS)


def _compiling() -> set[threading.Thread]:
    """Return the threads of PyTorch's compiler, which stay after it has compiled."""
    found = set()
    functions = sys.modules.get("torch.utils._functools")
    pools = [getattr(functions, "_prefetch_executor", None)]
    compiler: Any = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(compiler, "AsyncCompile", None), "pool", None)
    if pool is not None and pool.cache_info().currsize:
        pools.append(pool())
    for one in pools:
        found |= set(getattr(one, "_threads", ()))
    return found


def attach(user: _User) -> None:
    """Finish something before each start of a thread."""
    global _start
    _users.add(user)
    if _start is None:
        place: Any = threading.Thread
        _start = place.start
        place.start = _finishing(_start)


def detach(user: _User) -> None:
    """End that; the function is restored with the last user."""
    global _start
    _users.discard(user)
    place: Any = threading.Thread
    replaced = getattr(place.start, "__wrapped__", None) is _start
    if not _users and _start is not None and replaced:
        place.start, _start = _start, None


def _finishing(start: Any) -> Any:
    @functools.wraps(start)
    def finish(self: threading.Thread) -> None:
        if _users and not _is_harmless(self):
            for user in list(_users):
                user.finish_for_thread()
        start(self)

    return finish
