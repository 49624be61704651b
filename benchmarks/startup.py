"""Measure the processor time of commands, against the source of another version.

    git worktree add /tmp/earlier COMMIT
    python benchmarks/startup.py --before /tmp/earlier/src

Both versions run in turn with this environment's packages, each with a cache of
compiled modules of its own. Processor time is compared rather than elapsed time,
because other work on the machine lengthens the latter. Target: within 2 %.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from _record import commit_of, in_turn, spread, store

HERE = Path(__file__).parents[1] / "src"
FILES = [
    ["zoo", "show", "resnet50", "-o", "workload.json"],
    ["zoo", "cluster", "mg-wfbp-10gbe-16", "-o", "cluster.json"],
]
CASES = {
    "--help": ["--help"],
    "run --help": ["run", "--help"],
    "plan --help": ["plan", "--help"],
    "plan --planner ddp": ["plan", "workload.json", "cluster.json", "--planner", "ddp"],
}


def cpu_s(source: Path, folder: Path, arguments: list[str]) -> float:
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "PYTHONPYCACHEPREFIX": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "stretto", *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="its src folder")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        sources = {"before": options.before.resolve(), "after": HERE}
        folders = {which: Path(name) / which for which in sources}
        for which, folder in folders.items():
            folder.mkdir()
            for arguments in FILES:
                cpu_s(sources[which], folder, arguments)
        for case, arguments in CASES.items():
            rows: dict[str, list[float]] = {which: [] for which in sources}
            for number in range(-1, options.rounds):
                for which in in_turn(sources, number):
                    took_s = cpu_s(sources[which], folders[which], arguments)
                    if number >= 0:  # the first run fills the cache
                        rows[which].append(took_s)
            pairs = zip(rows["after"], rows["before"], strict=True)
            found[case] = {
                **{f"{which}_s": spread(times) for which, times in rows.items()},
                **{f"min_{which}_s": min(times) for which, times in rows.items()},
                "after_over_before": spread([a / b for a, b in pairs]),
            }
    commit = commit_of(options.before)
    store(
        "startup",
        {
            "what": f"processor time of commands, over that of {commit}",
            "reach": "at most 1.02",
            "load_before": os.getloadavg()[0],
            **found,
        },
    )


if __name__ == "__main__":
    main()
