"""Connecting to a store whose server is another rank's process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

from stretto.errors import CommTimeout
from stretto.runtime.regroup import connect_store
from stretto.runtime.sockets import connections_to, open_sockets, shut

pytestmark = pytest.mark.timeout(180)

HALF_AN_HOUR = timedelta(minutes=30)


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_ends_after_the_probe_is_not_awaited(
    listener: socket.socket,
) -> None:
    def end_after_the_probe() -> None:
        listener.accept()[0].close()
        listener.close()

    thread = threading.Thread(target=end_after_the_probe)
    address = address_of(listener)
    thread.start()
    with pytest.raises(CommTimeout, match="does not answer"):
        connect_store(address, timeout=HALF_AN_HOUR, require_current=lambda: None)
    thread.join()


def test_a_silent_server_is_left_when_the_membership_ends(
    listener: socket.socket,
) -> None:
    port = listener.getsockname()[1]
    is_over, is_left = threading.Event(), threading.Event()

    def require_current() -> None:
        if is_over.is_set():
            raise CommTimeout("over")

    def end_the_membership() -> None:
        listener.accept()[0].close()  # the probe
        with listener.accept()[0] as attempt:
            attempt.recv(1)  # the store's greeting
            is_over.set()
            while not is_left.wait(0.02):  # the attempt connects again on its own
                shut(connections_to(open_sockets(), port))

    thread = threading.Thread(target=end_the_membership, daemon=True)
    thread.start()
    with listener, pytest.raises(CommTimeout, match="over"):
        connect_store(
            address_of(listener),
            timeout=HALF_AN_HOUR,
            require_current=require_current,
        )
    is_left.set()
    thread.join()


FAILED_ATTEMPT = """
import threading

import torch
import torch.distributed as dist

import stretto
from stretto.runtime.regroup import MemberGroup

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = stretto.DistributedDataParallel(torch.nn.Linear(2, 2), plan="ddp")
group = MemberGroup(model, host="127.0.0.1")
threading.Timer(1.0, group.end, (1,)).start()
try:
    group.enter(1, 0, 2, group.address)  # no other rank comes
except RuntimeError:
    group.built()
    group.enter(2, 0, 1, group.address)
    group.built()
    print(dist.distributed_c10d._get_default_group().group_name)
"""


def test_ranks_meet_under_one_name_whichever_of_them_have_failed_before() -> None:
    """Newcomers have not, and call their first group 0."""
    done = subprocess.run(
        [sys.executable, "-c", FAILED_ATTEMPT],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=150,
    )
    assert done.stdout.split() == ["0"]
