"""Measure the demo's figures on the capped and the uncapped network.

Runs `stretto demo` with its own interleaving of methods, several times, and stores for
each network the ratios, the share of the bound and the prediction errors of every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

from _record import store

NETWORKS = {"capped": "300mbit", "uncapped": "none"}


def run(flow: str, model: str, extra: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "stretto", "demo", "--json", "--out", out]
        command += ["--flow", flow, "--model", model, *extra]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, timeout=1200
        )
        return json.loads(done.stdout)


def figures(result: dict) -> dict:
    methods = {m["name"]: m for m in result["methods"]}
    ours = methods["stretto"]["measured_step_s"]
    errors = {
        name: m["predicted_step_s"] / m["measured_step_s"] - 1
        for name, m in methods.items()
    }
    sizes = [abs(error) for error in errors.values()]
    return {
        "over_ddp": methods["ddp"]["measured_step_s"] / ours,
        "over_best_ddp": methods["ddp-best"]["measured_step_s"] / ours,
        "bound_share": methods["stretto"]["bound_share"],
        "error_mean": statistics.fmean(sizes),
        "error_worst": max(sizes),
        "errors": errors,
        "step_s": {name: m["measured_step_s"] for name, m in methods.items()},
        "spread_s": {name: m["spread_s"] for name, m in methods.items()},
        "final_loss": {name: m["final_loss"] for name, m in methods.items()},
        "notes": result["notes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--network", choices=list(NETWORKS), action="append")
    arguments, extra = parser.parse_known_args()
    for network in arguments.network or NETWORKS:
        runs = [
            figures(run(NETWORKS[network], arguments.model, extra))
            for _ in range(arguments.runs)
        ]
        keys = [k for k, v in runs[0].items() if isinstance(v, float)]
        summary = {
            key: {
                "median": statistics.median(r[key] for r in runs),
                "min": min(r[key] for r in runs),
                "max": max(r[key] for r in runs),
            }
            for key in keys
        }
        store(
            f"demo_{arguments.model}_{network}",
            {
                "what": f"stretto demo, {arguments.model}, 4 hosts, 1 Gbit/s links, "
                f"flow cap {NETWORKS[network]}",
                "summary": summary,
                "runs": runs,
            },
        )


if __name__ == "__main__":
    main()
