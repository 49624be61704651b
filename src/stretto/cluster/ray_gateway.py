"""Between Ray and the coordinator: ``python -m stretto.cluster.ray_gateway ROOT``.

It is the cluster's only client of Ray: it follows Ray's nodes, has a detached actor on
each (`ray_actor`), and relays between the actors and the coordinator's socket
(`ray_relay`). It keeps nothing, so it may be killed at any time, and ends by itself
when Ray does; the keeper starts another one, which finds the actors by their names.

Ray pickles the arguments of calls. They are numbers, text and bytes of this cluster's
own processes; nothing that a user writes is unpickled anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import sys
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from stretto.cluster import processes
from stretto.cluster.engine_local import start_keeper
from stretto.cluster.folders import Folders, Settings
from stretto.cluster.loop import now_s
from stretto.cluster.ray_actor import HostActor
from stretto.cluster.ray_head import environment
from stretto.cluster.ray_relay import RayHost, Relay, RemoteActor, members
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.cluster.folders import RaySettings

_log = get_logger(__name__)

_LOOK_S = 1.0
_RETRY_S, _MAX_RETRY_S = 0.2, 5.0
"""Until a lost actor is looked for again."""

_STEADY_S = 10.0
_RAY_S = 10.0
"""Ray's head must answer within this time, or the gateway ends and starts again."""

_END_S = 5.0
_CONCURRENCY = 64
"""Calls of an actor at once; each but `receive` is short."""


class Ray(Protocol):
    """The part of Ray that the gateway uses."""

    def own_node(self) -> str:
        """Return the id of this process's node."""

    def nodes(self) -> Sequence[Mapping[str, Any]]:
        """Return all nodes; may take long."""

    def actor(
        self, name: str, member: RayHost, arguments: Sequence[str]
    ) -> RemoteActor:
        """Return a host's actor, which is created if needed; may take long."""

    def kill(self, name: str) -> None:
        """End an actor for good, if it exists; may take long."""

    def named_actors(self) -> Mapping[str, RemoteActor]:
        """Return the cluster's actors by name; may take long."""


@final
class Gateway:
    """Keeps an actor and a relay for every host."""

    def __init__(self, folders: Folders, settings: Settings, ray: Ray) -> None:
        self._folders, self._settings, self._ray = folders, settings, ray
        self._name = uuid.uuid4().hex
        self._relays: dict[str, tuple[RayHost, asyncio.Task[None]]] = {}
        self._ends = asyncio.Event()
        self._addresses = {
            host: address for host, (address, _) in folders.noted_hosts().items()
        }
        self._unused: set[tuple[str, str]] = set()
        """Names and addresses of nodes whose name another one has."""
        self._moved_s: dict[str, float] = {}
        """Since when a host's name is known at another address."""

    def end(self) -> None:
        """End `run`."""
        self._ends.set()

    async def run(self) -> None:
        """Follow the nodes until `end`; if the cluster is down by then, end the hosts.

        Raises:
            Exception: Ray does not answer.
        """
        own = await _in_thread(self._ray.own_node)
        try:
            while not self._ends.is_set():
                await self._follow(own)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ends.wait(), _LOOK_S)
        finally:
            for _, task in self._relays.values():
                task.cancel()
            await asyncio.gather(
                *(task for _, task in self._relays.values()), return_exceptions=True
            )
        if self._folders.down.exists():
            hosts = [self._end_host(host, m) for host, (m, _) in self._relays.items()]
            await asyncio.gather(*hosts)
            with contextlib.suppress(OSError):  # otherwise they are looked for again
                self._folders.actors_ended.touch(mode=0o600)

    async def _follow(self, own: str) -> None:
        with contextlib.suppress(OSError):
            start_keeper(self._folders)  # unless one runs
        nodes = await _in_thread(self._ray.nodes)
        found = members(nodes, own, self._settings.hosts, self._addresses, self._unused)
        for host, member in found.items():
            known = self._relays.get(host)
            if known is not None and known[0] == member:
                continue
            if self._may_still_run(host, member.address):
                continue
            if known is not None:  # it is back, as another node
                known[1].cancel()
            _log.info("host %s is at %s", host, member.address)
            task = asyncio.create_task(self._serve(host, member))
            self._relays[host] = member, task
            self._note_hosts()
        for host in self._relays.keys() - found.keys():
            member, task = self._relays[host]
            if not task.done():
                _log.warning("Ray has lost host %s", host)
                task.cancel()
            # Should the same node return, it is served again.
            self._relays[host] = replace(member, node=""), task

    def _may_still_run(self, host: str, address: str) -> bool:
        """Return whether another machine of this name may have jobs that run.

        A host that joins without its jobs says that they have ended.
        """
        if self._addresses.setdefault(host, address) == address:
            self._moved_s.pop(host, None)
            return False
        if host not in self._moved_s:
            _log.warning(
                "%s was a host at %s: the node of that name at %s is used once the "
                "watchdogs there have fired",
                *(host, self._addresses[host], address),
            )
        began_s = self._moved_s.setdefault(host, now_s())
        if now_s() < began_s + self._settings.watchdog_s + self._settings.margin_s:
            return True
        self._addresses[host] = address
        del self._moved_s[host]
        return False

    def _note_hosts(self) -> None:
        """Write which hosts the coordinator may expect."""
        hosts = self._folders.noted_hosts()  # an earlier gateway's, too
        for host, (member, _) in self._relays.items():
            hosts[host] = member.address, member.devices
        with contextlib.suppress(OSError):  # a full disk: the coordinator says so
            self._folders.note_hosts(hosts)

    async def _serve(self, host: str, member: RayHost) -> None:
        socket, pause_s = self._folders.socket, _RETRY_S
        while True:
            began_s = now_s()
            try:
                actor = await self._actor(host, member)
                await Relay(actor, self._name, socket).run()
            except Exception as error:  # noqa: BLE001 - whatever Ray raises
                _log.warning("the actor of host %s is lost: %s", host, _short(error))
            if now_s() - began_s > _STEADY_S:
                pause_s = _RETRY_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _actor(self, host: str, member: RayHost) -> RemoteActor:
        settings = replace(
            self._settings,
            hosts={host: member.devices},
            address=member.address,
            shared=str(self._folders.shared),
            ray=None,
            has_keeper=False,
        )
        arguments = (str(self._folders.root), host, json.dumps(asdict(settings)))
        return await asyncio.to_thread(
            self._ray.actor, _actor_name(host, member), member, arguments
        )

    async def _end_host(self, host: str, member: RayHost) -> None:
        if not member.node:
            return
        name = _actor_name(host, member)
        actor: RemoteActor | None = None
        with contextlib.suppress(Exception):
            actor = await asyncio.wait_for(self._actor(host, member), _END_S)
        await _end_actor(self._ray, name, actor)


async def end_actors(ray: Ray) -> None:
    """End all actors of a cluster, of earlier gateways, too."""
    found = await _in_thread(ray.named_actors)
    await asyncio.gather(*(_end_actor(ray, *each) for each in found.items()))


async def _end_actor(ray: Ray, name: str, actor: RemoteActor | None) -> None:
    with contextlib.suppress(Exception):  # its agent ends when its watchdogs fire
        if actor is not None:
            await asyncio.wait_for(actor.end(), _END_S)
    with contextlib.suppress(Exception):
        await _in_thread(ray.kill, name)


def _actor_name(host: str, member: RayHost) -> str:
    return f"{host}-{member.node}"


async def _in_thread(call: Any, *arguments: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(call, *arguments), _RAY_S)


def _short(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:200]


@final
class _Remote:
    """Calls of an actor's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def receive(self, gateway: str, session: int) -> tuple[int, bytes]:
        found: tuple[int, bytes] = await self._handle.receive.remote(gateway, session)
        return found

    async def send(self, gateway: str, session: int, data: bytes) -> None:
        await self._handle.send.remote(gateway, session, data)

    async def close(self, gateway: str, session: int) -> None:
        await self._handle.close.remote(gateway, session)

    async def end(self) -> None:
        await self._handle.end.remote()


@final
class _ConnectedRay:
    """Ray, of which this process is a client."""

    def __init__(self, settings: RaySettings) -> None:
        """Connect.

        Raises:
            ConnectionError, RuntimeError: nothing answers there, or it refuses the
                token.
        """
        os.environ.update(environment(settings))  # before Ray is imported
        self._ray: Any = importlib.import_module("ray")
        self._ray.init(
            address=settings.address,
            namespace=settings.namespace,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )

    def own_node(self) -> str:
        found: str = self._ray.get_runtime_context().get_node_id()
        return found

    def nodes(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self._ray.nodes()
        return found

    def actor(
        self, name: str, member: RayHost, arguments: Sequence[str]
    ) -> RemoteActor:
        with contextlib.suppress(ValueError):
            return _Remote(self._ray.get_actor(name))
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        pinned = strategies.NodeAffinitySchedulingStrategy
        handle = (
            self._ray.remote(HostActor)
            .options(
                name=name,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=_CONCURRENCY,
                num_cpus=0,
                num_gpus=len(member.devices) if member.asks_for_gpus else 0,
                get_if_exists=True,
                scheduling_strategy=pinned(member.node, soft=False),
            )
            .remote(*arguments)
        )
        return _Remote(handle)

    def kill(self, name: str) -> None:
        with contextlib.suppress(ValueError):
            self._ray.kill(self._ray.get_actor(name), no_restart=True)

    def named_actors(self) -> Mapping[str, RemoteActor]:
        names = self._ray.util.list_named_actors()
        return {name: _Remote(self._ray.get_actor(name)) for name in names}


async def _end(ray: Ray) -> None:
    try:
        await end_actors(ray)
    finally:
        os._exit(0)  # nothing waits for calls of Ray that may never end


async def _run(folders: Folders, settings: Settings, ray: Ray) -> None:
    gateway = Gateway(folders, settings, ray)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.end)
    status = 0
    try:
        await gateway.run()
    except Exception as error:  # noqa: BLE001 - whatever Ray raises
        _log.error("Ray does not answer: %s", _short(error))
        status = 1
    # Nothing waits for calls of Ray that may never end.
    os._exit(status)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:  # a client of Ray would try again and again
        socket.create_connection((host, int(port)), _END_S).close()
    except OSError:
        return False
    return True


def main(folder: str, task: str = "") -> int:
    """Run the gateway of a cluster, unless it runs already.

    With the task ``end``, end what gateways have left of a cluster that is down.
    """
    folders, ends = Folders(Path(folder)), task == "end"
    if processes.lock_as_owner(folders.gateway_lock) is None:
        return 0
    if folders.down.exists() != ends:
        return 0
    settings = folders.load_settings()
    if settings.ray is None or (ends and not _listens(settings.ray.address)):
        return 0
    os.umask(0o077)
    try:
        ray = _ConnectedRay(settings.ray)
    except Exception as error:  # noqa: BLE001 - whatever Ray raises
        _log.error("no connection to Ray: %s", _short(error))
        return 1
    asyncio.run(_end(ray) if ends else _run(folders, settings, ray))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
