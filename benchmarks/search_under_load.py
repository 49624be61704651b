"""Run searches beside two busy loops that start and stop at random.

Twenty searches on three emulated networks, each in its own run. Afterwards, on the
quiet machine, all plans that they settled on, the planner's own and DDP's buckets are
measured in turns. A search is right if its plan is within 5 % of the fastest of these.
Every finished search is stored in results/search_under_load.json with its plan; a run
that was stopped continues where it was. ``--fresh`` starts from scratch.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from _record import RESULTS, machine

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK = Path(__file__).parent / "_load_rank.py"
RESULT = RESULTS / "search_under_load.json"

NETWORKS: dict[str, tuple[list[str], list[str], int]] = {
    "capped": (["--hosts", "4", "--link", "1gbit", "--flow", "300mbit"], [], 7),
    "uncapped": (["--hosts", "4", "--link", "1gbit"], [], 7),
    "transformer_100mbit": (
        ["--hosts", "4", "--link", "100mbit"],
        ["--model", "transformer", "--width", "80", "--batch", "8"],
        6,
    ),
}
"""Lab, job, and number of searches."""

LOOPS = 2
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Ends with this process, however that ends."""

MEAN_S = 5.0
"""Mean time for which a loop runs, and for which it pauses."""

WITHIN_RATIO = 1.05
SEARCH_TIMEOUT_S = 400
MEASURE_TIMEOUT_S = 300


@contextlib.contextmanager
def busy_loops(seed: int) -> Iterator[None]:
    """Run processes that use one core each, started and stopped at random times."""
    done = threading.Event()

    def one(number: int) -> None:
        rng = random.Random(seed * LOOPS + number)
        while not done.wait(rng.expovariate(1 / MEAN_S)):
            loop = subprocess.Popen([sys.executable, "-c", LOOP])
            try:
                done.wait(rng.expovariate(1 / MEAN_S))
            finally:
                loop.kill()
                loop.wait()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(LOOPS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def run(lab: list[str], rank: list[str], out: Path, timeout_s: int) -> dict:
    command = [
        *(sys.executable, "-m", "stretto", "lab", "run", *lab),
        *("--timeout", str(timeout_s)),
        *("--", sys.executable, str(RANK), "--out", str(out), *rank),
    ]
    subprocess.run(command, check=True, timeout=timeout_s + 60)
    return json.loads(out.read_text())


def packed(folder: Path) -> dict[str, str]:
    return {
        path.name: base64.b64encode(path.read_bytes()).decode()
        for path in sorted(folder.glob("*.json"))
        if path.name in ("settled.json", "plan.json", "ddp.json")
    }


def unpack(files: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, body in files.items():
        (folder / name).write_bytes(base64.b64decode(body))


def searched(name: str, number: int) -> dict:
    lab, rank, _ = NETWORKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found.json"
        begin_s = time.perf_counter()
        try:
            with busy_loops(sum(map(ord, name)) * 100 + number):
                found = run(lab, rank, out, SEARCH_TIMEOUT_S)
        except (subprocess.SubprocessError, OSError) as exc:
            found = {"settled": False, "error": str(exc)[:300]}
        found["took_s"] = round(time.perf_counter() - begin_s, 1)
        return {**found, "files": packed(Path(scratch))}


def measured(name: str, searches: list[dict]) -> dict:
    lab, rank, _ = NETWORKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folders = []
        for number, found in enumerate(searches):
            if found["settled"]:
                folder = Path(scratch) / str(number)
                unpack(found["files"], folder)
                folders.append(str(folder))
        out = Path(scratch) / "measured.json"
        return run(lab, [*rank, "--measure", *folders], out, MEASURE_TIMEOUT_S)


def store(kept: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")


def judge(kept: dict) -> dict:
    """Count the searches whose plan is near the best measured afterward."""
    right, rows = 0, []
    for name, case in kept["networks"].items():
        for number, found in enumerate(case["searches"]):
            over = None
            if found["settled"] and "measured" in case:
                over = case["measured"]["over_best"].get(f"{number}/settled")
            good = over is not None and over <= WITHIN_RATIO
            right += good
            rows.append({"network": name, "over_best": over, "right": good})
    return {"right": right, "searches": len(rows), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--network", choices=list(NETWORKS), action="append")
    parser.add_argument("--searches", type=int, help="of each network, at most")
    arguments = parser.parse_args()
    kept: dict = {"machine": machine(), "networks": {}}
    if RESULT.exists() and not arguments.fresh:
        kept = json.loads(RESULT.read_text())
    for name in arguments.network or NETWORKS:
        case = kept["networks"].setdefault(name, {"searches": []})
        wanted = min(NETWORKS[name][2], arguments.searches or NETWORKS[name][2])
        while len(case["searches"]) < wanted:
            found = searched(name, len(case["searches"]))
            case["searches"].append(found)
            case.pop("measured", None)
            store(kept)
            sys.stderr.write(f"{name}: {found.get('line', 'did not settle')}\n")
        if "measured" not in case:
            case["measured"] = measured(name, case["searches"])
            store(kept)
    kept["result"] = judge(kept)
    store(kept)
    result = kept["result"]
    print(
        f"{result['right']} of {result['searches']} searches within "
        f"{100 * (WITHIN_RATIO - 1):.0f} % of the best"
    )


if __name__ == "__main__":
    main()
