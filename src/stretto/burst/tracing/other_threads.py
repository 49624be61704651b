"""Let other threads use a module's own tensors while it holds others.

# Note [Tensors for other threads]
A capture gives modules other parameters and buffers: without values, or with perturbed
ones. Another thread may call these modules meanwhile, to evaluate or to save. So what
it reads as an attribute of a module, or by ``parameters()`` and ``state_dict()``, is
what the module held before. Autograd's threads, which `threading` does not know, run a
part of the capture's backward and get what the capture gets. If there is no other
thread, nothing is replaced.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_Place = tuple[int, str]
"""The id of a dictionary of parameters or buffers, and a name in it."""

_before: dict[_Place, Tensor] = {}
"""What modules held before; places that are not replaced are missing."""

_lent: dict[int, Tensor] = {}
"""Tensors with the values from before, by the ids of those that may be lent others."""

_users: list[int] = []
"""The thread of each running exchange."""


def is_other(thread: int) -> bool:
    """Return whether this is a thread of the program's, and not ``thread``."""
    now = threading.get_ident()
    return now != thread and now in threading._active  # type: ignore[attr-defined]  # noqa: SLF001


@contextlib.contextmanager
def kept_for_others() -> Iterator[None]:
    """Serve other threads with what modules held before, where `note` knows it."""
    thread = threading.get_ident()
    if _users or len(threading._active) < 2:  # type: ignore[attr-defined]  # noqa: SLF001
        _users.append(thread)
        try:
            yield
        finally:
            _users.pop()
        return
    kind: Any = nn.Module
    names = ("__getattr__", "_named_members", "_save_to_state_dict")
    get, members, save = own = [kind.__dict__[name] for name in names]

    def read(module: nn.Module, name: str) -> Any:
        if not is_other(thread):
            return get(module, name)
        for held in ("_parameters", "_buffers"):
            found = _before.get((id(module.__dict__.get(held)), name))
            if found is not None:
                return _lent.get(id(found), found)
        found = get(module, name)
        return _lent.get(id(found), found)

    def listed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for full, found in members(module, *args, **kwargs):
            if not is_other(thread):
                yield full, found
                continue
            owner, _, name = full.rpartition(".")
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            if prefix:
                owner = owner.removeprefix(prefix).removeprefix(".")
            yield full, read(module.get_submodule(owner), name)

    def saved(module: nn.Module, target: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        if not is_other(thread):
            save(module, target, prefix, keep_vars)
            return
        held = module._parameters, module._buffers  # noqa: SLF001
        own_of = [
            {
                key: None if value is None else read(module, key)
                for key, value in h.items()
            }
            for h in held
        ]
        twin = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        twin.__dict__["_parameters"], twin.__dict__["_buffers"] = own_of
        save(twin, target, prefix, keep_vars)

    _users.append(thread)
    for name, method in zip(names, (read, listed, saved), strict=True):
        setattr(kind, name, method)
    try:
        yield
    finally:
        for name, method in zip(names, own, strict=True):
            setattr(kind, name, method)
        _users.pop()


def note(held: dict[str, Any], name: str, tensor: Tensor) -> bool:
    """Record a tensor that another one replaces; return whether it is the first."""
    place = id(held), name
    is_first = place not in _before
    _before.setdefault(place, tensor)
    return is_first


def forget(held: dict[str, Any], name: str) -> None:
    """Record that a tensor is back in its place."""
    _before.pop((id(held), name), None)


@contextlib.contextmanager
def values_kept_for_others(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Serve other threads with tensors that have these ones' memory of now.

    For a check that lends tensors other values some time after it begins, so that calls
    in other threads, which hold the tensors themselves, have ended by then.
    """
    noted = []
    try:
        for tensor in tensors if len(threading._active) > 1 else ():  # type: ignore[attr-defined]  # noqa: SLF001
            if type(tensor) not in (Tensor, nn.Parameter) or id(tensor) in _lent:
                continue
            memory, needs = tensor.data, tensor.requires_grad
            is_parameter = isinstance(tensor, nn.Parameter)
            twin = nn.Parameter(memory, requires_grad=needs) if is_parameter else memory
            _lent[id(tensor)] = twin
            noted.append(tensor)
        yield
    finally:
        for tensor in noted:
            del _lent[id(tensor)]
