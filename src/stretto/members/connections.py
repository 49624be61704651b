"""TCP connections that are made without blocking and end soon after their peer."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.cluster.loop import Loop

_CONNECT_S = 1.5

_UNACKNOWLEDGED_MS = 1500
"""A connection whose data is not acknowledged for so long is closed, and made again:
TCP itself would repeat them ever more rarely for a quarter of an hour."""


def keep_alive(made: socket.socket) -> None:
    """Let a connection end soon after its peer or the link has failed."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Idle ones are tested, too: the other side may have given up meanwhile.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        (socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
    ):
        made.setsockopt(socket.IPPROTO_TCP, name, value)


@final
class Connector:
    """Makes connections from one of this host's addresses."""

    def __init__(self, loop: Loop, own: str) -> None:
        """Connect from the address ``own`` in the loop's turns."""
        self._loop, self._own = loop, own
        self._pending: set[socket.socket] = set()

    def close(self) -> None:
        """Give up what is not connected yet."""
        for made in self._pending:
            self._loop.unwatch(made.fileno())
            made.close()
        self._pending = set()

    def connect(
        self,
        host: str,
        port: int,
        on_made: Callable[[socket.socket], None],
        on_failed: Callable[[], None],
    ) -> None:
        """Connect to a port and call one of two functions, unless `close` comes first.

        Args:
            host: a name or an address.
            port: its port.
            on_made: called with the connection.
            on_failed: called if that fails, or takes longer than 1.5 s.
        """
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )[0]
            made = socket.socket(family, kind)
        except OSError:
            on_failed()
            return
        made.settimeout(0.0)
        with contextlib.suppress(OSError):  # only one address may reach the others
            made.bind((self._own, 0))
        made.connect_ex(address)
        self._pending.add(made)

        def give_up() -> None:
            if made not in self._pending:
                return
            self._pending.discard(made)
            self._loop.unwatch(made.fileno())
            made.close()
            on_failed()

        timer = self._loop.call_in(_CONNECT_S, give_up)

        def connected() -> None:
            self._loop.unwatch(made.fileno())
            self._pending.discard(made)
            timer.cancel()
            if made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                made.close()
                on_failed()
            else:
                on_made(made)

        self._loop.watch(made.fileno(), write=connected)
