"""Helpers that all benchmarks share: the machine's description, and result files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def machine() -> dict:
    """Return hardware and versions, for readers of the results."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "stretto": version("stretto"),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def commit_of(folder: Path) -> str:
    """Return the abbreviated commit that a folder's working tree is at."""
    return subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, text=True
    ).strip()


def in_turn(sources: dict[str, Path], number: int) -> list[str]:
    """Return the names of two versions, in the other order than in the last round."""
    return list(sources) if number % 2 else list(sources)[::-1]


def spread(values: list[float]) -> dict:
    """Return median, quartiles and count; a single value is all three."""
    low, median, high = statistics.quantiles(
        values if len(values) > 1 else 2 * values, n=4
    )
    return {"median": median, "q1": low, "q3": high, "n": len(values)}


def store(name: str, result: dict) -> None:
    """Write ``results/NAME.json`` and print it."""
    RESULTS.mkdir(exist_ok=True)
    body = {"machine": machine(), "command": " ".join(sys.argv), **result}
    text = json.dumps(body, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


def on_time(pid: int | None = None) -> None:
    """Let a process's threads run on time on a busy machine, where that is permitted.

    For processes whose sleep stands for the computation of a device of their own.

    Args:
        pid: the process's id; this process if ``None``.
    """
    try:
        for thread in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        sys.stderr.write("no permission for SCHED_FIFO: times include other work\n")
