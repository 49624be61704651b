"""What passes from the `stretto` process to the supervisor of a lab."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.lab.spec import LabSpec

TIMEOUT_STATUS = 124
"""Exit status of a lab that its time limit ended, as of timeout(1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a command in a lab, as it passes from `stretto` to here."""

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
        """The lab itself."""
        return LabSpec(
            hosts=self.hosts,
            ranks_per_host=self.ranks_per_host,
            link_bytes_per_s=self.link_bytes_per_s,
            flow_bytes_per_s=self.flow_bytes_per_s,
        )
