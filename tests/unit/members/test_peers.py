"""Which messages a keeper accepts."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from stretto import variable_names
from stretto.cluster.channel import encoded
from stretto.cluster.loop import Loop
from stretto.errors import StrettoError
from stretto.lab.ports import free_port
from stretto.members.ballots import Beat
from stretto.members.meeting import MeetingPoint, own_address
from stretto.members.peers import KeeperNetwork
from stretto.members.proofs import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.members.ballots import Message

LOCALHOST = "127.0.0.1"


class Keepers:
    """Networks in one loop, and what they have received."""

    def __init__(self) -> None:
        self.loop, self.port = Loop(), free_port()
        self.made: list[KeeperNetwork] = []
        self.received: list[tuple[int, Message]] = []
        self.formed: list[int] = []

    def start(self, node: int, nodes: int, limits: str = "1:8") -> KeeperNetwork:
        point = MeetingPoint(host=LOCALHOST, port=self.port, nodes=nodes, node=node)
        made = KeeperNetwork(
            self.loop,
            point,
            ranks=1,
            limits=limits,
            ranks_port=1,
            view=lambda: None,
            on_formed=lambda book: self.formed.append(book.keeper),
            on_met=lambda _: None,
            on_message=lambda sender, row: self.received.append((sender, row)),
            on_other=lambda _, __: None,
            on_failed=pytest.fail,
        )
        self.made.append(made)
        return made

    def run(self, until: Callable[[], object], turns: int = 200) -> None:
        for _ in range(turns):
            if until():
                return
            self.loop.turn(0.05)

    def close(self) -> None:
        for made in self.made:
            made.close()


@pytest.fixture
def keepers() -> Iterator[Keepers]:
    made = Keepers()
    yield made
    made.close()


BEAT = Beat(generation=1, hears=(0,))


def test_a_beat_is_accepted_once(keepers: Keepers) -> None:
    first, second = keepers.start(0, 2), keepers.start(1, 2)
    keepers.run(lambda: len(keepers.formed) == 2)
    kept: list[bytes] = []
    sent = second._beats._socket

    class Recorder:
        def sendto(self, data: bytes, to: Any) -> None:
            kept.append(data)
            sent.sendto(data, to)

    second._beats._socket = Recorder()  # type: ignore[assignment]
    second.send(0, BEAT)
    second._beats._socket = sent
    keepers.run(lambda: keepers.received)
    assert keepers.received == [(1, BEAT)]
    for data in (kept[0], b"x" + kept[0][1:], b"", b"0" * 40):
        sent.sendto(data, (first.host, first.port))
    second.send(0, Beat(generation=2, hears=()))
    keepers.run(lambda: len(keepers.received) > 1)
    assert [row.generation for _, row in keepers.received] == [1, 2]  # type: ignore[union-attr]


def test_a_host_with_other_limits_is_refused(
    keepers: Keepers, caplog: pytest.LogCaptureFixture
) -> None:
    keepers.start(0, 2)
    keepers.start(1, 2, limits="2:8")
    keepers.run(lambda: "settings are" in caplog.text)
    assert "its settings are 2:8, this host's are 1:8" in caplog.text
    assert keepers.formed == []


def test_a_stranger_without_a_proof_learns_and_changes_nothing(
    keepers: Keepers,
) -> None:
    keepers.start(0, 2)
    with socket.create_connection((LOCALHOST, keepers.port)) as stranger:
        hello = json.dumps({"version": "0", "ranks": 1})
        stranger.sendall(encoded({"nonce": "", "hello": hello, "proof": "0" * 64}))
        stranger.settimeout(0.01)
        keepers.run(lambda: False, turns=10)
        rows = [json.loads(row) for row in stranger.recv(10_000).splitlines()]
    assert [list(row) for row in rows] == [["nonce"], ["refused"]]
    assert keepers.formed == []


def test_the_key_depends_on_the_job_and_the_token() -> None:
    keys = {key_of(*row) for row in (("a", ""), ("b", ""), ("a", "t"), ("", "a"))}
    assert len(keys) == 4
    assert variable_names.ELASTIC_TOKEN.startswith("STRETTO_")


def test_an_unknown_first_host_is_one_sentence() -> None:
    with pytest.raises(StrettoError, match="--master-addr"):
        own_address("no-such-host.invalid", 1)
