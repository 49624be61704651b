"""Beats between keepers, as datagrams.

Beats are datagrams because a connection that has lost packets for two seconds stays
silent for two more. Each has a number, so that none counts twice, and a proof (see Note
[Who may take part] in `peers`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
from typing import TYPE_CHECKING, final

import msgspec

from stretto.errors import StrettoError
from stretto.members.ballots import Beat

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.cluster.loop import Loop
    from stretto.members.meeting import KeeperPlace

_MAC_BYTES = 16
_DATAGRAM_BYTES = 65_000


@final
class BeatSocket:
    """Sends beats to other keepers and receives theirs."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        port: int,
        *,
        process: str,
        place_of: Callable[[int], KeeperPlace | None],
        on_beat: Callable[[int, Beat], None],
    ) -> None:
        """Bind the socket.

        Args:
            loop: calls ``on_beat``.
            host: this keeper's address.
            port: its port, for beats too.
            process: a text that no other keeper's process has.
            place_of: the place of a keeper, if it is known.
            on_beat: called with the sender and its beat.

        Raises:
            StrettoError: the port can't be used.
        """
        self._loop, self._process = loop, process
        self._place_of, self._on_beat = place_of, on_beat
        self._keeper: int | None = None
        self._key = b""
        self._number = 0
        self._received: dict[int, int] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise StrettoError(
                f"this host's keeper can't use UDP at {host} port {port}: "
                f"{error.strerror}. Pass another --master-port."
            ) from error
        self._socket.settimeout(0.0)
        loop.watch(self._socket.fileno(), read=self._read)

    def begin(self, key: bytes, *, run: str, keeper: int) -> None:
        """Send and accept beats from now on, as keeper number ``keeper`` of a run."""
        self._key = hmac.digest(key, run.encode(), "sha256")
        self._keeper = keeper

    def close(self) -> None:
        """Close the socket."""
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()

    def send(self, keeper: int, beat: Beat) -> None:
        """Send a beat, which may be lost, to a keeper."""
        place = self._place_of(keeper)
        if place is None or self._keeper is None:
            return
        self._number += 1
        row = [self._keeper, keeper, self._process, self._number]
        body = json.dumps([*row, msgspec.to_builtins(beat)]).encode()
        with contextlib.suppress(OSError):  # as a link that is down
            self._socket.sendto(self._mac(body) + body, (place.host, place.port))

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_MAC_BYTES]

    def _read(self) -> None:
        for _ in range(1000):
            try:
                data = self._socket.recv(_DATAGRAM_BYTES)
            except OSError:
                return
            if self._keeper is not None:
                self._take(data)

    def _take(self, data: bytes) -> None:
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return
        try:
            keeper, to, process, number, beat = msgspec.json.decode(
                body, type=tuple[int, int, str, int, Beat]
            )
        except msgspec.DecodeError:
            return
        place = self._place_of(keeper)
        if place is None or place.process != process or to != self._keeper:
            return
        if number <= self._received.get(keeper, 0):
            return  # doubled, or late
        self._received[keeper] = number
        self._on_beat(keeper, beat)
