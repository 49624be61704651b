"""This machine's devices, found without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stretto.errors import SpecError

CPU, CUDA, EXCLUSIVE = "cpu", "cuda", "exclusive"
KINDS = (CPU, CUDA, EXCLUSIVE)
"""Processors, GPUs, or emulated devices without preemption, see
`stretto.background.devices`."""

_DEVICES = Path("/dev")


def num_gpus(folder: Path = _DEVICES) -> int:
    """Return how many NVIDIA GPUs this machine shows."""
    return sum(
        1 for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)
    )


def local_devices(number: int | None, kind: str | None) -> list[str]:
    """Return names of devices.

    Args:
        number: how many; ``None``: all GPUs, or one per processor.
        kind: one of `KINDS`; ``None``: GPUs if there are enough.

    Raises:
        SpecError: this machine has fewer GPUs.
    """
    gpus = num_gpus()
    if kind is None:
        kind = CUDA if gpus >= (number or 1) else CPU
    if kind == CUDA:
        if not gpus or (number or 0) > gpus:
            raise SpecError(
                f"{number or 1} GPUs were requested, this machine shows {gpus}: ask "
                "for fewer, or for --kind cpu"
            )
        number = number or gpus
    return [
        f"{kind}:{index}" for index in range(number or len(os.sched_getaffinity(0)))
    ]
