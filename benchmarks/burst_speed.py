"""Time the burst search for Inception-v3 and similar graphs.

    .venv/bin/python benchmarks/burst_speed.py [--runs 9]

Inception-v3 is the zoo's, with times by roofline, because the published profile ends at
64 samples on a GPU; in its last two blocks branches split again. The synthetic graphs
have 11 blocks of 4 branches, 118 layers; in the nested one a branch of each block ends
with its own block. Published search times of this model, only powers of two: 0.22 s for
8 GPUs, 3.23 s for 1024 (DeepPool, Table 3). Stores times of the search alone, with
machine and versions, in results/burst_speed.json; `cpu_s` is the processor's time of
the same runs, and `within_target` is true if the median `search_s` is.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from _record import spread, store
from stretto.cost.burst import DEEPPOOL
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.search import shortest
from stretto.schema.burst import BatchTime, Layer, LayerProfile
from stretto.zoo import layer_profile

TARGET_S = 0.1


def inception_like(
    batch: int, *, blocks: int = 11, nested: bool = False
) -> LayerProfile:
    """Return seven layers, then blocks of four branches with one to three layers.

    Nested: the last branch's second and third layer both follow its first.
    """
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
        for length in (1, 2, 3):
            end = last
            for _ in range(length):
                end = add(end)
            ends.append(end)
        first = add(last)
        second = add(first)
        third = add(first if nested else second)
        ends += [second, third] if nested else [third]
        last = add(*ends)
    add(last)
    return LayerProfile(
        name="inception-like", device="none", layers=tuple(layers), provenance={}
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    sizes = [2**i for i in range(11)]
    graphs = {
        "made up": inception_like(1024),
        "made up, nested": inception_like(1024, nested=True),
        "Inception-v3": layer_profile("inception-v3", samples=sizes),
    }
    cases = {}
    for graph, gpus, batch, widths, limit in (
        ("made up", 8, 32, "powers", 2.0),
        ("made up", 1024, 1024, "powers", None),
        ("made up", 1024, 1024, "powers", 2.0),
        ("made up", 1024, 1024, "all", 2.0),
        ("made up", 1024, 1024, "all", 5.0),
        ("made up", 1024, 1024, "all", None),
        ("made up, nested", 1024, 1024, "all", 2.0),
        ("made up, nested", 1024, 1024, "all", 5.0),
        ("made up, nested", 1024, 1024, "all", None),
        ("Inception-v3", 1024, 1024, "powers", None),
        ("Inception-v3", 1024, 1024, "all", 2.0),
        ("Inception-v3", 1024, 1024, "all", 5.0),
        ("Inception-v3", 1024, 1024, "all", None),
    ):
        profile = graphs[graph]
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
        name = f"{graph}, {gpus} GPUs, {batch} samples, {widths}, limit {limit}"
        cases[name] = {
            "layers": len(profile.layers),
            "search_s": spread(wall),
            "cpu_s": spread(cpu),
            "within_target": statistics.median(wall) < TARGET_S,
            "counts_tried": len(problem.widths),
            "iteration_s": found[0] if found else None,
        }
    missed = [name for name, case in cases.items() if not case["within_target"]]
    result = {"target_s": TARGET_S, "cases": cases, "missed": missed}
    if missed:
        result["why_missed"] = (
            "the branches of a block compete for the GPUs, and sharing them exactly "
            "between many pairs of widths takes longer than the target"
        )
    store("burst_speed", result)


if __name__ == "__main__":
    main()
