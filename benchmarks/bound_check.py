"""Check whether `joint`'s printed bound is ever above a feasible plan.

    .venv/bin/python benchmarks/bound_check.py [--instances 2000]

Random instances of one to four tensors, with and without contention, hosts of one, two
or four ranks, one to three lanes, under every combination of open dimensions in turn.
The bound that `stretto plan` prints for `joint` (with the linear program where that is
used) is compared with the best plan of brute force over the same dimensions and with
the plans of `joint` itself. Stores the result in results/bound_check.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import time

import stretto
from _record import store
from joint_quality import instance
from stretto import planners
from stretto.planners.joint import DIMS

ROUNDING = 1e-9
"""Relative error of sums of floats, above which a bound counts as violated."""

COMBINATIONS = [
    dims
    for number in range(1, len(DIMS) + 1)
    for dims in itertools.combinations(DIMS, number)
]


def checked(seed: int) -> dict:
    """Return the bound and the best plans of one instance, as ratios to the bound."""
    rng = random.Random(seed)
    dims = COMBINATIONS[seed % len(COMBINATIONS)]
    many = {"resource", "algorithm", "forward"}.intersection(dims)
    tensors = {0: 4, 1: 3, 2: 3, 3: 2}[len(many)]
    max_lanes = rng.choice((1, 2, 2, 3)) if tensors != 3 else rng.choice((1, 2))
    contended = rng.random() < 0.6
    workload, cluster = instance(seed, (1, tensors), contended=contended)
    cluster = dataclasses.replace(cluster, ranks_per_host=rng.choice((1, 1, 2, 4)))
    if rng.random() < 0.4:
        cluster = dataclasses.replace(cluster, concurrency=None)
    options = {"max_lanes": max_lanes, "dims": dims}
    joint = stretto.plan(workload, cluster, robust=False, **options).predicted
    best = planners.get("exhaustive", **options).plan(workload, cluster).predicted
    return {
        "seed": seed,
        "contended": contended,
        "brute_force": best.iteration_s / joint.lower_bound_s,
        "joint": joint.iteration_s / joint.lower_bound_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=2000)
    args = parser.parse_args()
    begin_s = time.perf_counter()
    rows = [checked(seed) for seed in range(args.instances)]
    above = [
        row for row in rows if min(row["brute_force"], row["joint"]) < 1 - ROUNDING
    ]
    result = {
        "what": "joint's printed bound against the best plan of brute force",
        "instances": len(rows),
        "combinations": len(COMBINATIONS),
        "contended": sum(row["contended"] for row in rows),
        "bounds_above_a_plan": len(above),
        "violations": above[:20],
        "met_by_brute_force": sum(row["brute_force"] < 1 + 1e-6 for row in rows),
        "mean_gap_of_brute_force": sum(r["brute_force"] - 1 for r in rows) / len(rows),
        "joint_slower_by_1_percent": sum(
            row["joint"] > 1.01 * row["brute_force"] for row in rows
        ),
        "whole_s": time.perf_counter() - begin_s,
    }
    store("bound_check", result)


if __name__ == "__main__":
    main()
