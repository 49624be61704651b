"""Collectives that never end do not keep a rank from following the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stretto.errors import CommTimeout
from stretto.runtime.waits import wait_until_over

if TYPE_CHECKING:
    from datetime import timedelta

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="needs Linux"
)

# The receiver is lost while a tensor larger than the connection's buffers is sent.
PROGRAM = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from stretto.errors import CommTimeout
from stretto.runtime.sockets import connections_among, open_sockets, shut
from stretto.runtime.waits import BoundedGroup

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore(
    "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False
)
if rank == 0:
    print(store.port, flush=True)
before = open_sockets()
kind = dist.ProcessGroup.BackendType.GLOO
inner = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=300))
base = dist.ProcessGroup(store, rank, 2)
base._register_backend(torch.device("cpu"), kind, inner)
base._set_default_backend(kind)
made = connections_among(open_sockets() - before, store)
values = torch.ones(1 << 23)
if rank == 1:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        base.broadcast(values, 0).wait()
ended = threading.Event()

def end_membership():
    sys.stdin.readline()  # the other rank was killed
    shut(made)
    ended.set()

threading.Thread(target=end_membership, daemon=True).start()
group = BoundedGroup(base, ended.is_set)
base.broadcast(values, 0).wait()
print("sending", flush=True)
try:
    while True:
        # In C++, which waits for the work.
        dist._broadcast_coalesced(group, [values], 1 << 30, 0)
except CommTimeout as error:
    print(error, flush=True)
except RuntimeError:
    print("gloo's own error", flush=True)
os._exit(0)
"""


def rank(number: int, port: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(number), port],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_broadcast_to_a_lost_rank_ends_with_the_membership(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with rank(0, "0") as sender:
        assert sender.stdout is not None
        assert sender.stdin is not None
        try:
            with rank(1, sender.stdout.readline().strip()) as receiver:
                assert sender.stdout.readline() == "sending\n"
                time.sleep(0.1)
                receiver.send_signal(signal.SIGSTOP)
                time.sleep(0.2)
                receiver.kill()
            text, _ = sender.communicate("killed\n", timeout=60.0)
        finally:
            sender.kill()
    assert text.strip() in {"these ranks no longer train together", "gloo's own error"}


class Work:
    """A collective that never ends, or that fails while it is waited for."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def is_completed(self) -> bool:
        return bool(self._error)

    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError(self._error or "Operation timed out!")


def test_an_endless_collective_is_left_when_the_ranks_part() -> None:
    is_over = threading.Event()
    threading.Timer(0.3, is_over.set).start()
    with pytest.raises(CommTimeout, match="no longer train together"):
        wait_until_over(Work(), is_over.is_set)


def test_the_error_of_a_failed_collective_is_its_own() -> None:
    work: Any = Work("Connection closed by peer")
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_until_over(work, lambda: False)
