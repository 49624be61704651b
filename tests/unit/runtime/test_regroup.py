"""Connecting to a store whose server is another rank's process."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest

from stretto.errors import CommTimeout
from stretto.runtime.regroup import connect_store
from stretto.runtime.sockets import connections_to, open_sockets, shut

pytestmark = pytest.mark.timeout(60)

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
