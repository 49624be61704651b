"""Compute Pareto fronts of step time against GPU time, and time the search.

    .venv/bin/python benchmarks/burst_front.py [--gpus 8] [--batch 32] [--runs 5]

The profiles are the zoo's, by roofline on an A100; the network is DeepPool's published
constants. For each model: the fastest plan, the cheapest within 5 % of it, data
parallelism and the best single width, and the seconds that the plan and the front take.
Stores results/burst_front.json with machine and versions.
"""

from __future__ import annotations

import argparse
import time

from _record import spread, store
from stretto._api import burst
from stretto.zoo import layer_profile

MODELS = ("vgg11", "vgg16", "wide-resnet101-2", "inception-v3")
SAMPLES = tuple(2**i for i in range(7))


def timed(work, runs):
    """Return a call's result, and its times."""
    times = []
    for _ in range(runs):
        begin_s = time.perf_counter()
        found = work()
        times.append(time.perf_counter() - begin_s)
    return found, spread(times)


def row_of(plan):
    predicted = plan.predicted
    return {
        "iteration_s": predicted.iteration_s,
        "amplification": predicted.amplification,
        "idle_gpu_s": predicted.idle_gpu_s,
        "widths": sorted({entry.gpus for entry in plan.layers}),
    }


def measure(name, gpus, batch, runs):
    profile = layer_profile(name, samples=SAMPLES)

    def problem():
        return burst.problem(profile, gpus=gpus, batch=batch)

    fastest, plan_s = timed(lambda: burst.plan(problem()), runs)
    front, front_s = timed(lambda: burst.front(problem()), runs)
    limit_s = 1.05 * front[0].predicted.iteration_s
    near = [plan for plan in front if plan.predicted.iteration_s <= limit_s]
    predicted = fastest.predicted
    return {
        "layers": len(profile.layers),
        "fastest": row_of(fastest),
        "cheapest_within_5_percent": row_of(near[-1]),
        "plans_of_front": len(front),
        "data_parallel_s": predicted.data_parallel_s,
        "single_width": predicted.single_width,
        "single_width_s": predicted.single_width_s,
        "over_data_parallel": predicted.data_parallel_s / predicted.iteration_s,
        "plan_s": plan_s,
        "front_s": front_s,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    rows = {n: measure(n, given.gpus, given.batch, given.runs) for n in MODELS}
    about = {"gpus": given.gpus, "batch": given.batch}
    store("burst_front", {**about, "models": rows})


if __name__ == "__main__":
    main()
