"""Where keepers meet, and what each learns there."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.members.view import View

MEETING_S = 900.0
"""How long keepers wait for each other before training, as torchrun's launchers do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlace:
    """Where a keeper is reached."""

    keeper: int
    """Its number; never used again in a run."""

    ranks: int
    """How many ranks it starts."""

    host: str
    port: int

    process: str
    """Drawn by its process: a keeper that is started again is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """The information that a keeper needs to take part."""

    run: str
    """Drawn at the meeting, to tell runs of one job apart."""

    keeper: int
    """The number of the keeper that gets it."""

    places: tuple[KeeperPlace, ...]
    """All keepers."""

    ranks_port: int
    """Where the ranks of the first view meet, on the first keeper's host."""

    view: View | None = None
    """For a keeper that joins later: the present view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where and with whom a host's keeper meets the others."""

    host: str
    """An address of any keeper of the job; of the first one before training."""

    port: int

    nodes: int
    """How many hosts the job begins with."""

    node: int | None = None
    """This host's number among them; drawn if it is ``None``."""

    job: str = "none"
    """The job's name."""

    local: str | None = None
    """This host's address; by default that from which it reaches the others."""


def own_address(target: str, port: int) -> str:
    """Return the address from which this host reaches another.

    Raises:
        StrettoError: the name is unknown, or there is no route.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            target, port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StrettoError(
            f"this host can't reach {target}, where the hosts meet: {error.strerror}. "
            "Check --master-addr and the network."
        ) from error


def is_own(host: str) -> bool:
    """Return whether an address or a name is this host's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


def address_of(host: str) -> str:
    """Return the first address of a name that is known."""
    row = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    return str(row[4][0])
