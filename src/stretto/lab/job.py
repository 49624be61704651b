"""Messages from the `stretto` process to the supervisor of a lab."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.lab.spec import LabSpec

TIMEOUT_STATUS = 124
"""Exit status of a lab that was ended by its time limit, as of timeout(1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a command in a lab, as `stretto` sends it to the supervisor."""

    hosts: int
    ranks_per_host: int
    link_bytes_per_s: float
    flow_bytes_per_s: float | None
    mode: str
    command: list[str]
    env: dict[str, str]
    tools_env: dict[str, str]
    master_port: int
    timeout_s: float | None
    grace_s: float
    logs: str | None
    parent_pid: int

    @property
    def spec(self) -> LabSpec:
        """Return the lab's specification."""
        return LabSpec(
            hosts=self.hosts,
            ranks_per_host=self.ranks_per_host,
            link_bytes_per_s=self.link_bytes_per_s,
            flow_bytes_per_s=self.flow_bytes_per_s,
        )
