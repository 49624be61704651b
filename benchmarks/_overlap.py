"""What the overlap benchmarks of JAX and Keras share: networks, options, summaries."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _record import spread, store
from stretto.lab import LabSpec, run_lab
from stretto.units import parse_rate_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, WIDTH, HOSTS = 12, 1024, 4
WARMUP = 2


def run(
    bench: Callable[[argparse.Namespace], None],
    *,
    doc: str | None,
    file: str,
    rounds: int,
    rival: str,
    targets: dict[str, float],
    packages: dict[str, str],
) -> None:
    """Be a rank, or start all of them on each network and store what they measured.

    Args:
        bench: what a rank does; rank 0 writes ``seconds`` and ``cpu`` by method, and
            more figures, to ``options.out``.
        doc: the description of the command.
        file: the benchmark's own file, whose stem names the result.
        rounds: blocks of each method, unless the command line says otherwise.
        rival: the method whose steps the targets compare with.
        targets: largest ratio of steps, by network.
        packages: distributions whose versions are stored, by their name there.
    """
    name = Path(file).stem
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank")
    parser.add_argument("--flow", default="300mbit", help="of the capped network")
    parser.add_argument("--cases", nargs="*", default=list(targets), choices=targets)
    parser.add_argument("--name", default=name, help="of the result file")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        bench(options)
        return
    store(
        options.name,
        {
            "what": f"{LAYERS} dense layers of {WIDTH} x {WIDTH} float32 values, "
            f"{HOSTS} lab hosts, 1 Gbit/s links, {options.flow} per flow if capped, "
            f"{options.batch} samples a rank",
            **{name: version(package) for name, package in packages.items()},
            "reach": {
                f"{case}.stretto_over.{rival}": f"at most {targets[case]}"
                for case in options.cases
            },
            **{case: _measured(file, case, options) for case in options.cases},
        },
    )


def _measured(file: str, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks on a network and return what they measured."""
    flow = parse_rate_bytes_per_s(options.flow) if case == "capped" else None
    spec = LabSpec(
        hosts=HOSTS,
        link_bytes_per_s=parse_rate_bytes_per_s("1gbit"),
        flow_bytes_per_s=flow,
    )
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [sys.executable, str(Path(file).resolve()), "--out", str(out)]
        for option in ("rounds", "steps", "batch"):
            command += [f"--{option}", str(getattr(options, option))]
        status = run_lab(spec, command, timeout_s=1800)
        if status:
            sys.exit(status)
        found: dict[str, Any] = json.loads(out.read_text())
    seconds, cpu = found.pop("seconds"), found.pop("cpu")
    return {
        **found,
        "cpu_s": {name: spread(values) for name, values in cpu.items()},
        "step_s": {name: spread(values) for name, values in seconds.items()},
        "stretto_over": {
            name: spread(
                [a / b for a, b in zip(seconds["stretto"], values, strict=True)]
            )
            for name, values in seconds.items()
            if name != "stretto"
        },
    }
