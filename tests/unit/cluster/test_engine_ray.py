"""What only a cluster on Ray does. `make test-cluster-ray` runs these tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stretto import variable_names
from stretto.cluster import engine_ray, processes
from stretto.cluster.ray_head import environment
from support.clusters import (
    LIMIT_S,
    RAY,
    WAITS,
    Cluster,
    await_file,
    await_that,
    cluster,
    job,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_spec("ray"), reason="needs Ray"),
]

OTHER = "STRETTO_TEST_NODE"
"""Marks the processes of a node that a test starts."""

HEAD, NODE = "127.0.0.2", "127.0.0.3"
"""Addresses of this machine that Ray takes for those of two hosts."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one host with two devices, which each test leaves idle."""
    folder = tmp_path_factory.mktemp("cluster") / "c"
    # On a busy machine Ray takes half a minute to start again.
    times = {"heartbeat_s": 0.5, "watchdog_s": 150.0}
    with cluster(folder, engine=RAY, hosts=1, **times) as found:
        yield found


def waiting(cluster: Cluster, folder: Path) -> str:
    """Return a job that waits for `finish`."""
    name = cluster.submit(job(folder, f"touch ready; {WAITS}"))
    await_file(folder / "ready")
    cluster.await_state(name, "running")
    return name


def finish(cluster: Cluster, folder: Path, name: str) -> None:
    """Check that the job was not disturbed, and continues to its end."""
    (folder / "go").touch()
    found = cluster.await_state(name, "done")
    assert found["attempt"] == 1
    assert cluster.events(name).count("started") == 1


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def of_ray(cluster: Cluster, word: str) -> list[int]:
    """Return the processes of the cluster's Ray whose command has a word."""
    marked = processes.marked_processes(
        variable_names.CLUSTER_RAY, str(cluster.folders.root)
    )
    return [pid for pid in marked if word in command_of(pid)]


def joined(cluster: Cluster) -> dict[str, bool]:
    return {row["host"]: row["joined"] for row in cluster.ask("status")["hosts"]}


def await_all_joined(cluster: Cluster) -> None:
    await_that(lambda: all(joined(cluster).values()), lambda: str(joined(cluster)))


# what dies


def test_a_killed_gateway_disturbs_no_job(shared: Cluster, tmp_path: Path) -> None:
    name = waiting(shared, tmp_path)
    before = shared.kill("gateway")
    await_that(lambda: shared.pid("gateway") != before, lambda: "no other")
    finish(shared, tmp_path, name)


def test_a_killed_actor_is_replaced_and_its_agent_continues(
    shared: Cluster, tmp_path: Path
) -> None:
    name = waiting(shared, tmp_path)
    agent = shared.pid("host0")
    (actor,) = of_ray(shared, "ray::HostActor")
    os.kill(actor, signal.SIGKILL)
    await_that(
        lambda: of_ray(shared, "ray::HostActor") not in ([], [actor]),
        lambda: "no other actor",
    )
    finish(shared, tmp_path, name)
    assert shared.pid("host0") == agent


def test_a_killed_ray_is_started_again_and_disturbs_no_job(
    shared: Cluster, tmp_path: Path
) -> None:
    name = waiting(shared, tmp_path)
    ray = shared.pid("ray")
    for pid in [ray, *of_ray(shared, "")]:
        processes.kill_marked(variable_names.CLUSTER_RAY, str(shared.folders.root))
        if pid == ray:
            os.kill(pid, signal.SIGKILL)
    await_that(lambda: shared.pid("ray") != ray, lambda: "no other")
    await_that(lambda: not all(joined(shared).values()), lambda: "it was not lost")
    await_all_joined(shared)
    finish(shared, tmp_path, name)


def test_a_killed_keeper_is_replaced_when_the_gateway_dies_too(
    shared: Cluster, tmp_path: Path
) -> None:
    keeper = shared.kill("keeper")
    gateway = shared.kill("gateway")
    await_that(lambda: shared.pid("keeper") != keeper, lambda: "no other keeper")
    await_that(lambda: shared.pid("gateway") != gateway, lambda: "no other gateway")


# who gets in


def test_only_this_machine_with_the_token_reaches_ray(
    shared: Cluster,
) -> None:
    found = subprocess.run(
        ["ss", "-ltnpH"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    pids = set(map(str, of_ray(shared, "")))
    lines = found.splitlines()
    lines = [line for line in lines if pids & set(re.findall(r"pid=(\d+)", line))]
    assert len(lines) >= 3
    assert all(re.search(r"127\.0\.0\.1[\]]?:\d", line.split()[3]) for line in lines)
    assert shared.settings.ray is not None
    address = shared.settings.ray.address
    assert engine_ray._answer_of(address, None)[0] == "refused"


def test_rays_priority_is_an_ordinary_one(shared: Cluster, tmp_path: Path) -> None:
    name = shared.submit(job(tmp_path, "nice"))
    shared.await_state(name, "done")
    assert shared.log(name) == "0\n"


# another host


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one host with one device, which other nodes can join."""
    folder, sizes = tmp_path_factory.mktemp("wide") / "c", {"hosts": 1, "devices": 1}
    times = {"heartbeat_s": 0.5, "watchdog_s": 5.0}
    with cluster(folder, engine=RAY, interface=HEAD, **sizes, **times) as found:
        yield found


class Node:
    """A node of Ray beside a cluster's own, on this machine."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        assert cluster.settings.ray is not None
        ray, self.mark = cluster.settings.ray, f"{folder}/{name}"
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start"]
        options = [f"--address={ray.address}", f"--node-name={name}", "--block"]
        sizes = ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000"]
        self.process = subprocess.Popen(
            [*command, *options, *sizes, f"--node-ip-address={NODE}"],
            env=environment(ray) | {OTHER: self.mark, "RAY_worker_niceness": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> None:
        processes.kill_marked(OTHER, self.mark)
        self.process.wait(LIMIT_S)


def test_a_node_that_joins_gets_jobs_and_its_loss_moves_them(
    wide: Cluster, tmp_path: Path
) -> None:
    first = waiting(wide, tmp_path)
    (tmp_path / "other").mkdir()
    node = Node(wide, "second", tmp_path)
    try:
        await_that(lambda: joined(wide).get("second", False), lambda: "no node")
        script = f"touch on-$STRETTO_CLUSTER_RESUME-; {WAITS}"
        moved = wide.submit(job(tmp_path / "other", script))
        await_file(tmp_path / "other" / "on--")
        assert wide.await_state(moved, "running")["devices"] == [["second", 0]]
    finally:
        node.kill()  # the whole host: its agent and supervisor have the mark, too
    await_that(lambda: not joined(wide)["second"], lambda: "it is not lost")
    finish(wide, tmp_path, first)
    await_file(tmp_path / "other" / "on-1-")
    (tmp_path / "other" / "go").touch()
    end = wide.await_state(moved, "done")
    assert (end["attempt"], end["failures"]) == (2, 0)


# a Ray that runs already


def test_a_ray_that_runs_is_joined_with_its_token_and_left_running(
    wide: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wide.settings.ray is not None
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", wide.settings.ray.token)
    command = [sys.executable, "-m", "stretto", "cluster"]

    def run(*words: str) -> str:
        folder = ("--folder", str(tmp_path / "joined"))
        done = subprocess.run(
            [*command, *words, *folder], check=True, timeout=120, stdout=subprocess.PIPE
        )
        return done.stdout.decode()

    node = Node(wide, "member", tmp_path)
    try:
        await_that(lambda: joined(wide).get("member", False), lambda: "no node")
        run("start", "--ray", wide.settings.ray.address)
        try:
            job(tmp_path, "echo here").save(tmp_path / "job.json")
            run("submit", str(tmp_path / "job.json"))
            assert run("logs", "test", "-f") == "here\n"
        finally:
            run("down")
        assert of_ray(wide, "gcs_server")
    finally:
        node.kill()
