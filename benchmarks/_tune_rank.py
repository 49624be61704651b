"""One rank of benchmarks/tune_network.py, inside the emulated cluster.

Measures the offline grid, tuned runs of several kinds, and at the end all settled plans
interleaved, so that a noisy moment affects all of them equally. Rank 0 writes the
results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.demo.settings import DemoSettings
from stretto.demo.worker import SAME_START, Task, Trainee
from stretto.tune import ENSEMBLE, TuneOptions
from stretto.tune.calibration import CalibratedModel

TorchDDP = nn.parallel.DistributedDataParallel
SETTLED_STEPS = 64
"""Steps between settling and the change of the network, in which the drift detector
learns the usual range.
"""
MAX_MORE_STEPS = 600
BLIND = TuneOptions(
    model=False,
    techniques=ENSEMBLE,
    lost_ratio=1e6,
    patience=None,
    watch=False,
    plan_cache=False,
)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stderr.write(f"{perf_counter() - BEGAN_S:5.0f} s  {text}\n")
        sys.stderr.flush()


BEGAN_S = perf_counter()


def slowest(values: list[float]) -> list[float]:
    table = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()


def timed(trainee: Trainee, steps: int) -> list[float]:
    """Return the slowest rank's time of each step, without synchronization."""
    found = []
    for _ in range(steps):
        begin_s = perf_counter()
        trainee.run()
        found.append(perf_counter() - begin_s)
    return slowest(found)


class Job:
    def __init__(self, task: Task) -> None:
        self.task = task

    def tuned(self, options: TuneOptions) -> tuple[Trainee, list[Any]]:
        settled: list[Any] = []
        model = stretto.DistributedDataParallel(
            self.task.model(), on_settled=settled.append, tune=options, **SAME_START
        )
        return Trainee(self.task, model), settled

    def planned(self, plan: Any) -> Trainee:
        model = stretto.DistributedDataParallel(
            self.task.model(), plan=plan, **SAME_START
        )
        return Trainee(self.task, model)

    def stock(self) -> Trainee:
        return Trainee(self.task, TorchDDP(self.task.model(), **SAME_START))

    def look(self) -> Any:
        options = TuneOptions(steps=0, watch=False, plan_cache=False)
        trainee, settled = self.tuned(options)
        while not settled:
            trainee.run()
        return settled[0]


def block(step_s: float) -> int:
    """Return the number of consecutive timed steps: more if steps are short."""
    return max(3, min(12, math.ceil(0.3 / step_s)))


def grid(job: Job, guide: CalibratedModel, seed: int) -> tuple[list[dict], Any, float]:
    """Measure all points, and the best few again in turns; return the best of all.

    A point whose first counted step takes 1.3 times the best is not run any longer.
    """
    trainee = job.planned(guide.plan_of(guide.space.points[0]))
    points = list(guide.space.points)
    random.Random(seed).shuffle(points)
    rows = []
    best_s = math.inf
    for point in points:
        plan = guide.plan_of(point)
        trainee.model.apply_plan(plan)
        times_s = timed(trainee, 2)[1:]
        if times_s[0] < 1.3 * best_s:
            times_s += timed(trainee, block(times_s[0]) - 1)
        step_s = statistics.median(times_s)
        best_s = min(best_s, step_s)
        rows.append(
            {
                "point": guide.space.describe(point),
                "step_s": step_s,
                "predicted_s": guide.plan_s(plan),
                "key": list(point),
            }
        )
    rows.sort(key=lambda row: row["step_s"])
    finalists = [guide.plan_of(tuple(row["key"])) for row in rows[:5]]
    times: list[list[float]] = [[] for _ in finalists]
    for _ in range(3):
        for i, plan in enumerate(finalists):
            trainee.model.apply_plan(plan)
            times[i] += timed(trainee, 1 + block(best_s))[1:]
    medians = [statistics.median(t) for t in times]
    best = min(range(len(medians)), key=medians.__getitem__)
    return rows, finalists[best], medians[best]


def whole_run(trainee: Trainee, steps: int) -> dict:
    """Time a run from its first step: the total, and the slowest rank's steps."""
    dist.barrier()
    begin_s = perf_counter()
    own = []
    for _ in range(steps):
        at_s = perf_counter()
        trainee.run()
        own.append(perf_counter() - at_s)
    whole_s = slowest([perf_counter() - begin_s])[0]
    return {"whole_s": whole_s, "steps_s": slowest(own)}


def tuned_run(job: Job, options: TuneOptions, steps: int) -> dict:
    """Run with tuning. The model is dropped afterward: the threads of idle lanes wake
    a hundred times a second, and those of many models slow everything that follows.
    """
    trainee, settled = job.tuned(options)
    whole = whole_run(trainee, steps)
    more = 0
    # A search earns the time that it may lose.
    while not settled and more < MAX_MORE_STEPS:
        trainee.run()
        more += 1
    if not settled:
        raise SystemExit("it never settled")
    return {
        **whole,
        "late_steps": more,
        "settled": settled[-1],
        "events": [
            {"step": e.step, "what": e.what, "why": e.why, "values": e.values}
            for e in settled[-1].story.events
        ],
    }


def final(plans: dict[str, Trainee], rounds: int) -> dict[str, dict]:
    """Return step times of all, taken in turns; ``turns_s`` is each turn's median."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    turns: dict[str, list[float]] = {name: [] for name in plans}
    names = list(plans)
    steps = block(min(timed(trainee, 3)[2] for trainee in plans.values()))
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found = timed(plans[name], 1 + steps)[1:]
            times[name] += found
            turns[name].append(statistics.median(found))
    return {
        name: {
            "median_s": statistics.median(values),
            "q1_s": statistics.quantiles(values, n=4)[0],
            "q3_s": statistics.quantiles(values, n=4)[2],
            "n": len(values),
            "turns_s": turns[name],
        }
        for name, values in times.items()
    }


def paired(one: dict, other: dict) -> list[float]:
    """Return quartiles of a ratio, turn by turn, so that drifts cancel."""
    ratios = [a / b for a, b in zip(one["turns_s"], other["turns_s"], strict=True)]
    return statistics.quantiles(ratios, n=4)


def known_s(known: list[dict], steps: int) -> float:
    """Return the time of as many steps with a known plan, including its cold start."""
    wholes_s = []
    for run in known:
        more = steps - len(run["steps_s"])
        wholes_s.append(run["whole_s"] + more * statistics.median(run["steps_s"]))
    return statistics.fmean(wholes_s)


def settled_s(run: dict) -> float:
    """Compare a run's step time after it settled with the steps right before, so that
    the machine's drift has no effect.
    """
    at = max(e["step"] for e in run["events"] if e["what"] == "settled")
    after = run["steps_s"][at + 1 :]
    return statistics.median(after) if len(after) >= 8 else run["settled"].step_s


def within(run: dict, best_s: float, ratio: float = 1.05) -> int | None:
    """Return the step after which the incumbent was within ``ratio`` of the best."""
    for event in run["events"]:
        if event["what"] == "tried":
            incumbent_s = event["values"].get("incumbent_s")
            if incumbent_s and incumbent_s <= ratio * best_s:
                # The plan was in use since the trial's own first step.
                return event["step"] - event["values"]["steps"]
    return None


def halve_link(interface: str, mbit: int) -> None:
    subprocess.run(
        [
            *("tc", "class", "change", "dev", interface, "parent", "1:"),
            *("classid", "1:1", "htb", "rate", f"{mbit}mbit", "ceil", f"{mbit}mbit"),
        ],
        check=True,
    )


def story(trainee: Trainee) -> tuple[Any, ...]:
    """Return the events of the run's tuning so far."""
    return trainee.model._auto.story.events  # noqa: SLF001 - no step has to end for it


def drift(job: Job, interface: str, mbit: int) -> dict:
    """Halve the link under a settled run; then measure what is possible, by grid."""
    options = TuneOptions(plan_cache=False)
    trainee, settled = job.tuned(options)
    while not settled:
        trainee.run()
    timed(trainee, SETTLED_STEPS)
    first = settled[-1]
    halve_link(interface, mbit)
    dist.barrier()
    steps_s: list[float] = []
    while len(settled) < 2 and len(steps_s) < 150:
        steps_s += timed(trainee, 1)
    planned = [e.step for e in story(trainee) if e.what in ("planned", "changed")]
    changed_at = [e.step for e in story(trainee) if e.what == "changed"]
    say(f"halved: {len(settled)} settled, planned at {planned}")
    look = job.look()
    guide = CalibratedModel(look.workload, look.cluster)
    _rows, best_plan, _ = grid(job, guide, 1)
    after = {
        "settled again": job.planned(settled[-1].executed),
        "best of the grid": job.planned(best_plan),
        "plan from before": job.planned(first.executed),
        "ddp": job.stock(),
    }
    times = final(after, 6)
    settled_steps = [e.step for e in settled[0].story.events][-1]
    replanned = [p for p in planned if changed_at and p > changed_at[0]]
    return {
        "settled": len(settled),
        "noticed_after": changed_at[0] - settled_steps - SETTLED_STEPS
        if changed_at
        else None,
        "planned_after": replanned[0] - settled_steps - SETTLED_STEPS
        if replanned
        else None,
        "times": times,
        "of_possible": times["best of the grid"]["median_s"]
        / times["settled again"]["median_s"],
        "events": [
            {"step": e.step, "what": e.what, "why": e.why}
            for e in settled[-1].story.events
        ],
    }


def rank_parser() -> argparse.ArgumentParser:
    """Return a parser with the options of a rank's job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--width", type=int)
    parser.add_argument("--batch", type=int, default=32)
    return parser


def joined(arguments: argparse.Namespace) -> Job:
    """Join the process group and return the job that the options name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = DemoSettings(
        out="",
        model=arguments.model,
        width=arguments.width,
        batch_per_rank=arguments.batch,
    )
    return Job(Task.of(settings))


def main() -> None:
    parser = rank_parser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--halve-to", type=int)
    parser.add_argument("--interface", default="eth0")
    arguments = parser.parse_args()
    job = joined(arguments)
    memory = Path(arguments.out).with_suffix(".sqlite")
    os.environ["STRETTO_PLAN_CACHE"] = str(memory)
    if arguments.halve_to:
        result = drift(job, arguments.interface, arguments.halve_to)
        if dist.get_rank() == 0:
            Path(arguments.out).write_text(json.dumps(result))
        dist.barrier()
        return

    say("looking")
    look = job.look()
    guide = CalibratedModel(look.workload, look.cluster)
    say(f"grid of {len(guide.space.points)} plans")
    rows, best_plan, grid_s = grid(job, guide, 0)
    say(f"best of the grid {grid_s * 1e3:.0f} ms; guided run")
    # Tuned, known, known, tuned: drift in the meantime affects both equally.
    guided = tuned_run(job, TuneOptions(watch=False), arguments.steps)
    say("second run")
    second = tuned_run(job, TuneOptions(watch=False), 15)
    say("its plan known from the first step, twice")
    plan = guided["settled"].executed
    known = [whole_run(job.planned(plan), arguments.steps) for _ in range(2)]
    say("guided run again, without the first one's memory")
    again = tuned_run(job, TuneOptions(watch=False, plan_cache=False), arguments.steps)
    say("blind run")
    blind = tuned_run(job, BLIND, arguments.steps + 12)
    runs = {"guided": guided, "again": again, "blind": blind}
    if arguments.ablations:
        alone = {
            f"{name} alone": TuneOptions(
                model=False,
                techniques=(name,),
                lost_ratio=1e6,
                patience=None,
                watch=False,
                plan_cache=False,
            )
            for name in (*ENSEMBLE, "coordinate")
        }
        alone["planner alone"] = TuneOptions(
            techniques=(), lost_ratio=1e6, watch=False, plan_cache=False
        )
        alone["first plan, no trials"] = TuneOptions(
            steps=0, watch=False, plan_cache=False
        )
        alone["all together"] = TuneOptions(
            techniques=("predicted", "coordinate", *ENSEMBLE),
            watch=False,
            plan_cache=False,
        )
        for name, options in alone.items():
            say(name)
            runs[name] = tuned_run(job, options, arguments.steps + 12)
    say("all in turns")
    # Searches that found one plan share its times, because the plan is the same.
    chosen = {"grid": best_plan}
    chosen |= {name: run["settled"].executed for name, run in runs.items()}
    by_plan = {p.digest: job.planned(p) for p in chosen.values()}
    times = final({"ddp": job.stock(), **by_plan}, 16)
    times |= {name: times[p.digest] for name, p in chosen.items()}
    times = {name: times[name] for name in ("ddp", *chosen)}
    best_s = min(times["grid"]["median_s"], times["guided"]["median_s"])
    first_s = second["steps_s"]
    found = {
        "grid_points": len(rows),
        "grid": rows[:5] + rows[-1:],
        "times": times,
        "remembered": second["settled"].from_cache,
        "known_s": [run["whole_s"] for run in known],
        "lost_in_all": (guided["whole_s"] + again["whole_s"])
        / sum(run["whole_s"] for run in known)
        - 1,
        "second_first_step_over_settled": statistics.median(first_s[1:])
        / settled_s(guided),
        "runs": {},
    }
    for name, run in runs.items():
        settled = run["settled"]
        tried = [e for e in run["events"] if e["what"] == "tried"]
        spent = [e["values"] for e in run["events"] if e["what"] == "settled"][-1]
        steps = len(run["steps_s"])
        quartiles = paired(times[name], times["grid"])
        over_grid = quartiles[1]
        found["runs"][name] = {
            "over_grid": over_grid,
            "over_grid_quartiles": quartiles,
            "over_ddp": paired(times["ddp"], times[name])[1],
            "steps_within_5_percent": within(run, best_s),
            "trials": len(tried),
            "trials_lost_share": spent.get("lost_s", 0.0) / (100 * best_s),
            "whole_over_known": run["whole_s"] / known_s(known, steps) - 1,
            "bound_share": None
            if not settled.bound_s
            else settled.bound_s / times[name]["median_s"],
            "ended": [e["why"] for e in run["events"] if e["what"] == "settled"][-1],
            "steps_s": [round(s, 4) for s in run["steps_s"]],
            "events": run["events"],
        }
    if dist.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(found, default=_plain))
    dist.barrier()


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else str(value)


if __name__ == "__main__":
    main()
