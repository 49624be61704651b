"""Read a rank's place in the job, and settings, from the environment.

Launchers set a rank's place with torchrun's names or with Horovod's. Settings have
Horovod's names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto import variable_names
from stretto.logs import get_logger
from stretto.rank_variables import (
    Place,
    decimal_number,
    launched_place,
    whole_number,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = get_logger(__name__)

_MIN_UNIT_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class HorovodSettings:
    """Settings with Horovod's names; ``None`` means the library's own default."""

    unit_bytes: int | None = None
    """HOROVOD_FUSION_THRESHOLD."""

    cycle_s: float | None = None
    """HOROVOD_CYCLE_TIME, which is in milliseconds."""

    lanes: int | None = None
    """HOROVOD_NUM_NCCL_STREAMS, on any device."""

    known_requests: int | None = None
    """HOROVOD_CACHE_CAPACITY."""

    stall_s: float | None = None
    """HOROVOD_STALL_CHECK_TIME_SECONDS; infinite with HOROVOD_STALL_CHECK_DISABLE."""

    timeout_s: float | None = None
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, in which 0 means no limit."""

    dynamic_process_sets: bool = False
    """HOROVOD_DYNAMIC_PROCESS_SETS."""

    timeline: str | None = None
    """HOROVOD_TIMELINE: the file."""

    mark_cycles: bool = False
    """HOROVOD_TIMELINE_MARK_CYCLES."""


_HOROVOD_NAMES = (
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "HOROVOD_CROSS_RANK",
)
"""In the order of `stretto.rank_variables.NAMES`."""

_PLACE_NAMES = (
    *(*_HOROVOD_NAMES, "HOROVOD_CROSS_SIZE"),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
)

_SETTING_NAMES = (
    *("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_NUM_NCCL_STREAMS"),
    *("HOROVOD_CACHE_CAPACITY", "HOROVOD_STALL_CHECK_TIME_SECONDS"),
    *("HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    *("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_TIMELINE"),
    "HOROVOD_TIMELINE_MARK_CYCLES",
)

_SILENT_NAMES = (
    # Variables of launchers and of Horovod's build: safe to ignore.
    *("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME"),
    *("HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE", "HOROVOD_GPU_BROADCAST"),
    *("HOROVOD_GPU_ALLGATHER", "HOROVOD_WITH_PYTORCH", "HOROVOD_WITH_GLOO"),
    *("HOROVOD_WITHOUT_GLOO", "HOROVOD_WITH_MPI", "HOROVOD_WITHOUT_MPI"),
    *("HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITHOUT_MXNET", "HOROVOD_LOG_LEVEL"),
    *("HOROVOD_LOG_HIDE_TIME", "HOROVOD_ELASTIC", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    *("HOROVOD_GLOO_IFACE", "HOROVOD_MIXED_INSTALL"),
)

_OWN_PREFIX = "HOROVOD_STRETTO_"
"""Prefix of names that only this library has."""


def place(environment: Mapping[str, str]) -> Place | None:
    """Return a rank's place, or ``None`` if no launcher has set it.

    torchrun's names take precedence over Horovod's.

    Raises:
        SpecError: a value is not a number, or a rank is outside of its size.
    """
    found = launched_place(environment)
    if found is None:
        found = launched_place(environment, _HOROVOD_NAMES)
    address = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if found is None or not address or "MASTER_ADDR" in environment:
        return found
    port = whole_number(environment, "HOROVOD_GLOO_RENDEZVOUS_PORT")
    return replace(found, address=address, port=found.port if port is None else port)


def settings(environment: Mapping[str, str]) -> HorovodSettings:
    """Return the settings.

    Raises:
        SpecError: a value is not a number, or breaks its rule.
    """
    unit_bytes = whole_number(environment, "HOROVOD_FUSION_THRESHOLD")
    if unit_bytes is not None and unit_bytes < _MIN_UNIT_BYTES:
        _log.warning(
            "HOROVOD_FUSION_THRESHOLD=%d is raised to %d: tensors are also cut into "
            "parts of that size",
            unit_bytes,
            _MIN_UNIT_BYTES,
        )
        unit_bytes = _MIN_UNIT_BYTES
    cycle_ms = decimal_number(environment, "HOROVOD_CYCLE_TIME")
    stall_s = decimal_number(environment, "HOROVOD_STALL_CHECK_TIME_SECONDS") or None
    if _flag(environment, "HOROVOD_STALL_CHECK_DISABLE"):
        stall_s = float("inf")
    return HorovodSettings(
        unit_bytes=unit_bytes,
        cycle_s=None if cycle_ms is None else cycle_ms / 1000,
        lanes=whole_number(environment, "HOROVOD_NUM_NCCL_STREAMS"),
        known_requests=whole_number(environment, "HOROVOD_CACHE_CAPACITY") or None,
        stall_s=stall_s,
        timeout_s=decimal_number(environment, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
        or None,
        dynamic_process_sets=_flag(environment, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        timeline=environment.get("HOROVOD_TIMELINE") or None,
        mark_cycles=_flag(environment, "HOROVOD_TIMELINE_MARK_CYCLES"),
    )


def present_ranks(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks train already, for a rank that joins them, else ``None``.

    Raises:
        SpecError: the value is not a number.
    """
    return whole_number(environment, variable_names.JOINS)


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Return the HOROVOD_ names that have no effect here, in alphabetical order."""
    known = {*_PLACE_NAMES, *_SETTING_NAMES, *_SILENT_NAMES}
    return sorted(
        name
        for name in environment
        if name.startswith("HOROVOD_")
        and name not in known
        and not name.startswith(_OWN_PREFIX)
    )


def _flag(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").strip().lower() not in ("", "0", "false")
