"""Compare the demo's step times with those of another version of the source.

    git worktree add /tmp/earlier COMMIT
    python benchmarks/demo_versions.py --before /tmp/earlier/src

Both versions run `stretto demo --quick` in turn, with this environment's packages, each
pair in the other order than the last. A run measures and plans for itself, so its
plans may differ too. A round takes about 3 minutes and wants the machine alone.
Target: within 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _record import commit_of, in_turn, spread, store

HERE = Path(__file__).parents[1] / "src"


def steps_s(source: Path, folder: Path) -> dict[str, float]:
    """Return the median step of each method of the demo."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "demo", "--quick", "--json"],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)["methods"]
    return {row["name"]: row["measured_step_s"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="its src folder")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    sources = {"before": options.before.resolve(), "after": HERE}
    load = os.getloadavg()[0]
    found: dict[str, list[dict[str, float]]] = {which: [] for which in sources}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for which in in_turn(sources, number):
                found[which].append(steps_s(sources[which], Path(folder)))
    methods = [m for m in found["before"][0] if m in found["after"][0]]
    rows = {}
    for method in methods:
        times = {which: [run[method] for run in found[which]] for which in sources}
        pairs = zip(times["after"], times["before"], strict=True)
        rows[method] = {
            **{f"{w}_s": statistics.median(t) for w, t in times.items()},
            "after_over_before": spread([a / b for a, b in pairs]),
        }
    commit = commit_of(options.before)
    store(
        "demo_versions",
        {
            "what": f"median step of each method of the demo, over that of {commit}",
            "reach": "0.98 to 1.02",
            "load_before": load,
            "methods": rows,
        },
    )


if __name__ == "__main__":
    main()
