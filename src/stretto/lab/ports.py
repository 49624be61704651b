"""A port for ranks to meet at, which no other process takes first."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import random
import socket
from pathlib import Path

from stretto.errors import LabError

SPAN = 12_000
"""Number of ports tried, below those that the kernel uses for outgoing connections."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_EPHEMERAL = 32_768
_MIN_PORT = 1024
_ATTEMPTS = 500

_rng = random.SystemRandom()  # the caller's seed would give the same ports to all

_claims: collections.deque[int] = collections.deque()  # open until the process ends
_MAX_CLAIMS = 64
"""A port is used soon after it was requested: older claims are released."""


def free_port() -> int:
    """Return a TCP port on which nothing listens, for a process started from this one.

    A port that is found by binding to port 0 is in the kernel's range for local ports
    of outgoing connections, so any process may get it a moment later. This function
    returns a port below that range. No other caller of this function gets it while this
    process lives (or requests 64 more).

    Raises:
        LabError: no free port was found.
    """
    low, high = span(_EPHEMERAL)
    for _ in range(_ATTEMPTS):
        port = _rng.randrange(low, high)
        claim = _claimed(port)
        if claim is None:
            continue
        if not _binds(port):
            claim.close()
            continue
        _claims.append(claim.detach())
        if len(_claims) > _MAX_CLAIMS:
            os.close(_claims.popleft())
        return port
    raise LabError(
        f"none of {_ATTEMPTS} ports tried between {low} and {high - 1} is free; "
        "see what listens there with `ss -ltn`"
    )


def span(ephemeral: Path) -> tuple[int, int]:
    """Return the range to search: the first port, and the one after the last.

    ``ephemeral`` is the kernel's file with the first and the last port that outgoing
    connections get.
    """
    first, last = _USUAL_FIRST_EPHEMERAL, 2**16 - 1
    with contextlib.suppress(OSError, ValueError):  # not Linux: use the usual ones
        first, last = map(int, ephemeral.read_text().split())
    if first - _MIN_PORT >= SPAN // 10:
        return max(_MIN_PORT, first - SPAN), first
    if 2**16 - 1 - last >= SPAN // 10:
        return last + 1, min(2**16, last + 1 + SPAN)
    return 2**16 - SPAN, 2**16  # the kernel reserves no range


def _claimed(port: int) -> socket.socket | None:
    """Claim a port for this process, visibly to this function's other callers.

    An abstract Unix socket is visible only to processes that share the port's network.
    Systems other than Linux have none, and there only chance keeps callers apart.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0stretto-port-{port}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            return None
    return claim


def _binds(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))  # on every interface, as a store does
        except OSError:
            return False
    return True
