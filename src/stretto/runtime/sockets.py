"""Find the sockets of lanes, and limit the time for a store's answers."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.distributed_c10d import Store

_log = get_logger(__name__)

Socket = tuple[int, str]
"""Descriptor and inode: descriptors are reused, inodes are not while it is open."""


def open_sockets() -> set[Socket]:
    """Return this process's sockets; empty if /proc is missing."""
    found = set()
    try:
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(entry)  # noqa: PTH115
                if target.startswith("socket:"):
                    found.add((int(entry.name), target))
    except OSError:
        return set()
    return found


def connections_among(new: set[Socket], store: Store | int) -> set[Socket]:
    """Return those of ``new`` that belong to a lane.

    While a lane opens, other sockets may appear: connections of other ranks to a store
    that this process serves, or to any server of the user's. Such a connection was
    accepted by an older listener. A connection to ``store``'s own port does not belong
    to a lane either.

    Args:
        new: sockets that were opened while the lane was made.
        store: the lane's store, or the port of its server.
    """
    port = _port_of(store)
    mine: dict[int, bool] = {}
    connected: list[tuple[Socket, int, int]] = []
    for number, inode in open_sockets():
        with _opened((number, inode)) as found:
            if found is None or not _is_internet(found):
                continue
            local = found.getsockname()[1]
            if _listens(found):
                mine[local] = (number, inode) in new
            elif (number, inode) in new:
                with contextlib.suppress(OSError):  # no longer connected
                    connected.append(((number, inode), local, found.getpeername()[1]))
    return {
        row
        for row, local, remote in connected
        if mine.get(local, True) and port not in (local, remote)
    }


def connections_to(new: set[Socket], store: Store | int) -> set[Socket]:
    """Return those of ``new`` that connect to a store's server, or to its port."""
    port = _port_of(store)
    found = set()
    for row in new:
        with _opened(row) as opened, contextlib.suppress(OSError):
            if opened is not None and opened.getpeername()[1] == port:
                found.add(row)
    return found


def shut(sockets: set[Socket]) -> None:
    """Shut connections down. Descriptors stay open; their owner closes them."""
    for row in sockets & open_sockets():
        with _opened(row) as found, contextlib.suppress(OSError):
            if found is not None:
                found.shutdown(socket.SHUT_RDWR)
                _log.debug("shut socket %s down", row[1])


def answer_listeners(sockets: set[Socket], ranks: int) -> None:
    """Connect to a Gloo group's own listeners, in place of ranks that never will.

    A rank that builds a group waits until others have connected to its listener. Such a
    wait has no connection that could be shut down, and would last as long as the
    group's timeout. A connection begins with the number of the pair that it belongs to;
    here each is closed at once, so that the pair fails. Other listeners get a few
    connections that close.

    Args:
        sockets: those among which the listeners are.
        ranks: of the group, which has a pair for each other one.
    """
    for row in sockets & open_sockets():
        with _opened(row) as found, contextlib.suppress(OSError):
            if found is None or not _is_internet(found) or not _listens(found):
                continue
            host, port = found.getsockname()[:2]
            for number in range(ranks):
                with socket.create_connection((host, port), 1.0) as made:
                    made.sendall(struct.pack("q", number))


def bound_answers(sockets: set[Socket], limit_s: float) -> None:
    """Make requests on ``sockets`` fail if the answer takes longer than ``limit_s``.

    A store whose process is stopped keeps its connections open and never answers, and
    most requests to it have no timeout of their own.
    """
    whole_s = int(limit_s)
    value = struct.pack("ll", whole_s, int((limit_s - whole_s) * 1e6))
    for row in sockets:
        with _opened(row) as found, contextlib.suppress(OSError):
            if found is not None:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)


def _is_internet(opened: socket.socket) -> bool:
    return opened.family in (socket.AF_INET, socket.AF_INET6)


def _listens(opened: socket.socket) -> bool:
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@contextlib.contextmanager
def _opened(row: Socket) -> Iterator[socket.socket | None]:
    """Yield a socket for a descriptor, or ``None`` if it was reused by now."""
    number, inode = row
    try:
        copy = os.dup(number)
    except OSError:
        yield None
        return
    try:
        # Check the copy: the descriptor itself may be closed and reused in between.
        same = os.readlink(f"/proc/self/fd/{copy}") == inode  # noqa: PTH115
        found = socket.socket(fileno=copy) if same else None
    except OSError:
        found = None
    if found is None:
        os.close(copy)
        yield None
        return
    with found:
        yield found


def _port_of(store: Any) -> int | None:
    """Return the port of the server below a store, or ``None``; a port as it is."""
    if isinstance(store, int):
        return store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    return port if isinstance(port, int) else None
