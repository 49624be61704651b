"""Helpers that all benchmarks share: the machine's description, and result files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
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


def spread(values: list[float]) -> dict:
    """Return median, quartiles and count."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high, "n": len(values)}


def store(name: str, result: dict) -> None:
    """Write ``results/NAME.json`` and print it."""
    RESULTS.mkdir(exist_ok=True)
    body = {"machine": machine(), "command": " ".join(sys.argv), **result}
    text = json.dumps(body, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)
