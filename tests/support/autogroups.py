"""Whether the kernel gives each new session a task group of its own."""

from __future__ import annotations

from pathlib import Path

_SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")


def has_autogroups() -> bool:
    return _SWITCH.exists() and _SWITCH.read_text().strip() == "1"
