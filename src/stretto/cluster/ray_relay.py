"""Between actors and the coordinator: which hosts there are, and what they say.

Pure `asyncio`, without Ray: `ray_gateway` adds that, and tests something simpler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from stretto.cluster.channel import connected
from stretto.cluster.ray_actor import NO_SESSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16
_RETRY_S = 0.05


class RemoteActor(Protocol):
    """A host's `ray_actor.HostActor`, wherever it runs.

    Any call raises if the actor is lost.
    """

    async def receive(self, gateway: str, session: int) -> tuple[int, bytes]:
        """See `HostActor.receive`."""

    async def send(self, gateway: str, session: int, data: bytes) -> None:
        """See `HostActor.send`."""

    async def close(self, gateway: str, session: int) -> None:
        """See `HostActor.close`."""

    async def end(self) -> None:
        """See `HostActor.end`."""


@final
@dataclass(frozen=True, slots=True)
class RayHost:
    """A host of the cluster."""

    node: str
    """Ray's id of its node."""

    address: str
    devices: tuple[str, ...]
    asks_for_gpus: bool
    """Whether the actor must ask Ray for the GPUs: others use Ray, too."""


def members(
    nodes: Iterable[Mapping[str, Any]],
    own_node: str,
    own_hosts: Mapping[str, tuple[str, ...]],
    addresses: Mapping[str, str],
    unused: set[tuple[str, str]],
) -> dict[str, RayHost]:
    """Return the hosts on Ray's living nodes, by name.

    The node of this process has the hosts of the settings, if they name any. Another
    node is one host, called by its node name or else its host name. Its devices are
    the GPUs that Ray has there, or as many processors. Of two nodes of one name, the
    one that has been used stays: its jobs run.

    Args:
        nodes: as of ``ray.nodes()``.
        own_node: id of this process's node.
        own_hosts: names of devices, by host.
        addresses: of the hosts that have been used.
        unused: names and addresses of living nodes that are not used because another
            has the name. Warns of those that are new there, and changes it.
    """
    found: dict[str, RayHost] = {}
    known = frozenset(unused)
    unused.clear()

    def order(node: Mapping[str, Any]) -> tuple[bool, bool, str]:
        is_used = addresses.get(_name(node)) == node["NodeManagerAddress"]
        return node["NodeID"] != own_node, not is_used, node["NodeID"]

    for node in sorted(nodes, key=order):
        if not node["Alive"]:
            continue
        identity, address = node["NodeID"], node["NodeManagerAddress"]
        if identity == own_node and own_hosts:
            for name, devices in own_hosts.items():
                found[name] = RayHost(identity, address, devices, asks_for_gpus=False)
            continue
        gpus = int(node["Resources"].get("GPU", 0))
        kind, number = ("cuda", gpus) if gpus else ("cpu", _processors(node))
        name = _name(node)
        if name in found:
            unused.add((name, address))
            if (name, address) not in known:  # the nodes are read each second
                _logger.warning(
                    "two nodes of Ray are called %s: the one at %s is not used; start "
                    "it with `ray start --node-name NAME`",
                    name,
                    address,
                )
        elif number:
            devices = tuple(f"{kind}:{index}" for index in range(number))
            found[name] = RayHost(identity, address, devices, asks_for_gpus=bool(gpus))
    return found


def _name(node: Mapping[str, Any]) -> str:
    named: str = node["NodeName"]
    if named in ("", node["NodeManagerAddress"]):
        named = node["NodeManagerHostname"]
    return named


def _processors(node: Mapping[str, Any]) -> int:
    return int(node["Resources"].get("CPU", 0))


@final
class Relay:
    """Passes messages between one host's actor and the coordinator, both ways."""

    def __init__(self, actor: RemoteActor, gateway: str, socket: Path) -> None:
        """Prepare; `run` relays.

        Args:
            actor: of the host.
            gateway: what no other gateway is called.
            socket: the coordinator's.
        """
        self._actor, self._gateway, self._socket = actor, gateway, socket
        self._session = NO_SESSION
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Relay until the actor is lost; raises what it raises."""
        try:
            while True:
                session, data = await self._actor.receive(self._gateway, self._session)
                if session != self._session:
                    await self._disconnect()
                    self._session = session
                if data:
                    await self._pass_on(data)
        finally:
            await self._disconnect()

    async def _pass_on(self, data: bytes) -> None:
        while self._writer is None:
            try:
                await self._connect()
            except OSError:  # the coordinator starts again
                await asyncio.sleep(_RETRY_S)
        self._writer.write(data)
        with contextlib.suppress(OSError):  # the reading side notices
            await self._writer.drain()

    async def _connect(self) -> None:
        connection = connected(self._socket, timeout_s=1.0)
        connection.settimeout(0.0)
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._reader_task = asyncio.create_task(self._read(reader, self._session))

    async def _read(self, reader: asyncio.StreamReader, session: int) -> None:
        # A lost actor ends `run`, which says so.
        with contextlib.suppress(Exception):
            while True:
                try:
                    data = await reader.read(_CHUNK_BYTES)
                except OSError:
                    data = b""
                if not data:
                    break
                await self._actor.send(self._gateway, session, data)
            # The agent connects again, and says everything that was not acknowledged.
            await self._actor.close(self._gateway, session)

    async def _disconnect(self) -> None:
        task, writer = self._reader_task, self._writer
        self._reader_task = self._writer = None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if writer is not None:
            writer.close()
