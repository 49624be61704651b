"""Time a correction of the model between two steps, and measure its quality.

    .venv/bin/python benchmarks/correction_speed.py [--every 1] [--before COMMIT]

Synthetic truths: a fitted model with some figures multiplied, of which the steps of one
to four plans are seen with 2 % of noise. For each case: the time of `corrected`, the
sum of squares that remains (counted here, by `simulate_step`, not by its own report)
and the error of five other plans' predicted steps; then the time of planning from
scratch under the corrected model, and of planning again from the plans seen, and the
second plan's predicted step over the first's. Every ``--every``-th case.

``--before COMMIT`` stores the results as the figures of that commit, with which later
runs compare; run it with that commit's ``src`` in PYTHONPATH. Stores
results/correction_speed.json, with machine and versions.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
from dataclasses import dataclass, replace

from _record import RESULTS, spread, store
from stretto import planners
from stretto.cost.fit import slowed_by_lanes
from stretto.schema import (
    AllReduceFit,
    Cluster,
    Concurrency,
    Link,
    Plan,
    TensorSpec,
    Workload,
)
from stretto.sim import simulate_step
from stretto.tune import calibration
from stretto.tune.calibration import (
    CalibratedModel,
    Observation,
    backward_s,
    bucket_ends_s,
    corrected,
)

NOISE_RATIO = 0.02

TRUTHS = (
    {},
    {"link": 0.5},
    {"link": 2.0},
    {"flow": 0.6},
    {"startup": 2.0},
    {"backward": 1.1, "contention": 2.0},
    {"link": 0.8, "contention": 3.7},
    {"link": 0.4, "flow": 0.7, "contention": 5.0},
    {"link": 0.3, "flow": 3.0},
    {"elsewhere": 1.6},
)
"""The truth over the fit, by figure; ``elsewhere``: all steps are longer by this
factor, which no figure explains.
"""


def workload_of(number: int, total_bytes: float, step_s: float) -> Workload:
    """Return the demo's convolutional mixture: half of the tensors tiny."""
    rng = random.Random(number)
    scale = [rng.choice([0.005, 1.0, 4.0, 0.005]) for _ in range(number)]
    backward_s = 0.55 * step_s
    return Workload(
        name=f"synthetic-{number}",
        framework="none",
        device="none",
        batch_per_rank=8,
        forward_s=step_s - backward_s,
        backward_s=backward_s,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}",
                bytes=4 * (1 + round(total_bytes * part / sum(scale) / 4)),
                dtype="float32",
                ready_s=backward_s * (i + 1) / number,
                needed_s=(step_s - backward_s) * (number - 1 - i) / number,
            )
            for i, part in enumerate(scale)
        ),
    )


def clusters() -> dict[str, Cluster]:
    """Return what a profile fits: flows below the link, a slow link, lanes that slow
    each other, computation slowed by communication.
    """
    local = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)

    def of(name: str, link: float, flow: float | None, **more: object) -> Cluster:
        wire = Link(latency_s=1e-4, bandwidth_bytes_per_s=link, stream_bytes_per_s=flow)
        return Cluster(
            name=name,
            hosts=4,
            ranks_per_host=1,
            inter_host=wire,
            intra_host=local,
            **more,
        )

    capped = of("capped", 138e6, 38.7e6)
    return {
        "capped": capped,
        "uncapped": of("uncapped", 60e6, None),
        "lanes slow each other": of(
            "gamma",
            138e6,
            38.7e6,
            allreduce=AllReduceFit(startup_s=2e-3, s_per_byte=1.5 / 38.7e6, ranks=4),
            concurrency=Concurrency(gamma=(1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 2.3, 2.6)),
        ),
        "contention": replace(
            capped, contention=slowed_by_lanes(0.04, bytes_per_s=138e6)
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fitted model, the observed steps, and the truth about other plans."""

    name: str
    workload: Workload
    cluster: Cluster
    seen: tuple[Observation, ...]
    others: tuple[tuple[Plan, float], ...]
    """Return plans with their true step times, in seconds."""


def cases() -> list[Case]:
    """Return all cases, in a fixed order with fixed noise."""
    made = []
    jobs = [workload_of(52, 7.2e6, 0.1), workload_of(20, 14e6, 0.25)]
    for where, cluster in clusters().items():
        for workload in jobs:
            guide = CalibratedModel(workload, cluster)
            ddp = planners.get("ddp").plan(workload, cluster)
            points = guide.space.points
            # No plan of a planner that may change, so that cases stay the same.
            best = guide.plan_of(min(points, key=guide.point_s))
            middle, third = (guide.plan_of(points[i]) for i in (len(points) // 2, 3))
            others = tuple(
                guide.plan_of(point)
                for point in points[1 :: max(1, len(points) // 5)][:5]
            )
            for truth in TRUTHS:
                for plans in ((best,), (best, middle, third, ddp)):
                    name = f"{workload.name}, {where}, {truth or 'as fitted'}"
                    made.append(
                        _case(
                            f"{name}, {len(plans)} seen",
                            workload,
                            cluster,
                            truth,
                            plans,
                            others,
                        )
                    )
    return made


def _case(
    name: str,
    workload: Workload,
    cluster: Cluster,
    truth: dict[str, float],
    plans: tuple[Plan, ...],
    others: tuple[Plan, ...],
) -> Case:
    rng = random.Random(name)
    factors = dict.fromkeys(calibration.PRIOR_RATIO, 1.0)
    factors.update({k: v for k, v in truth.items() if k in factors})
    longer = truth.get("elsewhere", 1.0)
    model = calibration.scaled(workload, cluster, factors)

    def noisy(value: float) -> float:
        return value * math.exp(rng.gauss(0, NOISE_RATIO))

    seen = []
    for plan in plans:
        step = simulate_step(*model, plan)
        computed_s = backward_s(step.timeline)
        seen.append(
            Observation(
                plan=plan,
                step_s=noisy(longer * step.iteration_s),
                backward_s=None if computed_s is None else noisy(computed_s),
                bucket_ends_s=tuple(map(noisy, bucket_ends_s(step.timeline))),
            )
        )
    return Case(
        name=name,
        workload=workload,
        cluster=cluster,
        seen=tuple(seen),
        others=tuple(
            (plan, longer * simulate_step(*model, plan).iteration_s) for plan in others
        ),
    )


def cost_of(case: Case, found: calibration.Correction) -> float:
    """Return the sum of squares that `corrected` minimizes, over two; see there."""
    rows = [
        math.log(found.factors[name]) / ratio
        for name, ratio in calibration.PRIOR_RATIO.items()
    ]
    recorded = calibration.RECORDED_RATIO
    for seen in case.seen:
        step = simulate_step(found.workload, found.cluster, seen.plan)
        rows.append(math.log(step.iteration_s / seen.step_s) / calibration.NOISE_RATIO)
        computed_s = backward_s(step.timeline)
        rows.append(math.log(computed_s / seen.backward_s) / recorded)
        noise_s = recorded * seen.step_s * math.sqrt(len(seen.bucket_ends_s))
        ends_s = bucket_ends_s(step.timeline)
        rows += [
            (predicted - measured) / noise_s
            for predicted, measured in zip(ends_s, seen.bucket_ends_s, strict=True)
        ]
    return sum(row * row for row in rows) / 2


def measured(case: Case) -> dict:
    """Run one correction; return its time, the rest, and the error on other plans."""
    begin_s = time.perf_counter()
    found = corrected(case.workload, case.cluster, case.seen)
    duration_s = time.perf_counter() - begin_s
    errors = [
        abs(simulate_step(found.workload, found.cluster, plan).iteration_s / true_s - 1)
        for plan, true_s in case.others
    ]
    return {
        "duration_s": duration_s,
        "cost": cost_of(case, found),
        "error_ratio": statistics.fmean(errors),
    }


def planned(case: Case) -> dict:
    """Plan under the corrected model, from scratch and from the plans seen."""
    found = corrected(case.workload, case.cluster, case.seen)
    model = (found.workload, found.cluster, "joint")
    begin_s = time.perf_counter()
    scratch = planners.plan_with_wire(*model)
    between_s = time.perf_counter()
    again = planners.plan_with_wire(*model, near=[seen.plan for seen in case.seen])
    end_s = time.perf_counter()
    return {
        "anew_s": between_s - begin_s,
        "again_s": end_s - between_s,
        "again_over_scratch": again.predicted.iteration_s
        / scratch.predicted.iteration_s,
    }


def compared(rows: dict[str, dict], before: dict[str, list[float]]) -> dict:
    """Compare the new figures with the old ones of the same cases."""
    both = [(rows[name], before[name]) for name in rows if name in before]
    if not both:
        return {}
    ratios = [
        # If nothing is left to explain, a hundredth of a row's noise is negligible.
        (new["cost"] + 0.01) / (cost + 0.01)
        for new, (cost, _) in both
    ]
    good = sum(ratio <= 1.05 for ratio in ratios)
    return {
        "cases": len(both),
        "cost_at_most_5_percent_above_share": good / len(ratios),
        "cost_over_before": spread(ratios),
        "worst_cost_over_before": max(ratios),
        "error_ratio": statistics.fmean(new["error_ratio"] for new, _ in both),
        "error_ratio_before": statistics.fmean(error for _, (_, error) in both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--before", metavar="COMMIT")
    args = parser.parse_args()
    path = RESULTS / "correction_speed.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    chosen = cases()[:: args.every]
    for case in chosen[:2]:
        measured(case)  # warm
    gc.collect()
    rows = {case.name: measured(case) for case in chosen}

    def times(number: int) -> dict:
        return spread(
            [
                row["duration_s"]
                for name, row in rows.items()
                if f" {number} seen" in name
            ]
        )

    result = {
        "what": "corrections of a fitted model by synthetic trials",
        "duration_s": {f"{number} seen": times(number) for number in (1, 4)},
        "longest_s": max(row["duration_s"] for row in rows.values()),
        "reach_s": 0.03,
    }
    if not args.before:
        plans = [planned(case) for case in chosen if case.name.endswith("4 seen")]
        result["planning"] = {
            **{key: spread([plan[key] for plan in plans]) for key in plans[0]},
            "worst_again_over_scratch": max(
                plan["again_over_scratch"] for plan in plans
            ),
        }
    before = stored.get("before", {})
    if args.before:
        # Cost and error of each case, with which later runs are compared.
        by_case = {
            name: [round(row[key], 6) for key in ("cost", "error_ratio")]
            for name, row in rows.items()
        }
        before = {"commit": args.before, **result, "cost_and_error": by_case}
    result |= {
        "against_before": compared(rows, before.get("cost_and_error", {})),
        "before": before,
    }
    store("correction_speed", result)


if __name__ == "__main__":
    main()
