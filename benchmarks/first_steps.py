"""Measure what tuning costs in the first 100 steps, on six emulated jobs.

    .venv/bin/python benchmarks/first_steps.py [--job NAME ...]

For each job four runs of 100 steps follow each other: tuned, known, known, tuned; short
runs repeat this cycle. A tuned run has no option and no memory of earlier runs; a known
run has the first tuned run's plan from its first step. The cost of a cycle is its tuned
runs' time over that of its known ones, less one; a job's cost is the median. Three jobs
are those of the tuning benchmark, three are used nowhere else. Stores
results/first_steps.json; jobs that were measured before are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _record import RESULTS, machine

RANK = Path(__file__).parent / "_first_rank.py"
RESULT = RESULTS / "first_steps.json"
TARGET = 0.04

JOBS: dict[str, tuple[list[str], list[str]]] = {
    "convnet, 300 Mbit/s a flow": (
        ["--hosts", "4", "--link", "1gbit", "--flow", "300mbit"],
        [],
    ),
    "convnet, 1 Gbit/s": (["--hosts", "4", "--link", "1gbit"], []),
    "transformer, 100 Mbit/s": (
        ["--hosts", "4", "--link", "100mbit"],
        ["--model", "transformer", "--width", "80", "--batch", "8"],
    ),
    "new: convnet of 0.1 s steps, 2 hosts": (
        ["--hosts", "2", "--link", "500mbit", "--flow", "200mbit"],
        ["--width", "32", "--batch", "16"],
    ),
    "new: transformer, 3 hosts": (
        ["--hosts", "3", "--link", "600mbit", "--flow", "250mbit"],
        ["--model", "transformer", "--width", "120", "--batch", "4"],
    ),
    "new: wide convnet, 2 hosts of 2": (
        ["--hosts", "2", "--ranks-per-host", "2", "--link", "2gbit"],
        ["--width", "56", "--batch", "24"],
    ),
}


def measured(name: str, timeout_s: int) -> dict:
    lab, rank = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            *(sys.executable, "-m", "stretto", "lab", "run", *lab),
            *("--timeout", str(timeout_s)),
            *("--", sys.executable, str(RANK), "--out", str(out), *rank),
        ]
        subprocess.run(command, check=True, timeout=timeout_s + 60)
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=list(JOBS), action="append")
    parser.add_argument("--timeout", type=int, default=600)
    arguments = parser.parse_args()
    kept = {"jobs": {}}
    if RESULT.exists():
        kept = json.loads(RESULT.read_text())
    kept |= {"machine": machine(), "command": " ".join(sys.argv), "target": TARGET}
    for name in arguments.job or JOBS:
        kept["jobs"][name] = found = measured(name, arguments.timeout)
        RESULTS.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")
        print(
            f"{name}: {100 * found['lost']:.1f} % lost "
            f"(cycles {', '.join(f'{100 * x:.1f}' for x in found['lost_each'])} %), "
            f"step {1e3 * found['known_step_s']:.0f} ms, {found['line']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
