"""How messages reach hosts on Ray, with a stand-in for Ray in one process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from stretto.cluster import engine_local, engine_ray, ray_actor, ray_gateway, roles
from stretto.cluster.channel import connected, listening
from stretto.cluster.folders import Folders, RaySettings, Settings, settings_of
from stretto.cluster.processes import lock, start_detached
from stretto.cluster.ray_actor import HostActor
from stretto.cluster.ray_gateway import Gateway
from stretto.cluster.ray_head import environment, start_command
from stretto.cluster.ray_relay import Relay, members
from stretto.errors import ClusterError, MissingPackage, SpecError
from support import clusters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

LIMIT_S = 30.0

FACTS = {
    "ray_version": "2.60.0",
    "python_version": platform.python_version(),
    "nodes": ["127.0.0.1"],
}
"""What a Ray says of itself."""


def node(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "NodeID": f"n{number}",
        "Alive": True,
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": f"host{number}",
        "NodeName": f"10.0.0.{number}",
        "Resources": {"CPU": 2.0},
    } | changes


def of_host(host: str, **changes: Any) -> str:
    settings = Settings(hosts={host: ("cpu:0",)}, policy="fifo", has_keeper=False)
    return json.dumps(asdict(settings) | changes)


# hosts


def test_a_node_is_a_host_with_its_gpus_or_else_its_processors() -> None:
    gpus = {"CPU": 8.0, "GPU": 2.0}
    found = members([node(1), node(2, Resources=gpus)], "n9", {}, {}, set())
    assert found["host1"].devices == ("cpu:0", "cpu:1")
    assert found["host2"].devices == ("cuda:0", "cuda:1")
    assert found["host2"].asks_for_gpus


def test_a_node_name_comes_before_a_host_name() -> None:
    assert list(members([node(1, NodeName="left")], "n9", {}, {}, set())) == ["left"]


def test_this_machines_node_has_the_hosts_that_the_settings_name() -> None:
    hosts = {"a": ("cpu:0",), "b": ("cpu:1",)}
    found = members([node(1), node(2)], "n2", hosts, {}, set())
    assert {name: found[name].node for name in found} == {
        "a": "n2",
        "b": "n2",
        "host1": "n1",
    }


def test_a_lost_node_and_one_without_devices_are_no_hosts() -> None:
    nodes = [node(1, Alive=False), node(2, Resources={})]
    assert members(nodes, "n9", {}, {}, set()) == {}


def test_the_second_of_two_nodes_of_one_name_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("stretto").propagate = True
    nodes, unused = [node(2, NodeManagerHostname="host1"), node(1)], set()
    for _ in range(2):  # the gateway reads the nodes each second
        assert members(nodes, "n9", {}, {}, unused)["host1"].node == "n1"
    assert caplog.text.count("--node-name") == 1


# messages


class World:
    """A coordinator and an agent that the test plays, actor and relay between."""

    def __init__(self, root: Path) -> None:
        self.folders = Folders(root)
        self.folders.create()
        self.actor = HostActor(str(root), "a", of_host("a"))
        self.relays: list[asyncio.Task[None]] = []
        self.to_coordinator: list[bytes] = []
        self.ends: asyncio.Event = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []
        self.servers: list[asyncio.Server] = []

    def relay(self, gateway: str, actor: Any = None) -> asyncio.Task[None]:
        relay = Relay(actor or self.actor, gateway, self.folders.socket)
        self.relays.append(asyncio.create_task(relay.run()))
        return self.relays[-1]

    async def coordinator(self) -> None:
        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            self.writers.append(writer)
            while piece := await reader.read(1 << 16):
                self.to_coordinator.append(piece)
            self.ends.set()
            writer.close()

        socket = listening(self.folders.socket)
        self.servers.append(await asyncio.start_unix_server(serve, sock=socket))

    async def agent(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = self.folders.of_node("a").socket
        await until(path.exists)
        connection = connected(path, timeout_s=1.0)
        connection.settimeout(0.0)
        return await asyncio.open_unix_connection(sock=connection)

    async def received(self, data: bytes) -> None:
        await until(lambda: data in b"".join(self.to_coordinator))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.005)


def in_world(root: Path, test: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(root)
        try:
            await test(world)
        finally:
            for task in world.relays:
                task.cancel()
            await asyncio.gather(*world.relays, return_exceptions=True)
            await world.actor.stop()
            for server in world.servers:
                server.close()
            for writer in world.writers:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    asyncio.run(run())


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """Run a test in a world whose actor starts no process."""
    monkeypatch.setattr(ray_actor.Role, "look", lambda _: None)
    return lambda test: in_world(tmp_path / "c", test)


def test_messages_pass_both_ways_in_order(world) -> None:
    async def test(w: World) -> None:
        await w.coordinator()
        w.relay("g1")
        reader, writer = await w.agent()
        for number in range(200):
            writer.write(b"%d\n" % number)
        await w.received(b"199\n")
        assert b"".join(w.to_coordinator) == b"".join(b"%d\n" % n for n in range(200))
        for number in range(200):
            w.writers[0].write(b"%d\n" % number)
        assert [int(await reader.readline()) for _ in range(200)] == list(range(200))
        writer.close()

    world(test)


def test_messages_wait_for_a_coordinator_that_starts_later(world) -> None:
    async def test(w: World) -> None:
        w.relay("g1")
        _, writer = await w.agent()
        writer.write(b"joined\n")
        await w.actor.receive("g1", 99)  # the relay has what was sent
        await w.coordinator()
        await w.received(b"joined\n")
        writer.close()

    world(test)


def test_an_agent_connects_again_if_the_coordinator_has_closed(world) -> None:
    async def test(w: World) -> None:
        await w.coordinator()
        w.relay("g1")
        reader, writer = await w.agent()
        writer.write(b"first\n")
        await w.received(b"first\n")
        w.writers[0].close()
        assert await reader.read() == b""
        writer.close()
        _, writer = await w.agent()
        writer.write(b"second\n")
        await w.received(b"second\n")
        assert len(w.writers) == 2
        writer.close()

    world(test)


def test_the_coordinator_sees_a_lost_agents_connection_close(world) -> None:
    async def test(w: World) -> None:
        await w.coordinator()
        w.relay("g1")
        _, writer = await w.agent()
        writer.write(b"first\n")
        await w.received(b"first\n")
        writer.close()
        async with asyncio.timeout(LIMIT_S):
            await w.ends.wait()

    world(test)


def test_another_gateway_begins_with_a_connection_of_its_own(world) -> None:
    async def test(w: World) -> None:
        await w.coordinator()
        relay = w.relay("g1")
        reader, writer = await w.agent()
        writer.write(b"first\n")
        await w.received(b"first\n")
        relay.cancel()
        w.relay("g2")
        assert await reader.read() == b""
        writer.close()

    world(test)


def test_an_earlier_gateways_calls_have_no_effect(world) -> None:
    async def test(w: World) -> None:
        assert (await w.actor.receive("g2", 5))[0] == 0
        reader, writer = await w.agent()
        session, _ = await w.actor.receive("g2", 0)
        await w.actor.send("g1", session, b"from g1\n")
        await w.actor.close("g1", session)
        await w.actor.send("g2", session - 1, b"an earlier session\n")
        await w.actor.send("g2", session, b"from g2\n")
        assert await reader.readline() == b"from g2\n"
        writer.close()

    world(test)


def test_a_lost_actor_ends_its_relay_and_the_coordinators_connection(world) -> None:
    class Lost:
        """An actor that is lost once the coordinator has heard of its agent."""

        def __init__(self, w: World) -> None:
            self._world = w

        async def receive(self, gateway: str, session: int) -> tuple[int, bytes]:
            if self._world.to_coordinator:
                raise RuntimeError("the actor died")
            return (1, b"joined\n") if session else (1, b"")

    async def test(w: World) -> None:
        await w.coordinator()
        relay = w.relay("g1", Lost(w))
        with pytest.raises(RuntimeError, match="the actor died"):
            await asyncio.wait_for(relay, LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            await w.ends.wait()

    world(test)


# the gateway


class StandIn:
    """Ray with actors in this process."""

    def __init__(self) -> None:
        self.living = [node(1)]
        self.actors: dict[str, HostActor] = {}
        self.killed: list[str] = []

    def own_node(self) -> str:
        return "n1"

    def nodes(self) -> list[dict[str, Any]]:
        return self.living

    def actor(self, name: str, _member: Any, arguments: Any) -> HostActor:
        return self.actors.setdefault(name, HostActor(*arguments))

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def named_actors(self) -> dict[str, HostActor]:
        return self.actors


def with_gateway(
    root: Path, test: Callable[[StandIn, Folders], Awaitable[None]]
) -> StandIn:
    """Run a test beside a gateway, then end it as `down` does."""
    ray, folders = StandIn(), Folders(root)
    folders.create()
    settings = Settings(hosts={"a": ("cpu:0", "cpu:1")}, policy="fifo")

    async def run() -> None:
        gateway = Gateway(folders, settings, ray)
        task = asyncio.create_task(gateway.run())
        try:
            await test(ray, folders)
        finally:
            folders.mark_down()
            gateway.end()
            await asyncio.wait_for(task, LIMIT_S)
            for actor in ray.actors.values():
                await actor.stop()

    asyncio.run(run())
    return ray


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_gateway, "_LOOK_S", 0.01)


def test_a_job_runs_on_a_host_behind_a_stand_in_for_ray(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "c")
    folders.create()
    ray = RaySettings(address="127.0.0.1:1", namespace="n", is_started=False)
    hosts = {"a": ("cpu:0", "cpu:1")}
    folders.save_settings(
        Settings(hosts=hosts, policy="fifo", ray=ray, has_keeper=False)
    )
    command = [sys.executable, "-m", "stretto.cluster.server", str(folders.root)]
    start_detached(command, folders.coordinator_log)

    async def test(_: StandIn, folders: Folders) -> None:
        spec = clusters.job(tmp_path, "echo rank $RANK", devices=2)
        text = clusters.codec.encode(spec).decode()

        def ask(do: str, **fields: Any) -> dict[str, Any]:
            return engine_local.ask(folders, {"do": do, **fields}, patience_s=LIMIT_S)

        def joined() -> bool:
            return ask("status")["hosts"][0]["joined"]

        async with asyncio.timeout(LIMIT_S):
            while not await asyncio.to_thread(joined):
                await asyncio.sleep(0.02)
            found = await asyncio.to_thread(ask, "submit", spec=text, user="test")
            while (row := await asyncio.to_thread(ask, "show", job=found["job"]))[
                "state"
            ] != "done":
                assert row["state"] != "failed", row
                await asyncio.sleep(0.02)
        log = folders.logs(found["job"], 1) / "rank1.log"
        assert log.read_text() == "rank 1\n"

    try:
        with_gateway(tmp_path / "c", test)
    finally:
        roles.end_holders([folders.coordinator_lock], timeout_s=LIMIT_S)
        lock = folders.of_node("a").agent_lock("a")
        assert roles.end_holders([lock], timeout_s=LIMIT_S)


def test_a_node_that_comes_later_is_a_host_of_the_cluster(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor.Role, "look", lambda _: None)

    async def test(ray: StandIn, folders: Folders) -> None:
        await until(lambda: "a-n1" in ray.actors)
        ray.living = [node(1), node(2)]
        await until(lambda: "host2-n2" in ray.actors)
        settings = folders.of_node("host2").load_settings()
        assert settings.address == "10.0.0.2"
        known = folders.hosts(Settings(hosts={"a": ("cpu:0",)}, policy="fifo"))
        assert known["host2"] == ("cpu:0", "cpu:1")

    with_gateway(tmp_path / "c", test)


def test_a_node_that_returns_with_another_id_gets_another_actor(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor.Role, "look", lambda _: None)

    async def test(ray: StandIn, _: Folders) -> None:
        ray.living = [node(1), node(2)]
        await until(lambda: "host2-n2" in ray.actors)
        ray.living = [node(1), node(2, Alive=False)]
        await asyncio.sleep(0.05)
        ray.living = [node(1), node(2, NodeID="n3")]
        await until(lambda: "host2-n3" in ray.actors)

    with_gateway(tmp_path / "c", test)


def test_another_machine_of_a_hosts_name_waits_for_the_watchdogs(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor.Role, "look", lambda _: None)
    Folders(tmp_path / "c").create()
    # As an earlier gateway has left it.
    Folders(tmp_path / "c").note_hosts({"host2": ("10.0.0.2", ("cpu:0",))})
    later_s = 0.0
    monkeypatch.setattr(ray_gateway, "now_s", lambda: later_s)

    async def test(ray: StandIn, _: Folders) -> None:
        nonlocal later_s
        ray.living = [node(1), node(3, NodeManagerHostname="host2"), node(4)]
        await until(lambda: "host4-n4" in ray.actors)
        later_s = 69.0  # watchdog and margin are 70 s
        ray.living.append(node(5))
        await until(lambda: "host5-n5" in ray.actors)
        assert "host2-n3" not in ray.actors
        later_s = 71.0
        await until(lambda: "host2-n3" in ray.actors)

    with_gateway(tmp_path / "c", test)


def test_a_host_that_is_in_use_keeps_its_name(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor.Role, "look", lambda _: None)
    later_s = 0.0
    monkeypatch.setattr(ray_gateway, "now_s", lambda: later_s)

    async def test(ray: StandIn, _: Folders) -> None:
        nonlocal later_s
        ray.living = [node(1), node(3)]
        await until(lambda: "host3-n3" in ray.actors)
        # Its jobs run: another one of its name would say that they have ended.
        ray.living = [node(1), node(2, NodeManagerHostname="host3"), node(3), node(4)]
        await until(lambda: "host4-n4" in ray.actors)
        later_s = 71.0  # watchdog and margin are 70 s
        ray.living.append(node(5))
        await until(lambda: "host5-n5" in ray.actors)
        assert "host3-n2" not in ray.actors

    with_gateway(tmp_path / "c", test)


def test_a_cluster_that_goes_down_ends_its_actors_and_their_agents(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor.Role, "look", lambda _: None)

    async def test(ray: StandIn, _: Folders) -> None:
        await until(lambda: "a-n1" in ray.actors)

    ray = with_gateway(tmp_path / "c", test)
    assert ray.killed == ["a-n1"]
    assert Folders(tmp_path / "c").of_node("a").down.exists()


def test_down_ends_the_actors_that_no_gateway_has_ended(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor.Role, "look", lambda _: None)
    calls: list[Folders] = []
    monkeypatch.setattr(engine_local, "_end_actors", calls.append)
    folders, left = Folders(tmp_path / "c"), StandIn()
    folders.create()
    ray = RaySettings(address="127.0.0.1:1", namespace="n", is_started=False)
    folders.save_settings(Settings(hosts={}, policy="fifo", ray=ray))
    engine_local._end_processes(folders)
    assert calls == [folders]

    async def test(ray: StandIn, _: Folders) -> None:
        await until(lambda: "a-n1" in ray.actors)

    folders.down.unlink()
    with_gateway(tmp_path / "c", test)
    engine_local._end_processes(folders)
    assert calls == [folders]  # the gateway has done it

    left.actor("b-n2", None, (str(folders.root), "b", of_host("b")))
    asyncio.run(ray_gateway.end_actors(left))
    assert left.killed == ["b-n2"]
    assert folders.of_node("b").down.exists()


# settings


def test_an_engine_does_not_start_while_jobs_of_the_other_run(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "c")
    folders.create()
    part = folders.of_node("a").attempts("a") / "job-1.1"
    part.mkdir(parents=True)
    held = lock(part / "supervisor.lock")
    assert held is not None
    with pytest.raises(ClusterError, match=r"job-1\.1 is still running\..* on Ray"):
        engine_local.start(folders, Settings(hosts={"a": ("cpu:0",)}, policy="fifo"))
    os.close(held)


def test_a_start_that_takes_too_long_names_the_hosts_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"host": name, "joined": name == "a", "devices": [{"name": "cuda:0"}]}
        for name in ("a", "b")
    ]
    monkeypatch.setattr(engine_local, "ask", lambda *_, **__: {"hosts": rows})
    monkeypatch.setattr(engine_local, "start_keeper", lambda _: None)
    monkeypatch.setattr(engine_local, "_RAY_START_S", 0.1)
    ray = RaySettings(address="127.0.0.1:1", namespace="n", is_started=False)
    settings = Settings(hosts={}, policy="fifo", ray=ray)
    with pytest.raises(ClusterError, match=r"s, b did not join, and other work of Ray"):
        engine_local.start(Folders(tmp_path / "c"), settings)


def test_an_agent_with_other_settings_is_ended(tmp_path: Path) -> None:
    root = str(tmp_path / "c")
    HostActor(root, "a", of_host("a"))
    folders = Folders(tmp_path / "c").of_node("a")
    ended: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostActor, "_signal_agent", lambda _: ended.append("a"))
        HostActor(root, "a", of_host("a"))
        assert ended == []
        HostActor(root, "a", of_host("a", watchdog_s=7.0))
    assert ended == ["a"]
    assert folders.load_settings().watchdog_s == 7.0


def test_without_ray_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ray.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingPackage, match=r"pip install \"stretto\[cluster\]\""):
        engine_ray.require_ray()


def test_a_ray_without_tokens_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ray.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(engine_ray.importlib.metadata, "version", lambda _: "2.58.1")
    with pytest.raises(MissingPackage, match=r"Ray 2\.58\.1 is too old"):
        engine_ray.require_ray()


@pytest.fixture
def has_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ray, "require_ray", lambda: None)


def test_a_started_ray_has_a_token_for_this_user_alone(
    tmp_path: Path, has_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ray, "_temp", lambda _: tmp_path / "r")
    folders = Folders(tmp_path / "c")
    ray = engine_ray.started_ray(folders, "127.0.0.1")
    assert folders.ray_token.stat().st_mode & 0o777 == 0o600
    assert len(folders.ray_token.read_text()) == 64
    assert environment(ray)["RAY_AUTH_MODE"] == "token"
    assert "--include-dashboard=false" in start_command(ray)


def test_the_command_to_join_can_be_pasted_whatever_the_folder(
    tmp_path: Path, has_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ray, "_temp", lambda _: tmp_path / "r")
    folders = Folders(tmp_path / "my cluster's")
    text = engine_ray.how_to_join(engine_ray.started_ray(folders, "127.0.0.2"))
    command = text.removeprefix("another host joins by `").rpartition("`")[0]
    assert f"RAY_AUTH_TOKEN_PATH={folders.ray_token}" in shlex.split(command)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("open", "asks for no token"),
        ("Timed out", "does not answer: Timed out"),
        ("refused", "asks for a token: name its file.*none, which is not a file"),
    ],
)
def test_a_ray_that_cannot_be_joined_safely_is_refused(
    answer: str,
    message: str,
    has_ray: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_ray, "_answer_of", lambda *_: (answer, {}))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(Exception, match=message):
        engine_ray.joined_ray("10.0.0.1:6379", is_insecure=False)


def test_a_ray_that_refuses_the_users_token_is_not_joined(
    has_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of-another-ray")
    monkeypatch.setattr(engine_ray, "_answer_of", lambda *_: ("refused", {}))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ClusterError, match=r"refuses the token in .*token: name"):
        engine_ray.joined_ray("10.0.0.1:6379", is_insecure=False)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\x00", b"two\nlines\n"])
def test_a_file_without_a_token_is_refused(
    content: bytes, has_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_bytes(content)
    monkeypatch.setattr(engine_ray, "_answer_of", lambda *_: ("refused", {}))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(SpecError, match="token"):
        engine_ray.joined_ray("10.0.0.1:6379", is_insecure=False)


def test_a_token_that_was_not_written_whole_is_made_again(
    tmp_path: Path, has_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ray, "_temp", lambda _: tmp_path / "r")
    folders = Folders(tmp_path / "c")
    folders.create()
    folders.ray_token.touch()  # by a full disk
    engine_ray.started_ray(folders, "127.0.0.1")
    assert len(folders.ray_token.read_text()) == 64


def test_a_ray_without_a_token_is_joined_by_those_who_insist(
    has_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ray, "_answer_of", lambda *_: ("open", FACTS))
    monkeypatch.setattr(engine_ray.importlib.metadata, "version", lambda _: "2.60.0")
    ray = engine_ray.joined_ray("127.0.0.1:6379", is_insecure=True)
    assert not ray.token
    # Otherwise Ray's client replaces the address by one at which nothing listens.
    assert environment(ray)["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray_version": "2.59.0"}, r"is Ray 2\.59\.0 on .*the same on all hosts"),
        ({"python_version": "3.9.1"}, r"on Python 3\.9\.1, here is Ray"),
        ({"nodes": ["192.0.2.77"]}, "no node .* is this machine: join it first"),
    ],
)
def test_a_ray_that_rays_client_would_refuse_is_refused_at_once(
    changes: dict[str, Any],
    message: str,
    has_ray: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = FACTS | changes
    monkeypatch.setattr(engine_ray, "_answer_of", lambda *_: ("open", facts))
    monkeypatch.setattr(engine_ray.importlib.metadata, "version", lambda _: "2.60.0")
    with pytest.raises(ClusterError, match=message):
        engine_ray.joined_ray("10.0.0.1:6379", is_insecure=True)


def test_a_ray_that_does_not_answer_is_refused(has_ray: None) -> None:
    with pytest.raises(ClusterError, match=r"does not answer: .*refused"):
        engine_ray.joined_ray("127.0.0.1:1", is_insecure=False)


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536"])
def test_an_address_without_a_port_is_refused(address: str, has_ray: None) -> None:
    with pytest.raises(SpecError, match="HOST:PORT"):
        engine_ray.joined_ray(address, is_insecure=False)


@pytest.mark.parametrize("host", ["a..b", 64 * "a"])
def test_what_cannot_be_a_hosts_name_does_not_answer(host: str, has_ray: None) -> None:
    with pytest.raises(ClusterError, match=f"{host}:6379 does not answer: .*label"):
        engine_ray.joined_ray(f"{host}:6379", is_insecure=False)


@pytest.mark.parametrize("address", ["0.0.0.0", "255.255.255.255", "224.0.0.1"])
def test_an_interface_is_one_machines_address(
    address: str, has_ray: None, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=f"--interface {address}: must be an IPv4"):
        engine_ray.started_ray(Folders(tmp_path / "c"), address)


def test_an_agent_that_no_actor_serves_ends_when_nothing_runs(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    settings = json.loads(of_host("a", watchdog_s=0.5, heartbeat_s=0.1))
    folders.save_settings(settings_of(settings))
    # An attempt that has ended, which no coordinator has acknowledged.
    part = folders.attempts("a") / "job-1.1"
    part.mkdir(parents=True)
    clusters.part_spec_of(tmp_path, "true", job="job-1").save(part)
    command = [sys.executable, "-m", "stretto.cluster.agent", str(tmp_path), "a"]
    assert subprocess.run(command, timeout=LIMIT_S, check=False).returncode == 0
    assert part.is_dir()
