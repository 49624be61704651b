"""Lines of JSON over Unix sockets, for processes of one user on one host.

Nothing is pickled. A socket's file has mode 0600 in a folder of mode 0700, and the
kernel names the peer's user, who must be this one or root.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stretto.cluster.loop import Loop

_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 16 << 20
"""A longer line ends the connection."""

_CREDENTIALS = struct.Struct("3i")
_PATH_BYTES = 100
"""A socket's path has at most 107 bytes; a longer one is reached by its folder."""


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    text = str(path)
    if len(os.fsencode(text)) <= _PATH_BYTES:
        yield text
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listening(path: Path) -> socket.socket:
    """Return a listening socket; a file left by an ended process is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        with _address(path) as address:
            listener.bind(address)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.listen(512)
    listener.settimeout(0.0)
    return listener


def connected(path: Path, *, timeout_s: float | None = None) -> socket.socket:
    """Return a socket that is connected to a listening one.

    Raises:
        OSError: nothing listens there, or not within the time.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(timeout_s)
    try:
        with _address(path) as address:
            client.connect(address)
    except BaseException:
        client.close()
        raise
    return client


def is_own_peer(connection: socket.socket) -> bool:
    """Return whether the peer's process belongs to this user or to root."""
    size = _CREDENTIALS.size
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return uid in (0, os.geteuid())


def encoded(message: dict[str, Any]) -> bytes:
    """Return a message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


@final
class Channel:
    """One connection in a loop; messages are sent in order, without blocking."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        on_message: Callable[[Channel, dict[str, Any]], None],
        on_close: Callable[[Channel], None],
    ) -> None:
        connection.settimeout(0.0)
        self._loop, self._connection = loop, connection
        self._on_message, self._on_close = on_message, on_close
        self._input, self._output = bytearray(), bytearray()
        self._ends = False
        self.peer: Any = None
        """The owner's note about the peer."""

        loop.watch(connection.fileno(), read=self._read)

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._connection.fileno() >= 0

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; without effect if the connection has closed."""
        if not self.is_open:
            return
        self._output += encoded(message)
        self._write()

    def close_when_sent(self) -> None:
        """Close once everything is sent."""
        self._ends = True
        if not self._output:
            self.close()

    def close(self) -> None:
        """Close; `on_close` is called."""
        if not self.is_open:
            return
        self._loop.unwatch(self._connection.fileno())
        self._connection.close()
        self._on_close(self)

    def _write(self) -> None:
        try:
            while self._output:
                sent = self._connection.send(self._output[: 4 * _CHUNK_BYTES])
                del self._output[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._ends and not self._output:
            self.close()
            return
        write = self._write if self._output else None
        self._loop.watch(self._connection.fileno(), read=self._read, write=write)

    def _read(self) -> None:
        try:
            piece = self._connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.close()
            return
        self._input += piece
        if b"\n" not in piece:
            if len(self._input) > _MAX_LINE_BYTES:
                self.close()
            return
        *lines, rest = self._input.split(b"\n")
        self._input = bytearray(rest)
        for line in lines:
            message = _decoded(bytes(line))
            if message is None:
                self.close()
            if not self.is_open or message is None:
                return
            self._on_message(self, message)


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@final
class Listener:
    """Accepts this user's connections in a loop."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        on_message: Callable[[Channel, dict[str, Any]], None],
        on_close: Callable[[Channel], None] = lambda _: None,
    ) -> None:
        """Accept the connections of a listening socket, see `listening`."""
        self._loop, self._on_message, self._user_close = loop, on_message, on_close
        self._socket = listener
        self._channels: set[Channel] = set()
        loop.watch(self._socket.fileno(), read=self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    return  # later: other connections close
                continue
            if not is_own_peer(connection):
                connection.close()
                continue
            channel = Channel(self._loop, connection, self._on_message, self._closed)
            self._channels.add(channel)

    def _closed(self, channel: Channel) -> None:
        self._channels.discard(channel)
        self._user_close(channel)

    def close(self) -> None:
        """Stop accepting, and close all connections."""
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        for channel in list(self._channels):
            channel.close()


def request(
    path: Path, message: dict[str, Any], *, timeout_s: float = 10.0
) -> dict[str, Any]:
    """Send one message and return the answer, for programs without a loop.

    Raises:
        OSError: nothing listens there, or no answer comes in time.
    """
    with connected(path, timeout_s=timeout_s) as client:
        client.sendall(encoded(message))
        data = bytearray()
        while not data.endswith(b"\n"):
            piece = client.recv(_CHUNK_BYTES)
            if not piece:
                raise ConnectionResetError(errno.ECONNRESET, "no answer", str(path))
            data += piece
    found = _decoded(bytes(data))
    if found is None:
        raise OSError(errno.EPROTO, "the answer is not JSON", str(path))
    return found
