"""The emulated network: namespaces, veth pairs, a bridge, and shaped egress.

One host (all others are the same), from left to right::

    socket -> nft: each connection a mark, each mark an htb class
           -> htb on eth0: class ceiling = flow cap, parent ceiling = link
           -> veth -> bridge (in its own namespace) -> the other hosts

A connection gets its mark when its first packet leaves the host: the SYN of the side
that opened it, the SYN-ACK of the other. Marks are assigned in turn, so connections
share a class only when more than ``NUM_FLOW_CLASSES`` of them exist at the same time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import LabError
from stretto.lab import syscalls
from stretto.lab.spec import (
    INTERFACE,
    SUBNET,
    LabSpec,
    host_address,
    host_name,
    hosts_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_FLOW_CLASSES = 256
"""Classes per host. A rank with 8 lanes to 15 peers has 120 connections."""

MTU_BYTES = 9000
"""Jumbo frames, as cloud networks have: headers take 0.7 % of the link."""

_FIRST_FLOW_CLASS = 0x100
_OTHER_CLASS = 0x10
_QUANTUM_BYTES = 60_000
_GSO_BYTES = 65_536
_BURST_S = 1e-3


def bridge_commands(spec: LabSpec, host_fds: list[int]) -> str:
    """Return lines for ``ip -batch`` in the bridge's namespace.

    ``host_fds`` are the hosts' network namespaces, open in the process that runs them.
    """
    lines = [
        "link set lo up",
        "link add br0 type bridge forward_delay 0 stp_state 0 mcast_snooping 0",
    ]
    for host in range(spec.hosts):
        namespace = f"/proc/self/fd/{host_fds[host]}"
        peer = f"peer name {INTERFACE} mtu {MTU_BYTES} netns {namespace}"
        lines += [
            f"link add port{host} mtu {MTU_BYTES} type veth {peer}",
            f"link set port{host} master br0 addrgenmode none up",
        ]
    lines.append(f"link set br0 mtu {MTU_BYTES} addrgenmode none up")
    return "\n".join(lines) + "\n"


def host_commands(host: int) -> str:
    """Return lines for ``ip -batch`` in the namespace of ``host``."""
    return (
        "link set lo up\n"
        f"link set {INTERFACE} addrgenmode none up\n"
        f"address add {host_address(host)}/{SUBNET.prefixlen} dev {INTERFACE}\n"
    )


def burst_bytes(rate_bytes_per_s: float) -> int:
    """Return how many bytes may leave at once after a pause.

    At least one segment as TCP passes it down (GSO); otherwise the bytes of one
    millisecond, so that a timer that fires late loses no bandwidth.
    """
    return max(_GSO_BYTES, round(rate_bytes_per_s * _BURST_S))


def shaping_commands(spec: LabSpec) -> str:
    """Return lines for ``tc -batch`` in each host's namespace.

    A class below its ``rate`` sends without asking its parent, so rates are set to
    almost zero: classes borrow all their bandwidth from the link, in turns of one
    quantum, and the link's ceiling holds.
    """
    link = spec.link_bytes_per_s
    flow = spec.flow_cap_bytes_per_s

    def shape(rate: float, ceiling: float) -> str:
        # tc reads "bps" as bytes per second.
        return (
            f"htb rate {rate:.0f}bps ceil {ceiling:.0f}bps "
            f"burst {burst_bytes(rate)} cburst {burst_bytes(ceiling)} "
            f"quantum {_QUANTUM_BYTES}"
        )

    trickle = max(1.0, link / (1000 * NUM_FLOW_CLASSES))
    prefix = f"class add dev {INTERFACE}"
    lines = [
        f"qdisc add dev {INTERFACE} root handle 1: htb default {_OTHER_CLASS:x}",
        f"{prefix} parent 1: classid 1:1 {shape(link, link)}",
        f"{prefix} parent 1:1 classid 1:{_OTHER_CLASS:x} {shape(trickle, link)}",
    ]
    lines += [
        f"{prefix} parent 1:1 classid 1:{_FIRST_FLOW_CLASS + index:x} "
        f"{shape(trickle, flow)}"
        for index in range(NUM_FLOW_CLASSES)
    ]
    return "\n".join(lines) + "\n"


def marking_rules() -> str:
    """Return the nft ruleset of each host: connection -> mark -> htb class."""
    elements = ", ".join(
        f"{index + 1} : 1:{_FIRST_FLOW_CLASS + index:x}"
        for index in range(NUM_FLOW_CLASSES)
    )
    return f"""\
table inet stretto {{
  map classes {{ typeof ct mark : meta priority; elements = {{ {elements} }} }}
  chain egress {{
    type filter hook output priority mangle; policy accept;
    oifname != "{INTERFACE}" accept
    meta l4proto != tcp accept
    ct mark 0 ct mark set numgen inc mod {NUM_FLOW_CLASSES} offset 1
    meta priority set ct mark map @classes
  }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One emulated machine: open handles that keep its namespaces alive."""

    net_fd: int
    uts_fd: int

    @contextlib.contextmanager
    def entered(self, home: Host) -> Iterator[None]:
        """Move this process to the host for the block, and to ``home`` after it.

        Children started inside stay on the host.
        """
        syscalls.setns(self.net_fd, syscalls.CLONE_NEWNET)
        syscalls.setns(self.uts_fd, syscalls.CLONE_NEWUTS)
        try:
            yield
        finally:
            syscalls.setns(home.net_fd, syscalls.CLONE_NEWNET)
            syscalls.setns(home.uts_fd, syscalls.CLONE_NEWUTS)


def build(spec: LabSpec, env: dict[str, str]) -> tuple[Host, list[Host]]:
    """Build the network around this process, which has its own new namespace.

    Returns the bridge's namespace and the hosts. Nothing has a name outside: when the
    last process of the lab ends, the whole network is gone.
    """
    home = _here()
    hosts = []
    for index in range(spec.hosts):
        syscalls.unshare(syscalls.CLONE_NEWNET | syscalls.CLONE_NEWUTS)
        syscalls.set_host_name(host_name(index))
        hosts.append(_here())
    syscalls.setns(home.net_fd, syscalls.CLONE_NEWNET)
    syscalls.setns(home.uts_fd, syscalls.CLONE_NEWUTS)

    net_fds = [host.net_fd for host in hosts]
    feed(["ip", "-batch", "-"], bridge_commands(spec, net_fds), env, fds=net_fds)
    # The bridge forwards frames; iptables hooks on them would only cost time.
    for name in ("iptables", "ip6tables", "arptables"):
        _set(f"net/bridge/bridge-nf-call-{name}", "0")
    shaping, marking = shaping_commands(spec), marking_rules()
    for index, host in enumerate(hosts):
        with host.entered(home):
            feed(["ip", "-batch", "-"], host_commands(index), env)
            feed(["tc", "-batch", "-"], shaping, env)
            feed(["nft", "-f", "-"], marking, env)
            # The queue is on the sender, so nothing is lost and every congestion
            # control fills it. An unprivileged user may choose reno on every system,
            # and reno does no pacing itself.
            _set("net/ipv4/tcp_congestion_control", "reno")
            _set("net/ipv4/tcp_slow_start_after_idle", "0")
            _set("net/ipv4/tcp_no_metrics_save", "1")
    _share_hosts_file(spec)
    return home, hosts


def _here() -> Host:
    return Host(
        net_fd=os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC),
        uts_fd=os.open("/proc/self/ns/uts", os.O_RDONLY | os.O_CLOEXEC),
    )


def feed(
    command: list[str], text: str, env: dict[str, str], fds: list[int] | None = None
) -> None:
    """Run ``command`` with ``text`` on its standard input.

    Raises:
        LabError: with the first line of the command's message.
    """
    done = subprocess.run(
        command,
        input=text,
        env=env,
        pass_fds=fds or [],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = lines[0] if lines else f"exit status {done.returncode}"
        raise LabError(f"`{' '.join(command)}` failed: {said}")


def _set(name: str, value: str) -> None:
    """Set a kernel parameter of this network namespace, if it exists.

    No parameter is needed for a correct result: they save time.
    """
    with contextlib.suppress(OSError):
        Path("/proc/sys", name).write_text(value)


def _share_hosts_file(spec: LabSpec) -> None:
    """Make every host find the others by name, in this mount namespace only.

    The file is on a tmpfs that is mounted only while it is bound over ``/etc/hosts``,
    so no file is left behind, whatever happens.
    """
    target = Path("/etc/hosts")
    if not target.exists():
        return
    syscalls.mount("tmpfs", "/tmp", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV)
    try:
        source = Path("/tmp/hosts")
        source.write_text(hosts_file(spec))
        source.chmod(0o644)
        syscalls.mount(str(source), str(target), "", syscalls.MS_BIND)
    finally:
        syscalls.unmount("/tmp", syscalls.MNT_DETACH)
