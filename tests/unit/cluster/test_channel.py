"""Lines of JSON between processes of one user."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from stretto.cluster import channel
from stretto.cluster.channel import Channel, Listener, connected, encoded, listening
from stretto.cluster.loop import Loop

if TYPE_CHECKING:
    import socket
    from pathlib import Path


class Echo:
    """A loop in a thread that answers each message with itself."""

    def __init__(self, path: Path, max_unsent_bytes: int | None = None) -> None:
        self.loop, self.closed, self.answered = Loop(), 0, 0
        self.listener = Listener(
            self.loop,
            listening(path),
            self.answer,
            self.count,
            max_unsent_bytes=max_unsent_bytes,
        )
        self.thread = threading.Thread(target=self.loop.run, daemon=True)

    def answer(self, peer: Channel, message: dict[str, Any]) -> None:
        if message.get("stop"):
            self.loop.stop()
        if pause_s := message.get("pause_s"):
            time.sleep(pause_s)
        peer.send(message)
        self.answered += 1

    def count(self, _peer: Channel) -> None:
        self.closed += 1

    def __enter__(self) -> Echo:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_in(0.0, self.loop.stop)
        self.thread.join(10.0)
        self.listener.close()


def ended(echo: Echo, path: Path) -> None:
    channel.request(path, {"stop": True})
    echo.thread.join(10.0)


def test_a_request_gets_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Echo(path) as echo:
        assert channel.request(path, {"a": [1, "é", None]}) == {"a": [1, "é", None]}
        ended(echo, path)


def test_a_socket_of_a_long_path_is_reached(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 30) / "socket"
    path.parent.mkdir()
    with Echo(path) as echo:
        assert channel.request(path, {"a": 1}) == {"a": 1}
        ended(echo, path)


def test_large_messages_arrive_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Echo(path) as echo:
        text = "x" * 3_000_000
        assert channel.request(path, {"text": text}, timeout_s=60.0)["text"] == text
        ended(echo, path)


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"\xff\n", b"\n"])
def test_what_is_no_object_of_json_closes_the_connection(
    tmp_path: Path, line: bytes
) -> None:
    path = tmp_path / "socket"
    with Echo(path) as echo:
        with connected(path, timeout_s=10.0) as client:
            client.sendall(line + encoded({"a": 1}))
            assert client.recv(100) == b""
        assert channel.request(path, {"b": 2}) == {"b": 2}
        ended(echo, path)


def test_the_file_of_a_socket_is_this_users_alone(tmp_path: Path) -> None:
    with listening(tmp_path / "socket"):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600


def test_the_file_of_an_ended_listener_is_replaced(tmp_path: Path) -> None:
    listening(tmp_path / "socket").close()
    with pytest.raises(ConnectionRefusedError):
        connected(tmp_path / "socket")
    with listening(tmp_path / "socket"), connected(tmp_path / "socket"):
        pass


def test_another_users_process_is_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(tmp_path / "socket") as listener, connected(tmp_path / "socket"):
        peer, _ = listener.accept()
        with peer:
            assert channel.is_own_peer(peer)
            if os.geteuid() == 0:
                pytest.skip("root may connect to all")
            monkeypatch.setattr(os, "geteuid", lambda: -1)
            assert not channel.is_own_peer(peer)


TEXT = "x" * 1000
MAX_BYTES = 100_000


def send_all(client: socket.socket, count: int) -> None:
    """Send requests, numbered, and read no answer."""
    for number in range(count):
        client.sendall(encoded({"number": number, "text": TEXT}))


def test_a_peer_that_takes_no_answers_is_not_read_further(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Echo(path, MAX_BYTES) as echo, connected(path, timeout_s=60.0) as client:
        sender = threading.Thread(target=send_all, args=(client, 4000), daemon=True)
        sender.start()
        before = -1
        while before != echo.answered:
            before = echo.answered
            time.sleep(0.2)
        assert 0 < echo.answered < 2000  # the rest waits at the client
        assert channel.request(path, {"a": 1}) == {"a": 1}
        with client.makefile("rb") as answers:
            numbers = [json.loads(next(answers))["number"] for _ in range(4000)]
        assert numbers == list(range(4000))
        sender.join(10.0)
        ended(echo, path)


def test_a_peer_that_takes_no_answers_for_long_is_given_up_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "_LOOK_S", 0.05)
    path = tmp_path / "socket"
    with Echo(path, MAX_BYTES) as echo, connected(path, timeout_s=60.0) as client:
        with pytest.raises(OSError, match=r"reset|pipe"):
            send_all(client, 10_000)
        ended(echo, path)
    lines = [r.getMessage() for r in caplog.records]
    assert len([line for line in lines if "takes no answers" in line]) == 1


def test_a_peer_that_asks_on_and_on_lets_others_have_their_turn(
    tmp_path: Path,
) -> None:
    path = tmp_path / "socket"
    with Echo(path) as echo, connected(path, timeout_s=60.0) as client:
        client.sendall(encoded({"pause_s": 0.05}) * 200)
        client.recv(1)
        assert channel.request(path, {"a": 1}) == {"a": 1}
        assert echo.answered < 200
        ended(echo, path)
