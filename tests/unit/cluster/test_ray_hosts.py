"""A cluster on Ray whose two hosts share no network, processes, names or files.

Each host has namespaces of its own, a private folder for the cluster, and a name that
resolves to nothing; one cable connects them. `make test-cluster-ray` runs these tests,
as root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.clusters import WAITS, await_file, await_that, job

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.lab,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_spec("ray"), reason="needs Ray"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
        reason="needs namespaces",
    ),
]

FIRST, SECOND = "10.77.0.1", "10.77.0.2"
WATCHDOG_S = 10.0

SUMS = """
import socket
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"{total.item():g} on {socket.gethostname()}", flush=True)
dist.destroy_process_group()
"""


class Host:
    """A host of its own on this machine; it ends with the process that keeps it."""

    def __init__(self, name: str, base: Path, own: Path) -> None:
        self.name, self._base = name, base
        begin = (
            f"hostname {name}; mount --make-rprivate /; ip link set lo up; "
            f"mount -t tmpfs none {own}; touch {base}/up-{name}; exec sleep 600"
        )
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc", "--mount-proc")
        self._keeper = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", "sh", "-c", begin],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        await_file(base / f"up-{name}")
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children")
        self.first_pid = int(children.read_text())

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on the host, as at a login there."""
        names = ("--net", "--mount", "--pid", "--uts", "--ipc")
        python = str(Path(sys.executable).parent)
        plain = {
            "PATH": f"{python}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/root"),
            "TMPDIR": str(self._base / "o"),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            ["nsenter", "-t", str(self.first_pid), *names, "--", *words],
            env=plain,
            stdin=subprocess.DEVNULL,
            text=True,
            **options,
        )

    def run(self, *words: str) -> str:
        """Return what a command prints, which must succeed."""
        pipe = subprocess.PIPE
        process = self.start(*words, stdout=pipe, stderr=subprocess.STDOUT)
        found = process.communicate(timeout=200)[0]
        assert process.returncode == 0, found
        return found

    def end(self) -> None:
        """End the host and everything on it at once."""
        self._keeper.kill()
        self._keeper.wait()


class Pair:
    """Two hosts with a cluster: `first` has the coordinator, `second` joins."""

    def __init__(self, base: Path) -> None:
        self.base, self.own = base, base / "o"  # Ray's paths have a limit
        self.shared = base / "shared"
        for folder in (self.own, self.shared):
            folder.mkdir(mode=0o700)
        self.first = Host("red", base, self.own)
        self.second = Host("blue", base, self.own)
        self._ray: subprocess.Popen[str] | None = None
        ends = [f"st{os.getpid()}{end}" for end in "ab"]
        add = ["link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]
        subprocess.run(["ip", *add], check=True)
        hosts = {self.first: FIRST, self.second: SECOND}
        for end, (host, address) in zip(ends, hosts.items(), strict=True):
            move = ["link", "set", end, "netns", str(host.first_pid)]
            subprocess.run(["ip", *move], check=True)
            host.run("ip", "address", "add", f"{address}/24", "dev", end)
            host.run("ip", "link", "set", end, "up")
        self._cable = ends[0]

    def start(self) -> None:
        """Start the cluster, and let the second host join as `start` says."""
        sizes = ["--local", "1", "--watchdog", str(WATCHDOG_S), "--heartbeat", "0.5"]
        places = ["--interface", FIRST, "--shared", str(self.shared)]
        said = self.cluster("start", "--ray", *sizes, *places)
        (command,) = re.findall(r"another host joins by `(.*)`", said)
        (token,) = re.findall(r"RAY_AUTH_TOKEN_PATH=(\S+)", command)
        copy = self.base / "token"
        copy.write_text(self.first.run("cat", token))
        self.join = command.replace(token, str(copy)) + " --num-cpus=1"
        self.connect()

    def connect(self) -> None:
        """Start Ray on the second host, and wait until the cluster uses it."""
        if self._ray is not None:
            self._ray.wait()
        with (self.base / "join.log").open("w") as log:
            self._ray = self.second.start(
                "sh", "-c", self.join, stdout=log, stderr=log, start_new_session=True
            )
        self.await_joined("blue", joined=True)

    def cluster(self, *words: str) -> str:
        """Return what a command of the cluster prints on the first host."""
        program = (sys.executable, "-m", "stretto", "cluster")
        return self.first.run(*program, *words, "--folder", str(self.own / "c"))

    def submit(self, folder: Path, script: str, **fields: Any) -> str:
        """Submit a job that runs a script in a folder."""
        folder.mkdir()
        path = folder / "job.json"
        job(folder, script, **fields).save(path)
        return self.cluster("submit", str(path)).strip()

    def show(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cluster("show", name, "--json"))
        return found

    def await_state(self, name: str, state: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def has_state() -> bool:
            found.update(self.show(name))
            return bool(found["state"] == state)

        await_that(has_state, lambda: f"{name} is not {state}: {found}", limit_s=120)
        return found

    def await_joined(self, host: str, *, joined: bool) -> None:
        rows: list[Any] = []

        def is_so() -> bool:
            rows[:] = json.loads(self.cluster("status", "--json"))["hosts"]
            return any(r["host"] == host and r["joined"] is joined for r in rows)

        def explain() -> str:
            return f"{host}: {rows}\n{(self.base / 'join.log').read_text()}"

        await_that(is_so, explain, limit_s=120)

    def set_cable(self, state: str) -> None:
        self.first.run("ip", "link", "set", self._cable, state)

    def end(self) -> None:
        for host in (self.first, self.second):
            host.end()
        if self._ray is not None:
            self._ray.wait()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two hosts with one device each, which each test leaves idle."""
    base = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))  # as short as Ray needs it
    found = Pair(base)
    try:
        found.start()
        yield found
    finally:
        found.end()
        shutil.rmtree(base)


def test_ranks_of_both_hosts_train_together(pair: Pair) -> None:
    script = f"exec {sys.executable} -c '{SUMS}'"
    name = pair.submit(pair.shared / "sums", script, devices=2)
    found = pair.await_state(name, "done")
    assert found["failures"] == 0, pair.cluster("events", "--job", name)
    logs = [pair.cluster("logs", name, "--rank", rank) for rank in "01"]
    assert [log.splitlines()[-1] for log in logs] == ["2 on red", "2 on blue"]


def test_no_host_joins_without_the_token(pair: Pair) -> None:
    (address,) = re.findall(r"--address=(\S+)", pair.join)
    check = f"print(engine_ray._answer_of({address!r}, None)[0])"
    check = f"from stretto.cluster import engine_ray; {check}"
    assert pair.second.run(sys.executable, "-c", check).split()[-1] == "refused"


def test_a_job_on_a_host_whose_agent_is_killed_continues(pair: Pair) -> None:
    name = pair.submit(pair.shared / "agent", f"touch ready; {WAITS}", devices=2)
    await_file(pair.shared / "agent" / "ready")
    lock = "nodes/blue/hosts/blue/agent.lock"
    pair.second.run("sh", "-c", f"kill -9 $(cat {pair.own}/c/{lock})")
    (pair.shared / "agent" / "go").touch()
    assert pair.await_state(name, "done")["attempt"] == 1


def test_a_job_on_a_lost_host_starts_elsewhere_and_never_runs_twice(
    pair: Pair,
) -> None:
    first = pair.submit(pair.shared / "stays", f"touch ready; {WAITS}")
    await_file(pair.shared / "stays" / "ready")
    script = "exec 9>lock; flock -n 9 || touch twice; touch on-$(hostname); "
    second = pair.submit(pair.shared / "moves", script + WAITS)
    await_file(pair.shared / "moves" / "on-blue")
    pair.set_cable("down")
    (pair.shared / "stays" / "go").touch()
    await_file(pair.shared / "moves" / "on-red")
    pair.set_cable("up")
    (pair.shared / "moves" / "go").touch()
    assert pair.await_state(second, "done")["failures"] == 0
    assert pair.show(first)["attempt"] == 1
    assert not (pair.shared / "moves" / "twice").exists()


def test_a_job_continues_when_a_host_has_restarted_and_joined_again(pair: Pair) -> None:
    script = f"touch on-$(hostname)-$STRETTO_CLUSTER_RESUME-; {WAITS}"
    name = pair.submit(pair.shared / "again", script, devices=2)
    await_file(pair.shared / "again" / "on-blue--")
    pair.second.run("sh", "-c", "kill -9 -1")  # all but its first process, and this
    pair.await_joined("blue", joined=False)
    pair.connect()
    await_file(pair.shared / "again" / "on-blue-1-")
    (pair.shared / "again" / "go").touch()
    assert pair.await_state(name, "done")["failures"] == 0
