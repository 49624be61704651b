"""Measure a cluster on this machine: many tiny jobs, and what is killed.

- 100 jobs of one process that ends at once, from the first submission to the last
  ``done``, on a warm cluster of four devices; each job has one device.
- A coordinator is killed while four jobs run: the time until it answers again, and how
  many of the jobs had to start again.
- With two hosts, one of them falls silent: the time until the cluster says so.

`--engine ray` measures the same on Ray, which it starts (extra `cluster`).
About a minute on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import spread, store
from stretto.cluster import engine_local, engine_ray, processes, roles
from stretto.cluster.folders import Folders, Settings
from stretto.schema import codec
from stretto.schema.job import GpuRange, Job

JOBS, ROUNDS, KILLS, SILENT = 100, 5, 5, 3
TARGET_S = {"local": 5.0, "ray": 10.0}
POLL_S = 0.02


def job_of(script: str, folder: Path) -> str:
    job = Job(
        name="tiny",
        role="foreground",
        command=("/bin/sh", "-c", script),
        launch="direct",
        directory=str(folder),
        gpus=GpuRange(minimum=1, maximum=1),
    )
    return codec.encode(job).decode()


class Cluster:
    def __init__(self, folder: Path, engine: str) -> None:
        self.folder, self.folders = folder, Folders(folder / "cluster")
        self.seq = self.losses = 0
        devices = tuple(f"cpu:{index}" for index in range(4))
        hosts, ray = {"host0": devices, "host1": ("cpu:4",)}, None
        if engine == "ray":
            ray = engine_ray.started_ray(self.folders, "127.0.0.1")
        engine_local.start(self.folders, Settings(hosts=hosts, policy="fifo", ray=ray))
        # The second host is there to fall silent, and gets no jobs.
        self.ask("drain", host="host1", user="benchmark")

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        return engine_local.ask(self.folders, {"do": do} | fields)

    def submit(self, script: str) -> str:
        spec = job_of(script, self.folder)
        return self.ask("submit", spec=spec, user="benchmark")["job"]

    def states(self) -> dict[str, int]:
        return self.ask("status")["jobs"]

    def is_joined(self, host: str) -> bool:
        rows = self.ask("status")["hosts"]
        return next(row["joined"] for row in rows if row["host"] == host)

    def num_losses(self) -> int:
        """Return how often a host was lost."""
        while rows := self.ask("events", since=self.seq)["events"]:
            self.seq = rows[-1]["seq"]
            self.losses += sum(row["kind"] == "lost" for row in rows)
        return self.losses

    def agent_lock(self, host: str) -> Path:
        """Return the lock of a host's agent."""
        on_ray = self.folders.load_settings().ray is not None
        folders = self.folders.of_node(host) if on_ray else self.folders
        return folders.agent_lock(host)

    def await_states(self, wanted: dict[str, int]) -> None:
        while True:
            found = self.states()
            if all(found.get(state, 0) >= number for state, number in wanted.items()):
                return
            time.sleep(POLL_S)


def many_jobs(cluster: Cluster, jobs: int) -> float:
    before = cluster.states().get("done", 0)
    begin_s = time.perf_counter()
    for _ in range(jobs):
        cluster.submit("exit 0")
    cluster.await_states({"done": before + jobs})
    return time.perf_counter() - begin_s


def killed_coordinator(cluster: Cluster) -> tuple[float, int]:
    """Return the time until it answers again, and the jobs that started again."""
    go = cluster.folder / "go"
    go.unlink(missing_ok=True)
    before = cluster.states().get("done", 0)
    script = f"while [ ! -e {go} ]; do sleep 0.05; done"
    jobs = [cluster.submit(script) for _ in range(4)]
    cluster.await_states({"running": 4})
    pid = roles.holder_of(cluster.folders.coordinator_lock)
    begin_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    cluster.states()
    answered_s = time.perf_counter() - begin_s
    go.touch()
    cluster.await_states({"done": before + 4})
    rows = cluster.ask("list")["jobs"]
    again = sum(row["attempt"] > 1 for row in rows if row["job"] in jobs)
    return answered_s, again


def silent_host(cluster: Cluster) -> float:
    """Return the time until a host whose agent has ended for good is lost."""
    lock, losses = cluster.agent_lock("host1"), cluster.num_losses()
    begin_s = time.perf_counter()
    while (held := processes.lock(lock, patience_s=0.0)) is None:
        if (pid := roles.holder_of(lock)) is not None:
            os.kill(pid, signal.SIGKILL)
    try:
        while cluster.num_losses() == losses:
            time.sleep(POLL_S)
        lost_s = time.perf_counter() - begin_s
    finally:
        os.close(held)  # another one starts
    while not cluster.is_joined("host1"):
        time.sleep(POLL_S)
    return lost_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engine", choices=sorted(TARGET_S), default="local")
    parser.add_argument("--name", help="[default: cluster_ENGINE]")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), args.engine)
        try:
            many_jobs(cluster, 10)  # warm
            times_s = [many_jobs(cluster, args.jobs) for _ in range(args.rounds)]
            kills = [killed_coordinator(cluster) for _ in range(KILLS)]
            silent_s = [silent_host(cluster) for _ in range(SILENT)]
        finally:
            engine_local.down(cluster.folders, timeout_s=30.0)
    store(
        args.name or f"cluster_{args.engine}",
        {
            "jobs": args.jobs,
            "load_average_before": load,
            "submit_to_done_s": spread(times_s) | {"target": TARGET_S[args.engine]},
            "answers_again_s": spread([each[0] for each in kills]) | {"target": 5.0},
            "lost_host_noticed_s": spread(silent_s) | {"target": 5.0},
            "disturbed_jobs": sum(each[1] for each in kills),
        },
    )


if __name__ == "__main__":
    main()
