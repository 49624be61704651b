"""Time the searches of `libra`, and compare the grid with the optimum.

    .venv/bin/python benchmarks/libra_speed.py [--runs 5]

LIBRA's testbed with assumed constants; 500 tensors with different ready times, K = 10,
Z = 150, J = 6, and models of the zoo. Stores results/libra_speed.json.
"""

from __future__ import annotations

import argparse
import random
import time

from _record import spread, store
from stretto import planners, zoo
from stretto.planners._libra.grid import solve_grid
from stretto.planners._libra.pareto import solve_pareto
from stretto.planners._libra.problem import problem_of
from stretto.schema import TensorSpec, Workload

CHUNKS = 150
MAX_GROUPS = 10


def synthetic(number: int) -> Workload:
    """Return a workload: a third of the tensors large, the rest tiny; 240 MB."""
    rng = random.Random(500)
    backward_s = 0.18
    ready = sorted(rng.random() * backward_s for _ in range(number - 1))
    shares = [
        2 ** rng.uniform(0, 5) if rng.random() < 0.35 else 0.003 for _ in range(number)
    ]
    scale = 60e6 / sum(shares)
    return Workload(
        name=f"synthetic-{number}",
        framework="none",
        device="none",
        batch_per_rank=32,
        forward_s=0.09,
        backward_s=backward_s,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}",
                bytes=4 * int(share * scale),
                dtype="float32",
                ready_s=at_s,
                needed_s=0.0,
            )
            for i, (share, at_s) in enumerate(
                zip(shares, [*ready, backward_s], strict=True)
            )
        ),
    )


CASES = [
    ("synthetic-500", 8),
    ("vgg16", 8),
    ("resnet152", 8),
    ("densenet201", 8),
    ("bert-base", 8),
    ("xception", 8),
    ("resnet152", 512),
    ("resnet152", 2048),
    ("vgg16", 2048),
]


def timed(search, runs: int) -> tuple[dict, object]:
    times = []
    for _ in range(runs):
        begin_s = time.perf_counter()
        found = search()
        times.append(time.perf_counter() - begin_s)
    return spread(times), found


def measured(name: str, hosts: int, runs: int) -> dict:
    cluster = zoo.cluster("libra", hosts)
    workload = synthetic(500) if name == "synthetic-500" else zoo.workload(name)
    problem, _ = problem_of(workload, cluster)
    result = {
        "workload": name,
        "ranks": cluster.ranks,
        "tensors": len(workload.tensors),
        "levels": len(problem.levels),
    }
    searches = {
        "grid, one pass, Z = 150": lambda: solve_grid(problem, chunks=CHUNKS),
        "pareto, default": lambda: solve_pareto(problem),
        "pareto, default, K = 10": lambda: solve_pareto(problem, max_groups=MAX_GROUPS),
    }
    if name == "synthetic-500":
        searches["grid, K = 10, Z = 150"] = lambda: solve_grid(
            problem, chunks=CHUNKS, max_groups=MAX_GROUPS
        )
    for search, function in searches.items():
        search_s, found = timed(function, runs)
        result[search] = {
            "search_s": search_s,
            "groups": len(found.ends),
            "reported_backward_s": found.backward_s,
            "backward_s": problem.backward_s(found.ends, found.levels),
        }
    best_s = result["pareto, default"]["backward_s"]
    for search in searches:
        if "K = 10" not in search:
            result[search]["over_best"] = result[search]["backward_s"] / best_s - 1
    result["iteration_s"] = {
        planner: planners.get(planner).plan(workload, cluster).predicted.iteration_s
        for planner in ("mg-wfbp", "fusion", "libra-m", "libra")
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    store(
        "libra_speed",
        {
            "what": "libra's searches on LIBRA's testbed, constants assumed, J = 6",
            "reach_s": 1.0,
            "cases": [measured(name, hosts, args.runs) for name, hosts in CASES],
        },
    )


if __name__ == "__main__":
    main()
