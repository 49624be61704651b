"""Communication backends of lanes: one contract, one module per backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.errors import PlanMismatch
from stretto.runtime.backends.gloo import GlooBackend
from stretto.runtime.backends.nccl import NcclBackend

if TYPE_CHECKING:
    from stretto.runtime.backends.base import AbstractBackend

_BACKENDS: dict[str, AbstractBackend] = {
    backend.name: backend for backend in (GlooBackend(), NcclBackend())
}

ON_HOST = GlooBackend.name
"""The backend for values on the CPU, such as agreements, whatever the gradients use."""


def supported(name: str) -> bool:
    """Return whether plans can run on a backend."""
    return name in _BACKENDS


def get(name: str) -> AbstractBackend:
    """Return a backend by its name in torch.distributed.

    Raises:
        PlanMismatch: plans can't run on it.
    """
    if name not in _BACKENDS:
        raise PlanMismatch(
            f"this runtime does not support plans on backend {name!r} yet: use "
            f"{' or '.join(_BACKENDS)}, or pass plan=None."
        )
    return _BACKENDS[name]


def for_device(device_type: str) -> AbstractBackend:
    """Return the backend that sends tensors of a type of device."""
    return next(b for b in _BACKENDS.values() if b.device_type == device_type)
