"""Tuning inside the run, on emulated networks: its results, speed and cost.

For every case the whole grid of plans is measured offline first, then a run with no
option, the same run again, two runs that know its plan from the first step, a second
one with no option, and AIACC's ensemble without a model; last, all settled plans in
turns. Stores results/tune_CASE.json and writes results/tuning.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _record import RESULTS, machine
from _tune_table import write_page

RANK = Path(__file__).parent / "_tune_rank.py"

CASES: dict[str, tuple[list[str], list[str]]] = {
    "convnet_capped": (["--hosts", "4", "--link", "1gbit", "--flow", "300mbit"], []),
    "convnet_uncapped": (["--hosts", "4", "--link", "1gbit"], []),
    "convnet_100mbit": (
        ["--hosts", "4", "--link", "100mbit"],
        ["--width", "24", "--batch", "16"],
    ),
    "convnet_2x2": (
        [
            *("--hosts", "2", "--ranks-per-host", "2"),
            *("--link", "1gbit", "--flow", "300mbit"),
        ],
        [],
    ),
    "convnet_compute": (
        ["--hosts", "4", "--link", "10gbit"],
        ["--width", "24", "--batch", "448"],
    ),
    "transformer_capped": (
        ["--hosts", "4", "--link", "1gbit", "--flow", "300mbit"],
        ["--model", "transformer", "--width", "160", "--batch", "8"],
    ),
    "transformer_100mbit": (
        ["--hosts", "4", "--link", "100mbit"],
        ["--model", "transformer", "--width", "80", "--batch", "8"],
    ),
}

DRIFT = (
    ["--hosts", "4", "--link", "1gbit"],
    ["--halve-to", "500", "--width", "48"],
)


def run(lab: list[str], rank: list[str], out: Path, timeout_s: int) -> dict:
    command = [
        *(sys.executable, "-m", "stretto", "lab", "run", *lab),
        *("--timeout", str(timeout_s)),
        *("--", sys.executable, str(RANK), "--out", str(out), *rank),
    ]
    subprocess.run(command, check=True, timeout=timeout_s + 60)
    return json.loads(out.read_text())


def keep(name: str, result: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    body = {"machine": machine(), "command": " ".join(sys.argv), **result}
    (RESULTS / f"tune_{name}.json").write_text(json.dumps(body, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[*CASES, "halved"], action="append")
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--timeout", type=int, default=1500)
    arguments = parser.parse_args()
    for name in arguments.case or [*CASES, "halved"]:
        sys.stderr.write(f"== {name}\n")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            if name == "halved":
                found = run(*DRIFT, out, arguments.timeout)
                keep(name, found)
                continue
            lab, rank = CASES[name]
            more = ["--ablations"] if arguments.ablations else []
            found = run(lab, [*rank, *more], out, arguments.timeout)
        if arguments.ablations:
            keep(f"{name}_ablations", found)
            found["runs"] = {
                run: found["runs"][run] for run in ("guided", "again", "blind")
            }
        keep(name, found)
        for each, values in found["runs"].items():
            sys.stderr.write(
                f"   {each}: {values['over_grid']:.3f} of the grid's best, within 5 % "
                f"after {values['steps_within_5_percent']} steps, "
                f"{values['trials']} trials\n"
            )
    print(write_page())


if __name__ == "__main__":
    main()
