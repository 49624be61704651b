"""One rank of benchmarks/first_steps.py, inside the emulated cluster."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch.distributed as dist

from _tune_rank import joined, rank_parser, tuned_run, whole_run
from stretto.tune import TuneOptions, summary

CYCLE_S = 70.0
"""Cycles of two tuned and two known runs are repeated until the known runs took this
long, because short runs vary more ..."""

MAX_CYCLES = 5
"""... at most this often."""


def cycles_left(known: list[dict], cycles: int) -> bool:
    """Return whether another cycle is needed; equal on all ranks, which is rank 0's."""
    needed = [sum(run["whole_s"] for run in known) < CYCLE_S and cycles < MAX_CYCLES]
    dist.broadcast_object_list(needed)
    return bool(needed[0])


def main() -> None:
    parser = rank_parser()
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    job = joined(arguments)
    # Imports and first allocations must not affect a measured run.
    whole_run(job.stock(), 5)
    options = TuneOptions(plan_cache=False)
    tuned, known = [], []
    settled = None
    while not known or cycles_left(known, len(known) // 2):
        tuned.append(tuned_run(job, options, arguments.steps))
        settled = settled or tuned[0]["settled"]
        known += [
            whole_run(job.planned(settled.executed), arguments.steps) for _ in range(2)
        ]
        tuned.append(tuned_run(job, options, arguments.steps))
    lost_each = [
        statistics.fmean(run["whole_s"] for run in tuned[i : i + 2])
        / statistics.fmean(run["whole_s"] for run in known[i : i + 2])
        - 1
        for i in range(0, len(known), 2)
    ]
    events = [
        [{"step": e["step"], "what": e["what"], "why": e["why"]} for e in run["events"]]
        for run in tuned
    ]
    if dist.get_rank() == 0:
        found = {
            "line": summary(settled),
            "lost": statistics.median(lost_each),
            "lost_each": lost_each,
            "tuned_whole_s": [run["whole_s"] for run in tuned],
            "known_whole_s": [run["whole_s"] for run in known],
            "known_step_s": statistics.median(known[0]["steps_s"]),
            "late_steps": [run["late_steps"] for run in tuned],
            "steps_s": {
                name: [round(s, 4) for s in run["steps_s"]]
                for name, run in (("tuned", tuned[0]), ("known", known[0]))
            },
            "events": events,
        }
        Path(arguments.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
