"""The connections between the keepers of a job's hosts.

Keepers meet at one of them. It gives each a number and the others' addresses; then
every two keepers have a connection, for ballots, and send each other beats as
datagrams (`beats`). A host that is started later meets the others at any of them.

# Note [Who may take part]
A connection begins with a proof by each side that it knows the job's name and token,
for numbers that the other side has just drawn, and every beat has such a proof, with
the number of the run. So a keeper of another job, of an earlier run, or without the
token is refused. Messages are JSON and are checked against their types. Nothing is
encrypted, as nothing is between ranks either.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import msgspec

from stretto import variable_names
from stretto._version import __version__
from stretto.cluster.channel import Channel
from stretto.errors import StrettoError
from stretto.logs import get_logger
from stretto.members.ballots import Beat
from stretto.members.beats import BeatSocket
from stretto.members.connections import Connector, keep_alive
from stretto.members.meeting import (
    MEETING_S,
    Book,
    KeeperPlace,
    MeetingPoint,
    address_of,
    is_own,
    own_address,
)
from stretto.members.proofs import key_of, proof_of
from stretto.members.wire import keeper_message, keeper_message_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.cluster.loop import Loop
    from stretto.members.ballots import Message
    from stretto.members.view import View

_log = get_logger(__name__)

_FIRST_AGAIN_S = 0.1
_LONGEST_AGAIN_S = 1.0
_PROOF_S = 5.0
"""A connection without a proof is closed after so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hello:
    """The first message of a keeper."""

    version: str
    process: str
    ranks: int
    host: str
    port: int
    limits: str
    """All of the job's settings that must be equal."""

    node: int | None = None
    """Set by a keeper that has no number yet, if its user gave it one."""

    keeper: int | None = None
    """Set by a keeper that has a number already, with its run."""

    run: str = ""


class _Link:
    """A connection to another keeper, from its first byte on."""

    def __init__(self, *, is_dialed: bool) -> None:
        self.is_dialed = is_dialed
        self.channel: Channel | None = None
        self.nonce = secrets.token_hex(16)
        self.theirs = ""
        self.hello: _Hello | None = None
        self.keeper: int | None = None
        """The keeper whose proof was accepted, on a connection for ballots."""


@final
class KeeperNetwork:
    """A keeper's connections to all others."""

    def __init__(
        self,
        loop: Loop,
        point: MeetingPoint,
        *,
        ranks: int,
        limits: str,
        ranks_port: int,
        view: Callable[[], View | None],
        on_formed: Callable[[Book], None],
        on_met: Callable[[int], None],
        on_message: Callable[[int, Message], None],
        on_other: Callable[[int, dict[str, Any]], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Listen, and meet the others.

        Args:
            loop: calls everything below.
            point: where to meet.
            ranks: how many ranks this host starts.
            limits: settings that must be equal on all hosts.
            ranks_port: for the ranks of the first view, if this is the first keeper.
            view: the present view, or ``None`` before training.
            on_formed: called once, when this keeper has its number.
            on_met: called with each other keeper's number.
            on_message: called with the sender and its message.
            on_other: called with messages that are not of `ballots`.
            on_failed: called with the reason if keepers don't meet.

        Raises:
            StrettoError: the address or port can't be used.
        """
        self._loop, self._point = loop, point
        self._ranks, self._limits, self._ranks_port = ranks, limits, ranks_port
        self._view, self._on_formed, self._on_met = view, on_formed, on_met
        self._on_message, self._on_other = on_message, on_other
        self._on_failed = on_failed
        self._key = key_of(point.job, os.environ.get(variable_names.ELASTIC_TOKEN, ""))
        self._process = secrets.token_hex(8)
        self.book: Book | None = None
        self._places: dict[int, KeeperPlace] = {}
        self._links: dict[int, _Link] = {}
        self._dialing: set[int] = set()
        self._waiting: list[_Link] = []
        self._channels: set[Channel] = set()
        self._announced: dict[str, Any] | None = None
        self._warned: set[str] = set()
        if is_own(point.host):
            here = address_of(point.host)
            self.host = point.local or here
            self.forms = point.node in (None, 0) and self.host == here
        else:
            self.host = point.local or own_address(point.host, point.port)
            self.forms = False
        self._listener = self._listen()
        try:
            self._beats = BeatSocket(
                loop,
                self.host,
                self.port,
                process=self._process,
                place_of=self._places.get,
                on_beat=on_message,
            )
        except StrettoError:
            self._listener.close()
            raise
        self._connector = Connector(loop, self.host)
        loop.watch(self._listener.fileno(), read=self._accept)
        self._limit = loop.call_in(MEETING_S, self._on_meeting_late)
        if self.forms:
            loop.call_in(0.0, self._form_if_complete)
        else:
            loop.call_in(0.0, self._seek)

    # sockets

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # The same port everywhere, so that a later host may meet any of them. On the
        # first keeper's own address a second one gets another port.
        ports = [self._point.port, 0]
        if self.forms:
            ports = [self._point.port]
        elif is_own(self._point.host) and self.host == address_of(self._point.host):
            ports = [0]
        while ports:
            port = ports.pop(0)
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self.host, port))
                listener.listen(128)
            except OSError as error:
                listener.close()
                in_use = error.errno == errno.EADDRINUSE
                if in_use and self.forms and self._point.node is None:
                    self.forms, ports = False, [0]  # another keeper of this host does
                if in_use and ports:
                    continue
                raise StrettoError(
                    f"this host's keeper can't listen at {self.host} port {port}: "
                    f"{error.strerror}. Pass another --master-port, or --local-addr."
                ) from error
            listener.settimeout(0.0)
            return listener
        raise AssertionError

    @property
    def port(self) -> int:
        """The port of this keeper, for connections and datagrams."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close everything."""
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._beats.close()
        self._links = {}
        for channel in list(self._channels):
            channel.close()
        self._connector.close()

    # meeting

    def _me(self, keeper: int) -> KeeperPlace:
        """Return this keeper's place, under a number."""
        return KeeperPlace(
            keeper=keeper,
            ranks=self._ranks,
            host=self.host,
            port=self.port,
            process=self._process,
        )

    def _hello(self) -> _Hello:
        book = self.book
        return _Hello(
            version=__version__,
            process=self._process,
            ranks=self._ranks,
            host=self.host,
            port=self.port,
            limits=self._limits,
            node=self._point.node,
            keeper=None if book is None else book.keeper,
            run="" if book is None else book.run,
        )

    def _on_meeting_late(self) -> None:
        """Fail if the keepers have not met in time."""
        if self.book is None:
            here = f"{1 + len(self._waiting)} of {self._point.nodes} hosts have met"
            who = here if self.forms else "the first host does not answer"
            self._on_failed(
                f"{who} at {self._point.host} port {self._point.port} in "
                f"{MEETING_S:g} s: start `stretto run --elastic` on all hosts, with "
                "one --master-addr, --master-port, --rdzv-id and "
                f"{variable_names.ELASTIC_TOKEN}"
            )

    def _form_if_complete(self) -> None:
        """Number the keepers once the job's initial number of them has arrived."""
        if self.book is not None or len(self._waiting) < self._point.nodes - 1:
            return
        waiting, self._waiting = self._waiting, []
        hellos = [link.hello for link in waiting if link.hello is not None]
        given = {hello.node for hello in hellos}
        free = (n for n in range(1, self._point.nodes) if n not in given)
        places = [self._me(0)]
        for link in waiting:
            hello = link.hello
            assert hello is not None  # noqa: S101  it waits because it has said so
            link.keeper = next(free) if hello.node is None else hello.node
            places.append(_place_of(hello, link.keeper))
        places.sort(key=lambda place: place.keeper)
        run = secrets.token_hex(8)
        for link in waiting:
            self._answer(
                link, book=self._book_for(link.keeper or 0, run, tuple(places))
            )
            if link.channel is not None:
                link.channel.close_when_sent()
        self._formed(self._book_for(0, run, tuple(places)))

    def _book_for(
        self,
        keeper: int,
        run: str,
        places: tuple[KeeperPlace, ...],
        view: View | None = None,
    ) -> Book:
        return Book(
            run=run,
            keeper=keeper,
            places=places,
            ranks_port=self._ranks_port,
            view=view,
        )

    def _formed(self, book: Book) -> None:
        """Begin as one of the keepers of a book."""
        self.book = book
        self._beats.begin(self._key, run=book.run, keeper=book.keeper)
        self._limit.cancel()
        for place in book.places:
            self._meet(place)
        self._on_formed(book)

    def _meet(self, place: KeeperPlace) -> None:
        """Add another keeper, and dial it if its number is lower."""
        book = self.book
        if book is None or place.keeper in self._places or place.keeper == book.keeper:
            return
        self._places[place.keeper] = place
        self._on_met(place.keeper)
        if place.keeper < book.keeper:
            self._dial(place.keeper, _FIRST_AGAIN_S)

    def _seek(self) -> None:
        """Dial the point where keepers meet until it answers."""
        if self.book is None:
            self._connect(
                self._point.host,
                self._point.port,
                _Link(is_dialed=True),
                self._seek_later,
            )

    def _seek_later(self) -> None:
        self._loop.call_in(_LONGEST_AGAIN_S / 2, self._seek)

    def _dial(self, keeper: int, again_s: float) -> None:
        """Connect to a keeper with a lower number, and again when that ends."""
        if keeper in self._dialing or keeper in self._links or self._is_closed:
            return
        self._dialing.add(keeper)
        place, link = self._places[keeper], _Link(is_dialed=True)
        link.keeper = keeper

        def again() -> None:
            self._dialing.discard(keeper)
            if self._links.get(keeper) is link:
                del self._links[keeper]
            longer_s = min(2 * again_s, _LONGEST_AGAIN_S)
            self._loop.call_in(again_s, lambda: self._dial(keeper, longer_s))

        self._connect(place.host, place.port, link, again)

    @property
    def _is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def _connect(
        self, host: str, port: int, link: _Link, on_end: Callable[[], None]
    ) -> None:
        """Connect without blocking; ``on_end`` is called when it fails or has ended."""

        def made(connection: socket.socket) -> None:
            if self._is_closed:
                connection.close()
                on_end()
            else:
                self._open(connection, link, on_end)

        self._connector.connect(host, port, made, on_end)

    def _open(
        self, made: socket.socket, link: _Link, on_end: Callable[[], None]
    ) -> None:
        """Read messages from a connection; close it if no proof arrives in time."""
        keep_alive(made)

        def closed(channel: Channel) -> None:
            self._channels.discard(channel)
            on_end()

        link.channel = Channel(
            self._loop, made, lambda _, message: self._on_line(link, message), closed
        )
        self._channels.add(link.channel)
        if link.keeper is not None or not link.is_dialed:  # a meeting may take long
            self._loop.call_in(_PROOF_S, lambda: self._close_unproved(link))

    def _close_unproved(self, link: _Link) -> None:
        if link.hello is None and link.channel is not None:
            link.channel.close()

    def _accept(self) -> None:
        """Accept all pending connections, and send each a nonce."""
        while True:
            try:
                made, _ = self._listener.accept()
            except OSError:
                return
            link = _Link(is_dialed=False)

            def ended(link: _Link = link) -> None:
                if link in self._waiting:
                    self._waiting.remove(link)
                if link.keeper is not None and self._links.get(link.keeper) is link:
                    del self._links[link.keeper]

            self._open(made, link, ended)
            if link.channel is not None:
                link.channel.send({"nonce": link.nonce})

    # proofs

    def _on_line(self, link: _Link, message: dict[str, Any]) -> None:
        """Exchange proofs with another keeper; after them, take its messages."""
        channel = link.channel
        if channel is None:
            return
        if link.hello is not None:
            if link.keeper is not None and self._links.get(link.keeper) is link:
                self._take(link.keeper, message)
            return
        match message:
            case {"nonce": str(nonce), "hello": str(hello), "proof": str(proof)}:
                link.theirs = nonce
                wanted = proof_of(self._key, "dial", link.nonce, nonce, hello)
                if link.is_dialed or not hmac.compare_digest(wanted, proof):
                    self._refuse(link, "its job or its token is another")
                    return
                self._on_hello(link, hello)
            case {"nonce": str(nonce)} if link.is_dialed:
                link.theirs = nonce
                text = _text(self._hello())
                proof = proof_of(self._key, "dial", nonce, link.nonce, text)
                channel.send({"nonce": link.nonce, "hello": text, "proof": proof})
            case {"answer": str(answer), "proof": str(proof)} if link.is_dialed:
                wanted = proof_of(self._key, "accept", link.theirs, link.nonce, answer)
                if hmac.compare_digest(wanted, proof):
                    self._on_answer(link, json.loads(answer))
                else:
                    channel.close()
            case {"refused": str(why)}:
                self._warn(f"another keeper refuses this one: {why[:200]}")
                channel.close()
            case _:
                channel.close()

    def _refuse(self, link: _Link, why: str) -> None:
        """Close a connection, and send and log the reason."""
        if link.channel is not None:
            self._warn(f"a connection of another keeper was refused: {why}")
            link.channel.send({"refused": why})
            link.channel.close_when_sent()

    def _warn(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)

    def _answer(
        self, link: _Link, *, book: Book | None = None, **others: object
    ) -> None:
        """Answer a hello, with a proof."""
        if book is not None:
            others["book"] = msgspec.to_builtins(book)
        text = json.dumps(others)
        proof = proof_of(self._key, "accept", link.nonce, link.theirs, text)
        if link.channel is not None:
            link.channel.send({"answer": text, "proof": proof})

    def _on_hello(self, link: _Link, text: str) -> None:
        """Take part with another keeper, whose proof was accepted."""
        try:
            hello = msgspec.json.decode(text.encode(), type=_Hello)
        except msgspec.DecodeError:
            self._refuse(link, "it has another version of the protocol")
            return
        if why := self._why_refused(hello):
            self._refuse(link, why)
            return
        link.hello = hello
        book = self.book
        if hello.keeper is not None:
            self._on_peer(link, hello, hello.keeper)
        elif book is None and self.forms:
            self._waiting.append(link)
            self._form_if_complete()
        elif book is None or (view := self._view()) is None:
            self._answer(link, wait=True)
        else:  # a host that joins while the others train
            numbers = [book.keeper, *self._places]
            place = _place_of(hello, 1 + max(numbers))
            places = (*self._places.values(), self._me(book.keeper), place)
            given = self._book_for(place.keeper, book.run, places, view)
            self._meet(place)
            self._answer(link, book=given)
            if link.channel is not None:
                link.channel.close_when_sent()

    def _why_refused(self, hello: _Hello) -> str | None:
        """Return why a keeper may not take part, or ``None`` if it may."""
        if hello.version != __version__:
            return f"it has stretto {hello.version}, this host has {__version__}"
        if hello.limits != self._limits:
            return f"its settings are {hello.limits}, this host's are {self._limits}"
        book = self.book
        if hello.keeper is not None:
            if book is None or hello.run != book.run:
                return "it belongs to another run of the job"
            known = self._places.get(hello.keeper)
            if hello.keeper == book.keeper or (
                known is not None and known.process != hello.process
            ):
                return (
                    "its number is taken, perhaps by one that has just ended and is "
                    "given up in a few seconds"
                )
        elif book is None and self.forms and hello.node is not None:
            taken = [link.hello.node for link in self._waiting if link.hello]
            if not 0 < hello.node < self._point.nodes or hello.node in taken:
                return f"--node-rank {hello.node} is taken, or not below --nnodes"
        return None

    def _on_peer(self, link: _Link, hello: _Hello, keeper: int) -> None:
        """Accept the connection of a keeper that has a number."""
        self._meet(_place_of(hello, keeper))
        before = self._links.pop(keeper, None)
        if before is not None and before.channel is not None:
            before.channel.close()
        link.keeper = keeper
        self._links[keeper] = link
        self._answer(link, places=msgspec.to_builtins(tuple(self._places.values())))
        self._send_announced(link)

    def _on_answer(self, link: _Link, answer: dict[str, Any]) -> None:
        """Use a connection that was dialed; the other keeper has proved itself."""
        channel = link.channel
        if channel is None:
            return
        link.hello = self._hello()
        try:
            match answer:
                case {"book": dict(row)} if self.book is None:
                    self._formed(msgspec.convert(row, Book))
                case {"places": list(rows)} if link.keeper is not None:
                    self._links[link.keeper] = link
                    self._send_announced(link)
                    for place in msgspec.convert(rows, tuple[KeeperPlace, ...]):
                        self._meet(place)
                    return
                case _:
                    pass
        except msgspec.ValidationError:
            self._warn("another keeper's answer was not understood")
        channel.close()

    # messages

    def send(self, keeper: int, message: Message) -> None:
        """Send a message; it is lost if there is no connection."""
        if isinstance(message, Beat):
            self._beats.send(keeper, message)
        elif (link := self._links.get(keeper)) is not None and link.channel is not None:
            link.channel.send(keeper_message(message))

    def send_all(self, message: dict[str, Any]) -> None:
        """Send a message that is not of `ballots` to all keepers."""
        for link in list(self._links.values()):
            if link.channel is not None:
                link.channel.send(message)

    def announce(self, message: dict[str, Any]) -> None:
        """Send a message to all keepers, also to those not connected yet."""
        self._announced = message
        self.send_all(message)

    def _send_announced(self, link: _Link) -> None:
        """Send the last announcement to a keeper that has just connected."""
        if self._announced is not None and link.channel is not None:
            link.channel.send(self._announced)

    def confirm(self, keeper: int, message: dict[str, Any]) -> None:
        """Answer a keeper's message that is not of `ballots`."""
        link = self._links.get(keeper)
        if link is not None and link.channel is not None:
            link.channel.send(message)

    @property
    def others(self) -> frozenset[int]:
        """All other keepers that are known."""
        return frozenset(self._places)

    def _take(self, keeper: int, message: dict[str, Any]) -> None:
        """Pass on a message, which is of `ballots` or another one."""
        found = keeper_message_of(message)
        if found is not None:
            self._on_message(keeper, found)
        else:
            self._on_other(keeper, message)

    def name(self, keeper: int) -> str:
        """Return a keeper's host for messages."""
        place = self._places.get(keeper)
        return f"host {keeper}" + ("" if place is None else f" ({place.host})")


def _place_of(hello: _Hello, keeper: int) -> KeeperPlace:
    return KeeperPlace(
        keeper=keeper,
        ranks=hello.ranks,
        host=hello.host,
        port=hello.port,
        process=hello.process,
    )


def _text(hello: _Hello) -> str:
    """Return the text that a proof covers."""
    return msgspec.json.encode(hello).decode()
