"""Become the foreground of the device that the environment names."""

from __future__ import annotations

import os

from stretto import variable_names
from stretto.errors import StrettoError
from stretto.logs import get_logger

_log = get_logger(__name__)


_is_opened = False


def open_named() -> None:
    """Become the foreground of the named device, if there is one, once in a process.

    Also count the process's steps for a cluster, if the environment says so.

    ``{rank}`` and ``{local_rank}`` in the name stand for this process's. If the device
    is not available, one line says why, and training continues without a background.
    """
    global _is_opened
    if os.environ.get(variable_names.STEP_COUNTS):
        # Loads torch, which has been loaded by a program that trains.
        from stretto.background.step_reports import report_steps

        report_steps()
    if _is_opened or not os.environ.get(variable_names.FOREGROUND):
        return
    _is_opened = True
    # Most programs name no device.
    from stretto.background.foreground import Foreground, is_opened

    device = device_name(os.environ[variable_names.FOREGROUND])
    if is_opened(device):
        return
    try:
        Foreground(device)
    except (StrettoError, OSError) as exc:
        _log.warning("no background can run beside this process: %s", exc)


def warn_of_no_foreground() -> None:
    """Log a line in a process that trains, but marks nothing on the named device."""
    if not os.environ.get(variable_names.FOREGROUND) or _is_opened:
        return
    # Most programs name no device.
    from stretto.background.foreground import has_opened

    if has_opened():
        return
    _log.warning(
        "this process has trained without what marks its steps and waits (stretto's "
        "DDP, BurstParallel, Horovod interface), so a background takes %s for free: "
        "mark them with a stretto.Foreground",
        device_name(os.environ[variable_names.FOREGROUND]),
    )


def device_name(pattern: str) -> str:
    """Return a device's name with ``{rank}`` and ``{local_rank}`` filled in.

    They are those of torchrun's variables, or else of Horovod's launchers.
    """
    prefix = "" if "RANK" in os.environ else "HOROVOD_"
    for name in ("rank", "local_rank"):
        value = os.environ.get(prefix + name.upper(), "0")
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern
