"""What the environment says of the network, checked before anything waits for it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name interfaces outright; NCCL's takes prefixes and exclusions."""


def check_interfaces(environment: Mapping[str, str]) -> None:
    """Requires that the named network interfaces exist on this host.

    A backend looks for them only when all ranks have met, and then says little.

    Raises:
        SpecError: naming the variable, the interface, and those there are.
    """
    known = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACE_VARIABLES:
        for name in filter(None, environment.get(variable, "").split(",")):
            if name not in known:
                raise SpecError(
                    f"{variable} names network interface {name!r}, which this host "
                    f"lacks; it has {', '.join(known)}. Name one of these, or unset it"
                )
