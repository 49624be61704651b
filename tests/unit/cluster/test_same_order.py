"""A trace on a real cluster and in the simulator: jobs start and end in one order.

Jobs do not sleep here: each ends when the test says so, in the simulator's order, so no
time decides anything. `benchmarks/cluster_same_trace.py` compares times.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import pytest

from stretto.cluster.engine_sim import SimulatedJob, simulate
from stretto.cluster.policies import registry
from stretto.errors import Infeasible
from support.clusters import ENGINES, await_that, cluster, job

if TYPE_CHECKING:
    from pathlib import Path

JOBS = [  # role, devices, priority, submitted, time that it takes
    ("foreground", 2, 0, 0.0, 50.0),
    ("background", 1, 0, 1.0, 200.0),
    ("foreground", 4, 0, 2.0, 31.0),
    ("foreground", 1, 0, 3.0, 17.0),
    ("foreground", 1, 1, 4.0, 23.0),
    ("background", 2, 0, 5.0, 9.0),
    ("foreground", 3, 0, 60.5, 40.0),
    ("foreground", 1, 0, 61.5, 13.0),
]
SCRIPT = (
    "trap 'exit 0' TERM; while [ ! -e go-$STRETTO_CLUSTER_JOB ]; do sleep 0.02; done"
)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["fifo", "partition"])
def test_jobs_start_and_end_in_the_simulators_order(
    engine: str, policy: str, tmp_path: Path
) -> None:
    trace = [
        SimulatedJob(
            spec=job(
                tmp_path, SCRIPT, devices=gpus, name=f"j{n}", role=role, priority=high
            ),
            submit_s=at_s,
            work_s=length_s * gpus,
        )
        for n, (role, gpus, high, at_s, length_s) in enumerate(JOBS)
    ]
    done = simulate(trace, registry.get(policy), gpus=4, gpus_per_host=4)
    events = [(each.submit_s, 0, n) for n, each in enumerate(trace)]
    ended = {n: row.end_s for n, row in enumerate(done.jobs) if row.end_s is not None}
    events += [(end_s, 1, n) for n, end_s in ended.items()]
    heapq.heapify(events)
    # One host: parts of a gang on two end at different times, and free devices then.
    with cluster(
        tmp_path / "c", engine=engine, policy=policy, hosts=1, devices=4
    ) as found:
        ids: dict[int, str] = {}
        while events:
            _, is_end, n = heapq.heappop(events)
            if is_end:
                found.await_state(ids[n], "running")
                (tmp_path / f"go-{ids[n]}").touch()
                found.await_state(ids[n], "done")
            elif n in ended:
                ids[n] = found.submit(trace[n].spec)
            else:  # in the simulator it waits forever
                with pytest.raises(Infeasible):
                    found.submit(trace[n].spec)
            # What an end or a submission stops and starts has happened before the next.
            await_that(
                lambda: not {"starting", "stopping"} & set(found.ask("status")["jobs"]),
                lambda: str(found.ask("status")),
            )
        rows = {n: found.show(name) for n, name in ids.items()}
        log = found.ask("events", since=0)["events"]
    numbers = {name: n for n, name in ids.items()}
    started = [numbers[e["job"]] for e in log if e["kind"] == "placed"]
    first = list(dict.fromkeys(started))
    times_s = [done.jobs[n].first_s for n in first]
    assert times_s == sorted(times_s)
    assert sum(max(0, row["attempt"] - 1) for row in rows.values()) == sum(
        each.preemptions for each in done.jobs
    )
    assert all(row["state"] == "done" for row in rows.values())
