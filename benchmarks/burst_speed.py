"""How long the burst search takes for a graph like Inception-v3's.

    .venv/bin/python benchmarks/burst_speed.py [--runs 9]

11 blocks of 4 branches, 118 layers, made up; the published profile ends at 64 samples
on a GPU. Published search times of this model, powers of two alone: 0.22 s for 8 GPUs,
3.23 s for 1024 (DeepPool, Table 3). Stores times of the search alone, with machine and
versions, in results/burst_speed.json; `cpu_s` is the processor's time of the same runs.
"""

from __future__ import annotations

import argparse
import random
import time

from _record import spread, store
from stretto.cost.burst import DEEPPOOL
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.search import shortest
from stretto.schema.burst import BatchTime, Layer, LayerProfile

TARGET_S = 0.1


def inception_like(batch: int, *, blocks: int = 11) -> LayerProfile:
    """Seven layers, then blocks of four branches with one to three layers."""
    rng = random.Random(3)
    layers: list[Layer] = []

    def add(*inputs: str) -> str:
        start_s, each_s = rng.uniform(2e-5, 1e-4), rng.uniform(5e-6, 4e-5)
        sizes = [2**i for i in range(batch.bit_length())]
        layers.append(
            Layer(
                name=f"layer{len(layers)}",
                inputs=inputs,
                parameter_bytes=4 * rng.randint(10**4, 10**6),
                activation_bytes=4 * rng.randint(10**4, 3 * 10**5),
                times=tuple(
                    BatchTime(
                        samples=n,
                        forward_s=(start_s + each_s * n) / 3,
                        backward_s=(start_s + each_s * n) * 2 / 3,
                    )
                    for n in sizes
                ),
            )
        )
        return layers[-1].name

    last = add()
    for _ in range(6):
        last = add(last)
    for _ in range(blocks):
        ends = []
        for length in (1, 2, 3, 3):
            end = last
            for _ in range(length):
                end = add(end)
            ends.append(end)
        last = add(*ends)
    add(last)
    return LayerProfile(
        name="inception-like", device="none", layers=tuple(layers), provenance={}
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    profile = inception_like(1024)
    cases = {}
    for gpus, batch, widths, limit in (
        (8, 32, "powers", 2.0),
        (1024, 1024, "powers", None),
        (1024, 1024, "powers", 2.0),
        (1024, 1024, "all", 2.0),
        (1024, 1024, "all", 5.0),
        (1024, 1024, "all", None),
    ):
        wall, cpu = [], []
        for _ in range(args.runs):
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            problem = BurstProblem.of(
                profile,
                DEEPPOOL,
                gpus=gpus,
                batch=batch,
                widths=widths,
                amplification_limit=limit,
            )
            found = shortest(problem)
            wall.append(time.perf_counter() - begin_s)
            cpu.append(time.process_time() - begin_cpu_s)
        cases[f"{gpus} GPUs, {batch} samples, {widths}, limit {limit}"] = {
            "search_s": spread(wall),
            "cpu_s": spread(cpu),
            "within_target": min(wall) < TARGET_S,
            "counts_tried": len(problem.widths),
            "iteration_s": found[0] if found else None,
        }
    store(
        "burst_speed",
        {
            "layers": len(profile.layers),
            "target_s": TARGET_S,
            "cases": cases,
            "missed": (
                "without a limit the branches of a block compete for the GPUs, and "
                "sharing them exactly takes longer than the target"
            ),
        },
    )


if __name__ == "__main__":
    main()
