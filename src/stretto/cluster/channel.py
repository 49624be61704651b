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

from stretto.cluster.loop import now_s
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stretto.cluster.loop import Loop, Timer

_log = get_logger(__name__)

_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 16 << 20
"""A longer line ends the connection."""

_MAX_TURN_S = 0.1
"""Further messages of a peer wait until others had their turn."""

_LOOK_S = 15.0
_MAX_LOOKS = 4
"""A peer that takes no byte of its answers from one look to the next is given up at the
last of these. They are counted, not their seconds: while a host or this process is
stopped, no peer can take anything."""

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
    """One connection in a loop; messages are sent in order, without blocking.

    # Note [Peers that take no answers]
    With ``max_unsent_bytes``, no further message of a peer is read while more than that
    waits to be sent, so a peer that asks on and on fills its own memory, not this
    process's. One that takes nothing for `_MAX_LOOKS` looks is given up, with a line in
    the log.
    """

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        on_message: Callable[[Channel, dict[str, Any]], None],
        on_close: Callable[[Channel], None],
        *,
        max_unsent_bytes: int | None = None,
    ) -> None:
        connection.settimeout(0.0)
        self._loop, self._connection = loop, connection
        self._on_message, self._on_close = on_message, on_close
        self._input, self._output = bytearray(), bytearray()
        self._ends = self._is_paused = False
        self._max_unsent_bytes = max_unsent_bytes
        self._num_sent = 0
        self._looks: Timer | None = None
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
        if self._looks is not None:
            self._looks.cancel()
        self._on_close(self)

    def _write(self) -> None:
        try:
            while self._output:
                sent = self._connection.send(self._output[: 4 * _CHUNK_BYTES])
                del self._output[:sent]
                self._num_sent += sent
        except BlockingIOError:
            self._look_later(0, self._num_sent)
        except OSError:
            self.close()
            return
        if self._ends and not self._output:
            self.close()
            return
        if self._is_paused and not self._is_behind:
            self._loop.call_in(0.0, self._continue)
        self._watch()

    def _watch(self) -> None:
        read = None if self._is_paused else self._read
        write = self._write if self._output else None
        self._loop.watch(self._connection.fileno(), read=read, write=write)

    @property
    def _is_behind(self) -> bool:
        """Whether the peer has to take answers before its messages are read."""
        most = self._max_unsent_bytes
        return most is not None and len(self._output) > most

    def _look_later(self, looks: int, num_sent: int) -> None:
        """Look whether the peer takes answers, unless that is going on."""
        if self._max_unsent_bytes is None or (self._looks is not None and not looks):
            return

        def look() -> None:
            self._looks = None
            if not self._output:
                return
            count = looks + 1 if self._num_sent == num_sent else 0
            if count < _MAX_LOOKS:
                self._look_later(count, self._num_sent)
                return
            _log.warning(
                "%.80s takes no answers: closes its connection, with %d bytes unsent",
                self.peer or "a client",
                len(self._output),
            )
            self.close()

        self._looks = self._loop.call_in(_LOOK_S, look)

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
        self._take_lines()

    def _take_lines(self) -> None:
        """Pass messages on, unless the peer or others have to do something first."""
        until_s = now_s() + _MAX_TURN_S
        while self.is_open and (size := self._input.find(b"\n")) >= 0:
            if self._is_behind or now_s() > until_s:
                self._is_paused = True
                if not self._is_behind:
                    self._loop.call_in(0.0, self._continue)
                self._watch()
                return
            message = _decoded(bytes(self._input[:size]))
            del self._input[: size + 1]
            if message is None:
                self.close()
                return
            self._on_message(self, message)

    def _continue(self) -> None:
        """Pass on messages that have arrived, and read again."""
        if self.is_open and self._is_paused:
            self._is_paused = False
            self._watch()
            self._take_lines()


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
        *,
        max_unsent_bytes: int | None = None,
    ) -> None:
        """Accept the connections of a listening socket, see `listening`."""
        self._max_unsent_bytes = max_unsent_bytes
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
            channel = Channel(
                self._loop,
                connection,
                self._on_message,
                self._closed,
                max_unsent_bytes=self._max_unsent_bytes,
            )
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
