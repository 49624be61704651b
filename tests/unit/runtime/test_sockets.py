"""Which sockets a failure may shut down, and how long a store may not answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import pytest
import torch.distributed as dist

from stretto.runtime.ranks import Ranks
from stretto.runtime.sockets import (
    answer_listeners,
    connections_among,
    open_sockets,
    shut,
)
from stretto.runtime.store import own_connection

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="needs Linux"
)


def ranks_over(store: dist.Store) -> Ranks:
    return Ranks(rank=0, size=2, names=(0, 1), store=store, timeout_s=20.0)


def numbers(sockets: set[tuple[int, str]]) -> set[int]:
    return {number for number, _ in sockets}


def test_only_a_lanes_own_connections_are_its() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = open_sockets()
        # What Gloo makes: a listener, a connection from a peer, one to a peer.
        lane = socket.create_server(("127.0.0.1", 0))
        peer = socket.create_connection(lane.getsockname())
        accepted, _ = lane.accept()
        # What comes at the same time: a client asks a server of this process, and
        # another rank connects to the store.
        client = socket.create_connection(server.getsockname())
        served, _ = server.accept()
        clone = own_connection(ranks_over(store), limit_s=20.0)
        clone.set("key", "")
        made = [lane, peer, accepted, client, served]
        found = connections_among(open_sockets() - before, store)
        assert numbers(found) == {peer.fileno(), accepted.fileno(), client.fileno()}
        shut(found)
        assert peer.recv(1) == b""
        assert clone.check(["key"])
        served.setblocking(False)
        for each in made:
            each.close()


def test_a_descriptor_that_is_anothers_by_now_is_left_alone() -> None:
    left, right = socket.socketpair()
    (number, inode) = next(row for row in open_sockets() if row[0] == left.fileno())
    left_again, other = socket.socketpair()
    os.dup2(left_again.fileno(), number)
    shut({(number, inode)})
    other.sendall(b"x")
    assert left_again.recv(1) == b"x"
    for each in (left, right, left_again, other):
        each.close()


SERVER = """
import threading
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def test_a_store_whose_process_is_stopped_fails_within_the_limit() -> None:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        theirs = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        mine = own_connection(ranks_over(theirs), limit_s=1.0)
        mine.set("key", "")
        server.send_signal(signal.SIGSTOP)
        try:
            # The signal is delivered later; until then its threads answer.
            status = Path(f"/proc/{server.pid}/stat")
            while status.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            began_s = perf_counter()
            with pytest.raises(RuntimeError, match="Timeout"):
                mine.check(["key"])
            assert perf_counter() - began_s < 10.0
        finally:
            server.kill()


LOST_RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), wait_for_workers=False)
dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))
"""


def build_after_loss(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Build a group whose other rank is killed; return whether it had to be answered.

    Which of two ranks connects to the other depends on their ports.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", LOST_RANK, str(store.port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as lost:
        while not store.num_keys():
            time.sleep(0.01)
        time.sleep(0.2)
        lost.kill()
    before = open_sockets()
    answered, ended = threading.Event(), threading.Event()

    def answer() -> None:
        while not ended.wait(0.5):
            answered.set()
            answer_listeners(open_sockets() - before, 2)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        # With the answer in time, the group may count as built, and fail later.
        dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=60))
    except RuntimeError as error:
        assert "connectFullMesh failed" in str(error)  # noqa: PT017
    finally:
        ended.set()
        thread.join()
    return answered.is_set()


def test_a_rank_that_waits_for_a_lost_one_to_connect_stops_waiting(monkeypatch):
    assert any(build_after_loss(monkeypatch) for _ in range(12))
