"""Communication backends of lanes: one contract, one module per backend.

A backend is found by its name: those below, then those of `register`, then those that
installed packages offer as entry points of the group ``stretto.backends``.
docs/how-to/add-a-backend.md describes how to write one.

- `base`: the contract (shared, for instance by `backends` and `shared_memory`).
- `gloo`: connections of its own per lane (for `backends` and `hierarchical`).
- `nccl`: communicators (for `backends`).
- `nccl_settings`: NCCL's variables (for `nccl`).
- `local`: shared memory between ranks of one host (for `backends`).
- `local_lanes`: open lanes through shared memory (for `hierarchical` and `local`).
- `local_collectives`: collectives through shared memory (for `hierarchical_lane`,
  `local` and `local_lanes`).
- `host_work`: threads and works in Python (for `hierarchical_lane` and
  `local_collectives`).
- `shared_memory`: the memory itself, and waits in it (for `local_collectives` and
  `local_lanes`).
- `hierarchical`: shared memory within each host and Gloo across hosts (for `backends`).
- `hierarchical_lane`: its collectives (for `hierarchical`).
"""

from __future__ import annotations

import os

from stretto import variable_names
from stretto.errors import PlanMismatch
from stretto.lazy_names import imported
from stretto.plugins import installed_names, load_class
from stretto.runtime.backends.base import AbstractBackend

_OWN = {
    "gloo": "stretto.runtime.backends.gloo:GlooBackend",
    "nccl": "stretto.runtime.backends.nccl:NcclBackend",
    "local": "stretto.runtime.backends.local:LocalBackend",
    "hierarchical": "stretto.runtime.backends.hierarchical:HierarchicalBackend",
}
"""Classes by name; the first for a type of device is the usual one."""

ENTRY_POINTS = "stretto.backends"
"""Group of entry points; each is a subclass of `AbstractBackend`."""


ON_HOST = "gloo"
"""The backend for values on the CPU, such as agreements, whatever the gradients use."""

_loaded: dict[str, AbstractBackend] = {}


def register(backend: AbstractBackend) -> None:
    """Make a backend known under its name in this process; every rank must call it.

    Raises:
        PlanMismatch: the name is one of stretto's own, or the backend has no name.
    """
    name = getattr(backend, "name", "")
    if name in _OWN or not name or not isinstance(backend, AbstractBackend):
        raise PlanMismatch(
            f"cannot register {backend!r} as a backend: it must be an AbstractBackend "
            f"whose name is not one of {', '.join(_OWN)}."
        )
    _loaded[name] = backend


def names() -> tuple[str, ...]:
    """Return the names of all backends."""
    known = dict.fromkeys((*_OWN, *_loaded))
    return (*known, *installed_names(ENTRY_POINTS, besides=known))


def supported(name: str) -> bool:
    """Return whether plans can run on a backend."""
    return name in _OWN or name in _loaded or name in installed_names(ENTRY_POINTS)


def get(name: str) -> AbstractBackend:
    """Return a backend by its name, stretto's own before an installed one.

    Raises:
        PlanMismatch: plans can't run on it.
        SpecError: its package does not load.
    """
    if name not in _loaded:
        _loaded[name] = _class_of(name)()
    return _loaded[name]


def _class_of(name: str) -> type[AbstractBackend]:
    if name in _OWN:
        own: type[AbstractBackend] = imported(_OWN[name])
        return own
    installed = load_class(ENTRY_POINTS, name, AbstractBackend)  # type: ignore[type-abstract]
    if installed is None:
        raise PlanMismatch(
            f"this runtime does not support plans on backend {name!r} yet: use "
            f"{' or '.join(names())}, or pass plan=None."
        )
    return installed


def of_group(name: str) -> AbstractBackend | None:
    """Return a process group's backend; None if plans can't run on it."""
    return get(name) if supported(name) else None


def for_device(device_type: str) -> AbstractBackend:
    """Return the usual backend that sends tensors of a type of device.

    Raises:
        PlanMismatch: there is no such backend.
    """
    for name in names():
        if get(name).device_type == device_type:
            return get(name)
    raise PlanMismatch(f"no backend sends tensors on {device_type}")


def on_this_machine() -> dict[str, AbstractBackend]:
    """Return stretto's usual backend of each type of device that this machine has."""
    found: dict[str, AbstractBackend] = {}
    for backend in map(get, _OWN):
        if backend.device_type not in found and backend.is_available():
            found[backend.device_type] = backend
    return found


def process_group_backend() -> str:
    """Return the argument of `init_process_group` for all devices of this machine.

    With several types of device, such as ``cpu:gloo,cuda:nccl``, the tensors' device
    selects the backend.
    """
    usual = on_this_machine()
    if len(usual) == 1:
        return next(iter(usual.values())).name
    return ",".join(f"{device}:{backend.name}" for device, backend in usual.items())


def for_lanes(usual: str, chosen: str | None = None) -> str:
    """Return the name of the backend that lanes use.

    Args:
        usual: The process group's own backend.
        chosen: The user's argument; ``None`` leaves the choice to the environment
            variable ``STRETTO_LANE_BACKEND``, and that, unless it is set, to ``usual``.
    """
    return chosen or os.environ.get(variable_names.LANE_BACKEND) or usual
