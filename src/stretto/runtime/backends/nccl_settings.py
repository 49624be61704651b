"""Variables and files that change what NCCL does, and what a plan needs of them."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import PlanMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CTA_VARIABLES = (
    "NCCL_MAX_CTAS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_NRINGS",
    "NCCL_CGA_CLUSTER_SIZE",
    "NCCL_CTA_POLICY",
)
"""They override the options of a communicator. Source: NCCL's
documentation of environment variables; ``NRINGS`` are the names before ``NCHANNELS``.
"""

OTHER_VARIABLES = ("NCCL_NET", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS")
"""They change the cost of a collective, but nothing that a plan sets."""

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

SYSTEM_FILE = Path("/etc/nccl.conf")


class OrderSetting(enum.Enum):
    """Action needed for lanes' kernels to start in one order on every rank."""

    FIXED = "nothing: it is set, or there is one lane"
    SET = "set the variable: NCCL has not read it yet"
    TOO_LATE = "warn: NCCL read it at its first launch, when it was not set"


def nccl_settings(
    environment: Mapping[str, str], read: Callable[[Path], str | None] | None = None
) -> dict[str, tuple[str, str]]:
    """Return each variable's value and its source, as NCCL will find it.

    NCCL reads the environment first, then the file that ``NCCL_CONF_FILE`` names or
    else ``~/.nccl.conf``, then ``/etc/nccl.conf``. Source: NCCL's documentation.
    """
    read = read or _read
    named = environment.get("NCCL_CONF_FILE")
    home = environment.get("HOME")
    own = Path(named) if named else Path(home) / ".nccl.conf" if home else None
    found = {
        name: (value, "the environment")
        for name, value in environment.items()
        if name.startswith("NCCL_") or name == CONNECTIONS
    }
    for path in (own, SYSTEM_FILE):
        text = None if path is None else read(path)
        for line in (text or "").splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.lstrip().startswith("#"):
                found.setdefault(name.strip(), (value.strip(), str(path)))
    return found


def check_settings(
    settings: Mapping[str, tuple[str, str]], *, sets_ctas: bool
) -> list[str]:
    """Return warnings about variables that change a plan's execution.

    Raises:
        PlanMismatch: the plan sets CTAs and a variable overrides them.
    """
    warnings = []
    for name in CTA_VARIABLES:
        if name not in settings:
            continue
        value, where = settings[name]
        if sets_ctas:
            raise PlanMismatch(
                f"the plan sets CTAs of its collectives, but {name}={value} in {where} "
                f"overrides them: unset {name}, or plan with resource null."
            )
        warnings.append(
            f"{name}={value} in {where} limits the CTAs of every collective"
        )
    warnings += [
        f"{name}={settings[name][0]} in {settings[name][1]} changes the cost of every "
        "collective: probe with it set"
        for name in OTHER_VARIABLES
        if name in settings
    ]
    if settings.get(CONNECTIONS, ("", ""))[0] == "1":
        warnings.append(
            f"{CONNECTIONS}=1 gives the device one queue: communication can't overlap "
            f"computation. Unset {CONNECTIONS}"
        )
    return warnings


def launch_order(
    settings: Mapping[str, tuple[str, str]], *, lanes: int, launched: bool
) -> OrderSetting:
    """Return how kernels of several communicators get one order on all ranks.

    A device chooses the order in which it starts kernels of different communicators,
    and two ranks that choose differently wait for each other forever once kernels do
    not all fit at once. With the variable set, NCCL keeps the order in which one host
    thread launched them, and still lets them overlap (since 2.26, on CUDA 12.3 and
    newer).
    Source: NCCL's documentation of ``NCCL_LAUNCH_ORDER_IMPLICIT``.

    Raises:
        PlanMismatch: the variable is 0, and the plan has several lanes.
    """
    if LAUNCH_ORDER in settings:
        value, where = settings[LAUNCH_ORDER]
        if value.strip() == "0" and lanes > 1:
            raise PlanMismatch(
                f"the plan has {lanes} lanes, but {LAUNCH_ORDER}=0 in {where} lets "
                "devices start their collectives in different orders, which can end "
                f"in a deadlock: unset {LAUNCH_ORDER}, or plan with 1 lane."
            )
        return OrderSetting.FIXED
    if lanes <= 1:
        return OrderSetting.FIXED
    return OrderSetting.TOO_LATE if launched else OrderSetting.SET


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
