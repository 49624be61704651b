"""One rank of benchmarks/search_under_load.py, inside the emulated cluster.

Trains until a search has settled, beside the load that the driver runs, and saves the
plans. With ``--measure`` it reads such files instead and times all their plans and
DDP's buckets in turns, on the quiet machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from _tune_rank import Job, final, joined, paired, rank_parser
from stretto.schema import Plan
from stretto.tune import TuneOptions, summary

MAX_STEPS = 700


def search(job: Job, folder: Path) -> dict:
    """Train until the search has settled; rank 0 saves the plan and DDP's."""
    trainee, settled = job.tuned(TuneOptions(watch=False, plan_cache=False))
    steps = 0
    while not settled and steps < MAX_STEPS:
        trainee.run()
        steps += 1
    if not settled:
        return {"settled": False, "steps": steps}
    found = settled[0]
    if dist.get_rank() == 0:
        found.executed.save(folder / "settled.json")
        found.ddp.save(folder / "ddp.json")
        found.plan.save(folder / "plan.json")
    return {
        "settled": True,
        "steps": steps,
        "kept_ddp": not found.applied,
        "line": summary(found),
        "step_s": found.step_s,
        "ddp_step_s": found.ddp_step_s,
    }


def measure(job: Job, folders: list[Path], rounds: int) -> dict:
    """Time the plans in turns, relative to the fastest, turn by turn."""
    quiet = job.look()  # the planner's choice if nothing disturbs its profile
    plans = {"ddp": quiet.ddp, "quiet": quiet.plan}
    for folder in folders:
        for path in (folder / "settled.json", folder / "plan.json"):
            if path.exists():
                plans[f"{folder.name}/{path.stem}"] = Plan.load(path)
    # Equal decisions of several searches share their times; DDP's is always one.
    names: dict[str, str] = {}
    same: dict[tuple, str] = {}
    for name, plan in plans.items():
        decision = (plan.overlap, plan.lanes, plan.buckets)
        names[name] = same.setdefault(decision, name)
    trainees = {name: job.planned(plans[name]) for name in same.values()}
    times = final(trainees, rounds)
    best = min(times, key=lambda name: times[name]["median_s"])
    return {
        "plans": len(trainees),
        "best": best,
        "median_s": {name: times[name]["median_s"] for name in times},
        "over_best": {
            name: paired(times[same], times[best])[1] for name, same in names.items()
        },
    }


def main() -> None:
    parser = rank_parser()
    parser.add_argument("--measure", nargs="*")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    job = joined(arguments)
    out = Path(arguments.out)
    if arguments.measure is None:
        found = search(job, out.parent)
    else:
        found = measure(job, [Path(f) for f in arguments.measure], arguments.rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
