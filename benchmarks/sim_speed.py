"""Time one simulated step, and a scaling table to 100,000 ranks.

    .venv/bin/python benchmarks/sim_speed.py [--runs 50]

Stores medians and spread in results/sim_speed.json, with machine and versions.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from _record import spread, store
from plan_speed import cluster_of, workload_of
from stretto.planners import get
from stretto.schema import (
    Bucket,
    ComputeContention,
    Contention,
    Plan,
    RateCurve,
)
from stretto.sim import StepModel, simulate_step
from stretto.sim.scaling import scaling

NAME = "1 Gbit/s, flows 300 Mbit/s, 64 hosts"
REACH = {"model_s": 2e-3, "scaling_s": 1.0}


def timed(call, repeats: int) -> dict:
    call()
    found = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin_s)
    return spread(found)


def every_tensor_alone(workload, cluster, *, lanes: int, overlap: str) -> Plan:
    return Plan(
        planner="wfbp",
        workload_digest=workload.digest,
        ranks=cluster.ranks,
        overlap=overlap,
        lanes=lanes,
        buckets=tuple(
            Bucket(tensors=(tensor.name,), lane=i % lanes, wire_dtype="float32")
            for i, tensor in enumerate(workload.tensors)
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    workload = workload_of(500)
    plain = cluster_of(NAME)
    curve = RateCurve(gamma1=36e6, gamma2=1e7, gamma3=0.02, gamma4=0.6)
    contended = replace(
        plain,
        contention=Contention(
            compute=ComputeContention(alpha1=1.0, alpha2=1.3445e-4),
            overlapped=curve,
            exclusive=curve,
            resources=(512,),
        ),
    )
    count = len(workload.tensors)
    ends = tuple(range(1, count + 1))
    cases = []
    for title, cluster in (("no contention", plain), ("contention", contended)):
        model = StepModel(workload, cluster)
        for lanes in (1, 4):
            on = tuple(i % lanes for i in range(count))
            ones = (1,) * count
            row = {"cluster": title, "lanes": lanes, "buckets": count}
            row["model_s"] = timed(
                lambda m=model, k=lanes, o=on, s=ones: m.iteration_s(ends, k, o, s),
                args.runs,
            )
            for overlap in ("backward", "forward"):
                plan = every_tensor_alone(
                    workload, cluster, lanes=lanes, overlap=overlap
                )
                row[f"simulate_{overlap}_s"] = timed(
                    lambda c=cluster, p=plan: simulate_step(workload, c, p),
                    max(5, args.runs // 10),
                )
            cases.append(row)
    wfbp = every_tensor_alone(workload, plain, lanes=4, overlap="backward")
    fusion = get("fusion")
    tables = {
        "one plan of 500 buckets": timed(lambda: scaling(workload, plain, wfbp), 5),
        "planner fusion at every point": timed(
            lambda: scaling(workload, plain, fusion.plan), 5
        ),
    }
    store(
        "sim_speed",
        {
            "what": "one step of 500 tensors in 500 buckets; tables to 100,000 ranks",
            "reach": REACH,
            "steps": cases,
            "scaling_s": tables,
            "points": len(scaling(workload, plain, wfbp)),
        },
    )


if __name__ == "__main__":
    main()
