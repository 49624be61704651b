"""Run all tests from a fresh clone, again and again, and store how each run ended.

    python benchmarks/make_test.py --runs 10 --busy 3

Each run clones the last commit into a temporary folder and runs ``.ci/run`` there: the
checks and ``make test``. The last runs are beside two busy loops. A run takes about 20
minutes on a quiet machine with 2 processors. Runs are appended to the stored ones, so
that they add up over days; ``green_in_a_row`` counts the last ones without a failure.
Target: ten in a row, of which three beside busy loops.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _record import RESULTS, commit_of, machine

ROOT = Path(__file__).parents[1]
RESULT = RESULTS / "make_test.json"
LOOPS = 2


def run_once(*, busy: bool) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        commit = commit_of(clone)
        load = os.getloadavg()[0]
        loops = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(LOOPS if busy else 0)
        ]
        began_s = time.monotonic()
        try:
            done = subprocess.run(
                ["./.ci/run"],
                cwd=clone,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
    text = done.stdout
    counts = [
        {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", line)}
        for line in re.findall(r"^.*\d+ passed.* in [\d.]+s.*$", text, re.MULTILINE)
    ]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if done.returncode:
        sys.stderr.write(text[-20_000:])
    return {
        "commit": commit,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "beside_busy_loops": LOOPS if busy else 0,
        "load_before": round(load, 1),
        "green": done.returncode == 0,
        "passed": sum(c.get("passed", 0) for c in counts),
        "skipped": sum(c.get("skipped", 0) for c in counts),
        "failed": failed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=0, help="runs beside busy loops")
    options = parser.parse_args()
    for number in range(options.runs):
        row = run_once(busy=number >= options.runs - options.busy)
        runs = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
        runs.append(row)
        red = [i for i, each in enumerate(runs) if not each["green"]]
        last = runs[red[-1] + 1 :] if red else runs
        body = {
            "machine": machine(),
            "command": "benchmarks/make_test.py",
            "what": "each run of .ci/run from a fresh clone",
            "reach": "ten green in a row, three of them beside busy loops",
            "green_in_a_row": len(last),
            "of_these_busy": sum(each["beside_busy_loops"] > 0 for each in last),
            "runs": runs,
        }
        RESULT.write_text(json.dumps(body, indent=1) + "\n")
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
