"""How near `joint` comes to the best of all plans, where all can be tried.

    .venv/bin/python benchmarks/joint_quality.py [--instances 300]

Three sets of random instances: start-up and bandwidth alone with gamma = 1.5 for two at
once (each bucket waits for the one before or overlaps it); with slices too; and with
contention, two levels of resource and the choice of algorithm. Stores the excess over
the optimum in results/joint_quality.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from _record import store
from stretto import planners
from stretto.schema import (
    Cluster,
    ComputeContention,
    Concurrency,
    Contention,
    Link,
    RateCurve,
    TensorSpec,
    Workload,
)

SETS = {
    "wait or overlap, gamma 1.5": (("fusion", "lanes"), (3, 6)),
    "and slices": (("fusion", "lanes", "slices"), (3, 5)),
    "all dimensions, contention": ("all", (3, 3)),
}
CONTENTION = Contention(
    compute=ComputeContention(alpha1=1.0, alpha2=1.5e-4),
    overlapped=RateCurve(gamma1=1.2e8, gamma2=1.2e8, gamma3=0.02, gamma4=0.6),
    exclusive=RateCurve(gamma1=1.3e8, gamma2=1.3e8, gamma3=0.02, gamma4=0.6),
    resources=(256, 1024),
)


def instance(seed: int, tensors: tuple[int, int], *, contended: bool):
    """The mixtures of real models: bursts, even pace, a giant last, mostly tiny."""
    rng = random.Random(seed)
    number = rng.randint(*tensors)
    backward_s = rng.uniform(0.05, 0.5)
    weights = [rng.choice((0.0, 1.0, rng.random())) for _ in range(number)]
    total = sum(weights) or 1.0
    at_s, specs = 0.0, []
    for i, weight in enumerate(weights):
        at_s += weight / total * backward_s * 0.999
        size = 4 * int(2 ** rng.uniform(8, 22)) * (8 if i == number - 1 else 1)
        specs.append(
            TensorSpec(
                name=f"t{i}", bytes=size, dtype="float32", ready_s=at_s, needed_s=0.0
            )
        )
    workload = Workload(
        name=f"instance {seed}",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=rng.uniform(0.0, 0.2),
        backward_s=backward_s,
        tensors=tuple(specs),
    )
    ranks_per_host = rng.choice((1, 2)) if contended else 1
    cluster = Cluster(
        name="cluster",
        hosts=rng.choice((2, 4, 6, 12)),
        ranks_per_host=ranks_per_host,
        inter_host=Link(
            latency_s=rng.choice((0.0, 1e-5, 5e-4, 5e-3)),
            bandwidth_bytes_per_s=1.25e8,
            stream_bytes_per_s=1.25e8 * 0.75,
        ),
        intra_host=Link(latency_s=5e-6, bandwidth_bytes_per_s=1e9),
        concurrency=Concurrency(gamma=(1.0, 1.5)),
        contention=CONTENTION if contended else None,
    )
    return workload, cluster


def measured(name: str, instances: int) -> dict:
    """Excess of joint over the optimum, over a set."""
    dims, tensors = SETS[name]
    excess, searches_s = [], []
    begin_s = time.perf_counter()
    for seed in range(instances):
        workload, cluster = instance(seed, tensors, contended=dims == "all")
        options = {"max_lanes": 2, "dims": dims}
        best = planners.get("exhaustive", **options).plan(workload, cluster)
        start_s = time.perf_counter()
        joint = planners.get("joint", sturdy=False, **options).plan(workload, cluster)
        searches_s.append(time.perf_counter() - start_s)
        excess.append(joint.predicted.iteration_s / best.predicted.iteration_s - 1)
    return {
        "set": name,
        "instances": instances,
        "tensors": tensors,
        "mean_excess": statistics.mean(excess),
        "worst_excess": max(excess),
        "least_excess": min(excess),
        "optimal_share": sum(e <= 1e-6 for e in excess) / instances,
        "search_median_s": statistics.median(searches_s),
        "whole_s": time.perf_counter() - begin_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=300)
    args = parser.parse_args()
    result = {
        "what": "joint without its tie-break (sturdy=False) against brute force",
        "reach": {"mean_excess": 1e-3, "worst_excess": 0.05, "optimal_share": 0.95},
        "cases": [measured(name, args.instances) for name in SETS],
    }
    store("joint_quality", result)


if __name__ == "__main__":
    main()
