"""The specification of a lab, the jobs that it runs, and the environment of a rank."""

from __future__ import annotations

import enum
import ipaddress
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stretto import variable_names
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERFACE = "eth0"
"""Name of every host's interface in namespaces."""

SUBNET = ipaddress.ip_network("10.77.0.0/16")
"""Addresses inside the lab; they exist only in its namespaces."""

MAX_HOSTS = 64

MAX_RANKS_PER_HOST = 64

MIN_RATE_BYTES_PER_S = 12_500.0
"""Below this rate, the burst of a single segment takes many seconds."""

TIMEOUT_STATUS = 124
"""Exit status of a lab that was ended by its time limit, as of timeout(1)."""

_INHERITED_AWAY = ("TORCHELASTIC_", "PET_", "ROLE_")
"""Variables of an outer launcher that would mislead the ranks."""


class Mode(enum.Enum):
    """How the network is emulated."""

    AUTO = "auto"
    """Namespaces if they are available, otherwise paced."""

    NAMESPACES = "namespaces"
    """Link and flow caps between network namespaces."""

    PACED = "paced"
    """A cap per connection on loopback, none per link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """An emulated cluster of equal hosts around one switch."""

    hosts: int
    """Machines, 1 to 64."""

    ranks_per_host: int = 1
    """Processes on each machine."""

    link_bytes_per_s: float
    """Largest rate of one host, over all its connections."""

    flow_bytes_per_s: float | None = None
    """Largest rate of one connection in one direction; None: the whole link."""

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise SpecError(
                f"hosts must be 1 to {MAX_HOSTS}, got {self.hosts}", place=".hosts"
            )
        if not 1 <= self.ranks_per_host <= MAX_RANKS_PER_HOST:
            raise SpecError(
                f"ranks_per_host must be 1 to {MAX_RANKS_PER_HOST}, got "
                f"{self.ranks_per_host}",
                place=".ranks_per_host",
            )
        for name in ("link_bytes_per_s", "flow_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not MIN_RATE_BYTES_PER_S <= rate < float("inf"):
                raise SpecError(
                    f"{name} must be at least {MIN_RATE_BYTES_PER_S:g} (100 kbit/s), "
                    f"got {rate}",
                    place=f".{name}",
                )

    @property
    def num_ranks(self) -> int:
        """Return the number of processes in the whole lab."""
        return self.hosts * self.ranks_per_host

    @property
    def flow_cap_bytes_per_s(self) -> float:
        """Return the rate of one connection: the flow cap, at most the link."""
        if self.flow_bytes_per_s is None:
            return self.link_bytes_per_s
        return min(self.flow_bytes_per_s, self.link_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabJob:
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
    faults: list[str]
    steps: str | None
    """File of step counts, if there are faults."""

    @property
    def spec(self) -> LabSpec:
        """Return the lab's specification."""
        return LabSpec(
            hosts=self.hosts,
            ranks_per_host=self.ranks_per_host,
            link_bytes_per_s=self.link_bytes_per_s,
            flow_bytes_per_s=self.flow_bytes_per_s,
        )


def host_name(host: int) -> str:
    """Return the host name of ``host``."""
    return f"host{host}"


def host_address(host: int) -> str:
    """Return the address of ``host`` in namespaces: host 0 has 10.77.0.1."""
    return str(SUBNET[host + 1])


def hosts_file(spec: LabSpec) -> str:
    """Return the ``/etc/hosts`` that all hosts of a lab share."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for host in range(spec.hosts):
        address, name = host_address(host), host_name(host)
        # Mapped addresses too, so that a listener on IPv6 and IPv4 sees its peers.
        lines += [f"{address} {name}", f"::ffff:{address} {name}"]
    return "\n".join(lines) + "\n"


def shared_environment(
    base: Mapping[str, str], *, num_ranks: int, num_cores: int
) -> dict[str, str]:
    """Return the environment that all ranks share, made from the caller's.

    The caller's Python comes first on PATH, so that ``python train.py`` runs with the
    packages that stretto was started with.
    """
    env = {
        key: value for key, value in base.items() if not key.startswith(_INHERITED_AWAY)
    }
    # Not resolved: a virtual environment's python is a link to a path outside it.
    here = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join([here, env.get("PATH", os.defpath)])
    env.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_ranks)))
    # Rank 0 writes to a pipe; without this its lines would arrive in large chunks.
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


def rank_environment(
    spec: LabSpec, rank: int, *, mode: Mode, master_port: int
) -> dict[str, str]:
    """Return the variables that torchrun would set for ``rank``, and the lab's own."""
    host, local_rank = divmod(rank, spec.ranks_per_host)
    namespaces = mode is Mode.NAMESPACES
    interface = INTERFACE if namespaces else "lo"
    addresses = [
        host_address(each) if namespaces else "127.0.0.1" for each in range(spec.hosts)
    ]
    flow = spec.flow_bytes_per_s
    return {
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": str(master_port),
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.num_ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_host),
        "GROUP_RANK": str(host),
        "NODE_RANK": str(host),
        "GROUP_WORLD_SIZE": str(spec.hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(spec.num_ranks),
        "TORCHELASTIC_RUN_ID": "stretto-lab",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        variable_names.LAB: "1",
        variable_names.LAB_MODE: mode.value,
        variable_names.LAB_HOSTS: str(spec.hosts),
        variable_names.LAB_ADDRESSES: ",".join(addresses),
        variable_names.LAB_LINK_BYTES_PER_S: f"{spec.link_bytes_per_s:.0f}",
        variable_names.LAB_FLOW_BYTES_PER_S: "" if flow is None else f"{flow:.0f}",
    }
