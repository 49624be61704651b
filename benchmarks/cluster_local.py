"""Measure the local cluster: many tiny jobs, and a coordinator that is killed.

- 100 jobs of one process that ends at once, from the first submission to the last
  ``done``, on a warm cluster of four devices; each job has one device.
- A coordinator is killed while four jobs run: the time until it answers again, and how
  many of the jobs had to start again.

The processor time is that of the whole machine's share for this cluster: coordinator,
agent, supervisors and jobs. About a minute on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

from _record import spread, store
from stretto.cluster import engine_local, roles
from stretto.cluster.folders import Folders, Settings
from stretto.schema import codec
from stretto.schema.job import GpuRange, Job

JOBS, ROUNDS, KILLS = 100, 5, 5
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
    def __init__(self, folder: Path) -> None:
        self.folder, self.folders = folder, Folders(folder / "cluster")
        devices = tuple(f"cpu:{index}" for index in range(4))
        engine_local.start(
            self.folders, Settings(hosts={"host0": devices}, policy="fifo")
        )

    def submit(self, script: str) -> str:
        spec = job_of(script, self.folder)
        message = {"do": "submit", "spec": spec, "user": "benchmark"}
        return engine_local.ask(self.folders, message)["job"]

    def states(self) -> dict[str, int]:
        return engine_local.ask(self.folders, {"do": "status"})["jobs"]

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
    rows = engine_local.ask(cluster.folders, {"do": "list"})["jobs"]
    again = sum(row["attempt"] > 1 for row in rows if row["job"] in jobs)
    return answered_s, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--name", default="cluster_local")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            many_jobs(cluster, 10)  # warm
            times_s = [many_jobs(cluster, args.jobs) for _ in range(args.rounds)]
            kills = [killed_coordinator(cluster) for _ in range(KILLS)]
        finally:
            engine_local.down(cluster.folders, timeout_s=30.0)
    store(
        args.name,
        {
            "jobs": args.jobs,
            "load_average_before": load,
            "submit_to_done_s": spread(times_s) | {"target": 5.0},
            "answers_again_s": spread([each[0] for each in kills]) | {"target": 5.0},
            "disturbed_jobs": sum(each[1] for each in kills),
        },
    )


if __name__ == "__main__":
    main()
