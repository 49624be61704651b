"""One rank of benchmarks/first_steps.py, inside the emulated cluster."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch.distributed as dist

from _tune_rank import joined, rank_parser, tuned_run, whole_run
from stretto.tune import TuneOptions, summary


def main() -> None:
    parser = rank_parser()
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    job = joined(arguments)
    # Imports and first allocations must not affect a measured run.
    whole_run(job.stock(), 5)
    options = TuneOptions(memory=False)
    first = tuned_run(job, options, arguments.steps)
    settled = first["settled"]
    known = [
        whole_run(job.planned(settled.carried_out), arguments.steps) for _ in range(2)
    ]
    last = tuned_run(job, options, arguments.steps)
    known_s = statistics.fmean(run["whole_s"] for run in known)
    events = [
        [{"step": e["step"], "what": e["what"], "why": e["why"]} for e in run["events"]]
        for run in (first, last)
    ]
    if dist.get_rank() == 0:
        found = {
            "line": summary(settled),
            "lost": (first["whole_s"] + last["whole_s"]) / (2 * known_s) - 1,
            "lost_each": [run["whole_s"] / known_s - 1 for run in (first, last)],
            "known_whole_s": [run["whole_s"] for run in known],
            "known_step_s": statistics.median(known[0]["steps_s"]),
            "late_steps": [run["late_steps"] for run in (first, last)],
            "steps_s": {
                name: [round(s, 4) for s in run["steps_s"]]
                for name, run in (("tuned", first), ("known", known[0]))
            },
            "events": events,
        }
        Path(arguments.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
