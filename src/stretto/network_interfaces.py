"""Check the environment's network variables before anything waits for the network."""

from __future__ import annotations

import socket
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
