"""Network interfaces: check those that the environment names, find an address's."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name interfaces literally; NCCL's accepts prefixes and exclusions."""


def check_interfaces(environment: Mapping[str, str]) -> None:
    """Require that the named network interfaces exist on this host.

    A backend looks for them only after all ranks have met, and then reports little.

    Raises:
        SpecError: names the variable, the missing interface, and the existing ones.
    """
    known = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACE_VARIABLES:
        for name in filter(None, environment.get(variable, "").split(",")):
            if name not in known:
                raise SpecError(
                    f"{variable} names network interface {name!r}, which this host "
                    f"lacks; it has {', '.join(known)}. Name one of these, or unset it"
                )


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface that has an IPv4 address, or ``None``.

    The loopback interface has all addresses of its network.
    """
    try:
        wanted = ipaddress.IPv4Address(address)
    except ValueError:
        return None
    found = _addresses()
    if wanted.is_loopback:
        return next((name for name, own in found if own.is_loopback), None)
    return next((name for name, own in found if own == wanted), None)


_ROW = struct.Struct("16sHxx4s16x")
"""A row of the kernel's list: name, family, and the address after the port."""

_LIST = 0x8912  # SIOCGIFCONF
_MAX_ROWS = 1024


def _addresses() -> list[tuple[str, ipaddress.IPv4Address]]:
    """Return the IPv4 addresses of all interfaces, those of aliases included."""
    rows = array.array("B", bytes(_ROW.size * _MAX_ROWS))
    location, length = rows.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe.fileno(), _LIST, struct.pack("iP", length, location)
            )
        except OSError:
            return []
    size, _ = struct.unpack("iP", answer)
    return [
        # An alias such as eth0:1 is not an interface of its own.
        (name.partition(b"\0")[0].decode().partition(":")[0], _address_of(own))
        for name, _, own in _ROW.iter_unpack(rows[:size].tobytes())
    ]


def _address_of(packed: bytes) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(packed)
