"""Compare `joint` with simulated annealing on workloads of 8 to 1,000 tensors.

    .venv/bin/python benchmarks/anneal_quality.py [--instances 6] [--evaluations 15000]

Brute force is limited to a handful of tensors; annealing has no such limit and shares
no move with `joint`. Random instances of each size have contention, three levels of
resource and every algorithm open. Annealing minimizes the step time of the same
step model over all open dimensions: once from DDP's buckets, once from the plan of
`joint` itself, so that a plan counts as good only if annealing cannot improve it
either. Excess is the time of `joint`, without its tie-break (``robust=False``), over
the best of all. Stores the result in results/anneal_quality.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from dataclasses import replace

from _record import store
from joint_quality import CONTENTION, instance
from stretto import planners
from stretto.planners.base import Draft, predicted_s
from stretto.sim.step_model import StepModel

SIZES = (8, 16, 32, 64, 128, 250, 500, 1000)
DIMS = ("fusion", "lanes", "slices", "resource", "algorithm")
MAX_LANES = 8
LEVELS = (256, 512, 1024)
ALGORITHMS = ("ring", "halving_doubling", "tree")
TARGET = {"mean_excess": 1e-3, "worst_excess": 1e-2}
HOT, COLD = 2e-2, 1e-6
"""First and last temperature, as a share of the step."""


def drawn(seed: int, tensors: int):
    """Return an instance; communication takes 0.3 to 3 times backward."""
    workload, cluster = instance(seed, (tensors, tensors), contended=True)
    rng = random.Random(f"{seed} {tensors}")
    sending_s = 2 * workload.total_bytes / cluster.inter_host.bandwidth_bytes_per_s
    pace = sending_s / rng.uniform(0.3, 3.0) / workload.backward_s
    workload = replace(
        workload,
        forward_s=workload.forward_s * pace,
        backward_s=workload.backward_s * pace,
        tensors=tuple(
            replace(t, ready_s=t.ready_s * pace, needed_s=t.needed_s * pace)
            for t in workload.tensors
        ),
    )
    contention = replace(CONTENTION, resources=LEVELS)
    return workload, replace(cluster, contention=contention)


class Annealer:
    """Simulated annealing over buckets, lanes, slices, resources and algorithms."""

    def __init__(self, workload, cluster, seed: int) -> None:
        self._model = StepModel(workload, cluster)
        self._rng = random.Random(seed)
        self._tensors = len(workload.tensors)
        self._algorithms = ALGORITHMS
        if cluster.ranks_per_host > 1:
            self._algorithms = (*ALGORITHMS, "hierarchical")

    def value_s(self, plan: list) -> float:
        """Return a draft's time: (lanes, [end, lane, slices, resource, algorithm])."""
        lanes, buckets = plan
        return self._model.iteration_s(
            [b[0] for b in buckets],
            lanes,
            [b[1] for b in buckets],
            [b[2] for b in buckets],
            [b[3] for b in buckets],
            [b[4] for b in buckets],
        )

    def run(self, draft: Draft, evaluations: int) -> float:
        """Return the least time found from a draft."""
        number = len(draft.ends)
        buckets = zip(
            draft.ends,
            draft.bucket_lanes,
            draft.slices,
            [r or LEVELS[0] for r in draft.resources or (None,) * number],
            draft.algorithms or ("ring",) * number,
            strict=True,
        )
        now = [draft.lanes, list(buckets)]
        here_s = best_s = self.value_s(now)
        for i in range(evaluations):
            heat = HOT * (COLD / HOT) ** (i / evaluations)
            other = self._neighbor(now)
            value_s = self.value_s(other)
            worse = (value_s - here_s) / best_s
            if worse <= 0 or self._rng.random() < math.exp(-worse / heat):
                now, here_s = other, value_s
                best_s = min(best_s, here_s)
        return best_s

    def _neighbor(self, plan: list) -> list:
        rng = self._rng
        lanes, buckets = plan[0], list(plan[1])
        at = rng.randrange(len(buckets))
        end, lane, slices, resource, algorithm = buckets[at]
        begin = buckets[at - 1][0] if at else 0
        move = rng.randrange(10)
        if move <= 2:  # move the end of a bucket
            if at + 1 < len(buckets):
                after = buckets[at + 1][0]
                far = int(2 ** rng.uniform(0, math.log2(self._tensors)))
                end = min(max(end + rng.choice((-far, far)), begin + 1), after - 1)
                buckets[at] = (end, lane, slices, resource, algorithm)
        elif move == 3:  # split a bucket
            if end - begin > 1:
                cut = rng.randrange(begin + 1, end)
                buckets.insert(at, (cut, lane, slices, resource, algorithm))
                buckets[at + 1] = (end, rng.randrange(lanes), *buckets[at + 1][2:])
        elif move == 4:  # merge two
            if at + 1 < len(buckets):
                kept = buckets[at + rng.randrange(2)]
                buckets[at : at + 2] = [(buckets[at + 1][0], *kept[1:])]
        elif move == 5:
            slices = rng.randint(1, lanes)
            buckets[at] = (end, lane, slices, resource, algorithm)
        elif move == 6:  # another lane, for one bucket or for all from it on
            turn = rng.randrange(lanes)
            last = rng.choice((at + 1, len(buckets)))
            for i in range(at, last):
                b = buckets[i]
                buckets[i] = (b[0], (b[1] + turn) % lanes, *b[2:])
        elif move == 7:
            self._put(buckets, at, 3, rng.choice(LEVELS))
        elif move == 8:
            self._put(buckets, at, 4, rng.choice(self._algorithms))
        else:  # more or fewer lanes
            lanes = min(max(lanes + rng.choice((-1, 1)), 1), MAX_LANES)
            buckets = [
                (e, first % lanes, min(parts, lanes), r, a)
                for e, first, parts, r, a in buckets
            ]
        return [lanes, buckets]

    def _put(self, buckets: list, at: int, place: int, value) -> None:
        """Set one figure of a bucket, or of it and all after it."""
        last = self._rng.choice((at + 1, at + 1, len(buckets)))
        for i in range(at, last):
            bucket = list(buckets[i])
            bucket[place] = value
            buckets[i] = tuple(bucket)


def compared(seed: int, tensors: int, evaluations: int) -> dict:
    """Plan one instance by `joint` and by annealing."""
    workload, cluster = drawn(seed, tensors)
    options = {"max_lanes": MAX_LANES, "dims": DIMS}
    begin_s = time.process_time()
    plan = planners.get("joint", robust=False, **options).plan(workload, cluster)
    search_s = time.process_time() - begin_s
    joint_s = predicted_s(plan)
    ddp = planners.get("ddp").plan(workload, cluster)
    begin_s = time.process_time()
    cold_s = Annealer(workload, cluster, seed).run(Draft.of(ddp), evaluations)
    near_s = Annealer(workload, cluster, seed + 1).run(Draft.of(plan), evaluations)
    annealing_s = time.process_time() - begin_s
    return {
        "seed": seed,
        "tensors": tensors,
        "ranks": cluster.ranks,
        "joint_s": joint_s,
        "gap": plan.predicted.gap,
        "excess": joint_s / min(cold_s, near_s, joint_s) - 1,
        "annealing_from_ddp": cold_s / joint_s - 1,
        "annealing_from_joint": near_s / joint_s - 1,
        "ddp": predicted_s(ddp) / joint_s - 1,
        "joint_search_s": search_s,
        "annealing_search_s": annealing_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=6)
    parser.add_argument("--evaluations", type=int, default=15_000)
    args = parser.parse_args()
    rows = []
    for tensors in SIZES:
        for seed in range(args.instances):
            rows.append(compared(seed, tensors, args.evaluations))
            print(rows[-1], flush=True)
    excess = [row["excess"] for row in rows]
    result = {
        "what": "joint without its tie-break (robust=False) against annealing, from "
        "DDP's buckets and from joint's own plan",
        "contention": dataclasses.asdict(CONTENTION) | {"resources": LEVELS},
        "target": TARGET,
        "instances": len(rows),
        "evaluations": args.evaluations,
        "mean_excess": statistics.mean(excess),
        "worst_excess": max(excess),
        "annealing_from_ddp_mean": statistics.mean(
            row["annealing_from_ddp"] for row in rows
        ),
        "rows": rows,
    }
    store("anneal_quality", result)


if __name__ == "__main__":
    main()
