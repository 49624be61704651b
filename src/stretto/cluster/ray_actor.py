"""The actor of one host: keeps its agent running, and passes its messages on.

The agent is the local engine's, in a process that is not a child of the actor's: forks
need a process with one thread, and what it has started outlives Ray. Actor and agent
meet at a Unix socket in the host's folder. The gateway fetches and brings lines of JSON
as bytes, and does not interpret them.

This module does not import Ray: `ray_gateway` makes an actor of the class.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, final

from stretto import variable_names
from stretto.cluster.channel import is_own_peer, listening
from stretto.cluster.engine_local import host_locks
from stretto.cluster.folders import Folders, settings_of
from stretto.cluster.part_spec import write_json
from stretto.cluster.roles import Role, StoppedHolders, holder_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_LOOK_S = 0.1
_MAX_WAIT_S = 1.0
"""Within which `HostActor.receive` answers."""

_CHUNK_BYTES = 1 << 16
_MAX_WAITING_BYTES = 4 << 20
"""An agent's output that no gateway has fetched; then it is read no further."""

NO_SESSION = 0


@final
class HostActor:
    """Serves the agent of one host to one gateway at a time.

    A session is one connection of the agent; its number is never used again.
    """

    def __init__(self, root: str, host: str, settings: str) -> None:
        """Prepare the host's folder, and end an agent that has other settings.

        Args:
            root: the cluster's folder, on this host.
            host: its name.
            settings: of the host, as JSON.

        Raises:
            ClusterError: the folder cannot be used.
        """
        os.umask(0o077)
        self._folders = Folders(Path(root)).of_node(host)
        self._folders.create()
        self._folders.host(host).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._host, self._lock = host, self._folders.agent_lock(host)
        wanted = settings_of(json.loads(settings))
        if not self._has(wanted):
            write_json(self._folders.settings, asdict(wanted))
            self._signal_agent()
        self._folders.down.unlink(missing_ok=True)
        self._role = Role(
            "stretto.cluster.agent",
            [str(self._folders.root), host],
            self._lock,
            self._folders.host(host) / "agent.log",
            environment=_plain_environment(),
            detaches=True,
        )
        self._gateway = ""
        self._session, self._numbers = NO_SESSION, itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._output = bytearray()
        self._changed: asyncio.Condition | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _has(self, wanted: object) -> bool:
        try:
            return self._folders.load_settings() == wanted
        except Exception:  # noqa: BLE001 - missing, or of another version
            return False

    def _signal_agent(self) -> None:
        if (pid := holder_of(self._lock)) is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    async def _begin(self) -> asyncio.Condition:
        """Listen and keep the agent running, from the first call on."""
        if self._changed is None:
            self._changed = asyncio.Condition()
            listener = listening(self._folders.socket)
            self._tasks = [
                asyncio.create_task(self._accept(listener)),
                asyncio.create_task(self._keep_agent()),
            ]
        return self._changed

    # the agent

    async def _keep_agent(self) -> None:
        stopped = StoppedHolders(lambda: host_locks(self._folders, self._host))
        while not self._folders.down.exists():
            with contextlib.suppress(OSError):
                self._make_folders()
                self._role.look()
                stopped.look()
            await asyncio.sleep(_LOOK_S)

    def _make_folders(self) -> None:
        """Make the agent's folder again if a cleanup has removed it."""
        for folder in (self._folders.hosts_folder, self._folders.host(self._host)):
            folder.mkdir(mode=0o700, exist_ok=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        readers: set[asyncio.Task[None]] = set()
        with listener:
            while True:
                connection, _ = await loop.sock_accept(listener)
                if not is_own_peer(connection):
                    connection.close()
                    continue
                reader, writer = await asyncio.open_unix_connection(sock=connection)
                self._drop()
                self._session, self._writer = next(self._numbers), writer
                task = asyncio.create_task(self._read(self._session, reader))
                readers.add(task)
                task.add_done_callback(readers.discard)
                await self._notify()

    async def _read(self, session: int, reader: asyncio.StreamReader) -> None:
        changed = await self._begin()
        while True:
            try:
                piece = await reader.read(_CHUNK_BYTES)
            except OSError:
                piece = b""
            if session != self._session:
                return
            if not piece:
                self._drop()
                await self._notify()
                return
            self._output += piece
            async with changed:
                changed.notify_all()
                await changed.wait_for(
                    lambda: (
                        len(self._output) < _MAX_WAITING_BYTES
                        or session != self._session
                    )
                )

    def _drop(self) -> None:
        """End the session; the agent connects again, and repeats what was lost."""
        if self._writer is not None:
            self._writer.close()
        self._session, self._writer = NO_SESSION, None
        self._output.clear()

    async def _notify(self) -> None:
        changed = await self._begin()
        async with changed:
            changed.notify_all()

    # the gateway

    async def receive(self, gateway: str, session: int) -> tuple[int, bytes]:
        """Return the session, and what the agent has sent in it since the last call.

        Answers when there is something to say, or after a second.

        Args:
            gateway: names the caller; another one begins with a session of its own.
            session: the one that the caller knows of. If it is not the present one,
                the answer has no bytes.
        """
        changed = await self._begin()
        if gateway != self._gateway:
            self._gateway = gateway
            self._drop()
            await self._notify()
        has_news: Callable[[], bool] = lambda: (  # noqa: E731
            self._session != session or bool(self._output) or gateway != self._gateway
        )
        async with changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait_for(has_news), _MAX_WAIT_S)
            if gateway != self._gateway:
                return NO_SESSION, b""
            if self._session != session:
                return self._session, b""
            found = bytes(self._output)
            self._output.clear()
            changed.notify_all()
            return session, found

    async def send(self, gateway: str, session: int, data: bytes) -> None:
        """Pass bytes on to the agent; without effect in an earlier session."""
        if gateway == self._gateway and session == self._session and self._writer:
            with contextlib.suppress(OSError):
                self._writer.write(data)

    async def close(self, gateway: str, session: int) -> None:
        """End a session: the coordinator has closed its side."""
        if gateway == self._gateway and session == self._session:
            self._drop()
            await self._notify()

    async def end(self) -> None:
        """End the host's agent, for good."""
        self._folders.mark_down()
        self._signal_agent()

    async def stop(self) -> None:
        """Stop serving; the agent keeps running. Ray does so by ending the process."""
        self._drop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _plain_environment() -> dict[str, str]:
    """Return this process's variables without Ray's."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("RAY_") and key != variable_names.CLUSTER_RAY
    }
