"""An agent's connection to the coordinator: events one way, commands the other.

Events have numbers, and stay here until the coordinator has kept them. Every message
that the coordinator answers renews the contact, from the moment at which the message
was sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from stretto.cluster import events
from stretto.cluster.channel import Channel, connected
from stretto.cluster.engine_local import start_keeper
from stretto.cluster.loop import Loop, now_s
from stretto.cluster.wire import plain_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.cluster.folders import Folders

Fence = tuple[str, int]
"""A job's id and the number of an attempt."""

_BATCH_S = 0.002
"""Events within this time travel together."""

_RETRY_S, _MAX_RETRY_S = 0.05, 0.5
_KEEPER_S = 2.0
_MAX_EVENTS = 512
"""In one message."""


@final
@dataclass(slots=True)
class _Outgoing:
    """An event until the coordinator has kept it."""

    seq: int
    kind: str
    body: dict[str, Any]
    then: Callable[[], None] | None
    """Called when it is kept."""


@final
class CoordinatorLink:
    """Connects again and again, and starts the keeper if none runs."""

    def __init__(
        self,
        loop: Loop,
        folders: Folders,
        host: str,
        life: int,
        *,
        joined: Callable[[], dict[str, Any]],
        meetings: Callable[[], dict[str, list[Any]]],
        execute: Callable[[dict[str, Any]], None],
    ) -> None:
        """Prepare a connection; `connect` begins it.

        Args:
            loop: in which messages are handled.
            folders: of the cluster.
            host: of the agent.
            life: number of this life of the agent.
            joined: returns the data of `events.JOINED`.
            meetings: returns where ranks of attempts on several hosts meet.
            execute: executes a command.
        """
        self._loop, self._folders, self._host = loop, folders, host
        self._agent = f"{host}#{life}"
        self._joined, self._meetings, self._execute = joined, meetings, execute
        self._watchdog_s = folders.load_settings().watchdog_s
        self._outgoing: list[_Outgoing] = []
        self._next_seq, self._sent_seq = 1, 0
        self._channel: Channel | None = None
        self._retry_s, self._keeper_s = _RETRY_S, 0.0
        self._contact_s = now_s()
        self._is_flushing = False

    @property
    def watchdog_until_s(self) -> float:
        """When the watchdogs fire that the last contact has reset, as of `loop.now_s`.

        A time, not what is left: however late a supervisor reads it, it means the same.
        """
        return self._contact_s + self._watchdog_s

    def connect(self) -> None:
        """Connect, now or as soon as a coordinator runs."""
        try:
            connection = connected(self._folders.socket, timeout_s=1.0)
        except OSError:
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
            self._look_for_keeper()
            self._loop.call_in(self._retry_s, self.connect)
            return
        self._retry_s = _RETRY_S
        self._channel = Channel(self._loop, connection, self._on_message, self._on_lost)
        self.report(events.JOINED, data=self._joined())
        self._sent_seq = 0  # all that is not acknowledged is sent again
        self._flush()

    def _look_for_keeper(self) -> None:
        if now_s() - self._keeper_s > _KEEPER_S:
            self._keeper_s = now_s()
            with contextlib.suppress(OSError):
                start_keeper(self._folders)

    def _on_lost(self, channel: Channel) -> None:
        if channel is self._channel:
            self._channel = None
            self._loop.call_in(self._retry_s, self.connect)

    def _on_message(self, _channel: Channel, message: dict[str, Any]) -> None:
        # When this host sent what is answered.
        sent_s = float(message.get("sent_s", 0.0))
        if "acknowledged" in message:
            self._acknowledged(int(message["acknowledged"]))
        if message.get("join"):
            if not any(each.kind == events.JOINED for each in self._outgoing):
                self.report(events.JOINED, data=self._joined())
            return
        self._contact_s = max(self._contact_s, sent_s)
        if sent_s + self._watchdog_s <= now_s():
            return  # a late answer: other hosts may have its jobs by now
        for body in message.get("commands", ()):
            self._execute(body)

    def _acknowledged(self, seq: int) -> None:
        kept = [each for each in self._outgoing if each.seq <= seq]
        self._outgoing = [each for each in self._outgoing if each.seq > seq]
        for each in kept:
            if each.then is not None:
                each.then()

    def report(
        self,
        kind: str,
        fence: Fence = ("", 0),
        data: dict[str, Any] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Report an event.

        Args:
            kind: of the event.
            fence: the attempt that it is about.
            data: of the event.
            then: called when the coordinator has kept it.
        """
        event = events.Event(
            kind,
            at_s=0.0,  # the coordinator's clock counts
            job=fence[0],
            attempt=fence[1],
            host=self._host,
            data=data or {},
            agent=self._agent,
            agent_seq=self._next_seq,
        )
        row = _Outgoing(self._next_seq, kind, plain_event(event), then)
        self._outgoing.append(row)
        self._next_seq += 1
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_in(_BATCH_S, self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        new = [each for each in self._outgoing if each.seq > self._sent_seq]
        for begin in range(0, len(new), _MAX_EVENTS):
            self._push(new[begin : begin + _MAX_EVENTS])

    def _push(self, outgoing: Sequence[_Outgoing]) -> None:
        if self._channel is None:
            return
        if outgoing:
            self._sent_seq = outgoing[-1].seq
        message: dict[str, Any] = {
            "do": "push",
            "host": self._host,
            "agent": self._agent,
            "sent_s": now_s(),
            "events": [each.body for each in outgoing],
        }
        if meetings := self._meetings():
            message["meetings"] = meetings
        self._channel.send(message)

    def beat(self) -> None:
        """Send a heartbeat, with the events that are not acknowledged."""
        self._sent_seq = 0
        if self._outgoing:
            self._flush()
        else:
            self._push(())
