"""Devices that a foreground and a background share: one contract, one module each.

`open_device` opens one by its name, for `foreground` and `lease`.

- `base`: the contract (for `cpu`, `cuda` and `exclusive`).
- `cpu`: processors, with `priority` (for `devices`).
- `cuda`: GPUs (for `devices`).
- `exclusive`: an emulated device without preemption (for `devices`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.lazy_names import imported

if TYPE_CHECKING:
    from stretto.background.devices.base import AbstractDevice

_OWN = {
    "cpu": "stretto.background.devices.cpu:CpuDevice",
    "cuda": "stretto.background.devices.cuda:CudaDevice",
    "exclusive": "stretto.background.devices.exclusive:ExclusiveDevice",
}
"""Classes by the part of a device's name before the colon."""


def open_device(name: str) -> AbstractDevice:
    """Return a device by its name, for instance ``cpu``, ``cuda:0``, ``exclusive:a``.

    Raises:
        SpecError: stretto has no such device.
    """
    kind = name.partition(":")[0]
    if kind not in _OWN:
        raise SpecError(
            f"a device is one of {', '.join(_OWN)}, with a number or a name after a "
            f"colon; got {name!r}"
        )
    found: type[AbstractDevice] = imported(_OWN[kind])
    return found(name)
