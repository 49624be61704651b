"""Compare weak, strong, batch-optimal and burst scaling up to thousands of GPUs.

    .venv/bin/python benchmarks/burst_scale.py [--max-gpus 4096] [--runs 3]

VGG-11 as in DeepPool's section 2: 256 samples on one GPU, profile by roofline on an
A100, its published network and three slower ones. The curve of samples to the target is
the critical-batch form (McCandlish et al., 2018); its critical batch is an assumption,
so it is varied. Stores results/burst_scale.json with the time, machine and versions,
and some of the curves as results/burst_scale.svg.
"""

from __future__ import annotations

import argparse
import math
import time

from _record import RESULTS, spread, store
from stretto._api import burst
from stretto.report.burst import save_scaling
from stretto.report.curves import Chart, charts_svg
from stretto.schema.efficiency import SampleEfficiency
from stretto.zoo import layer_profile

CRITICAL = (1024, 8192)
GBIT_PER_S = (10, 100, 1000, None)
"""``None``: the published constants."""

DRAWN = ((1024, 10), (1024, 100), (8192, None))
"""Critical batch and network of the curves that are drawn."""


def speedups(rows):
    return {
        row.gpus: {
            name: None
            if point is None
            else {"speedup": round(point.speedup, 3), "batch": point.batch}
            for name, point in row.methods.items()
        }
        for row in rows
    }


def chart_of(title, rows):
    points = {name: [row.methods[name] for row in rows] for name in rows[0].methods}
    columns = {
        name: [math.nan if point is None else point.speedup for point in column]
        for name, column in points.items()
    }
    return Chart(
        title=title,
        axis="GPUs",
        unit="x",
        x=[row.gpus for row in rows],
        columns=columns,
        ends={name: f"{column[-1]:.1f}x" for name, column in columns.items()},
        wide=True,
    )


def page_of(path, profile, curve, rows, network):
    shown = [
        {
            "gpus": row.gpus,
            "ways": {
                name: None
                if point is None
                else {
                    "batch": point.batch,
                    "iteration_s": point.iteration_s,
                    "speedup": point.speedup,
                }
                for name, point in row.methods.items()
            },
        }
        for row in rows
    ]
    save_scaling(path, profile=profile, curve=curve, rows=shown, network=network)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-gpus", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--page")
    given = parser.parse_args()
    profile = layer_profile("vgg11", samples=tuple(2**i for i in range(9)))
    gpus = [2**i for i in range(given.max_gpus.bit_length()) if 2**i <= given.max_gpus]
    found, times, drawn = {}, [], {}
    for critical in CRITICAL:
        curve = SampleEfficiency(name=f"critical {critical}", critical_batch=critical)
        for gbit in GBIT_PER_S:
            rate = None if gbit is None else gbit * 1e9 / 8
            for _ in range(given.runs):
                begin_s = time.perf_counter()
                rows = burst.scale(
                    profile, curve, batch=256, gpus=gpus, bandwidth_bytes_per_s=rate
                )
                times.append(time.perf_counter() - begin_s)
            network = "published network" if gbit is None else f"{gbit} Gbit/s"
            found[f"{curve.name}, {network}"] = speedups(rows)
            if (critical, gbit) in DRAWN:
                title = f"Speed-up to the target, {network}, critical batch {critical}"
                drawn[critical, gbit] = chart_of(title, rows)
            if given.page and gbit is None and critical == CRITICAL[-1]:
                page_of(given.page, profile, curve, rows, "DeepPool's constants")
    picture = charts_svg([drawn[each] for each in DRAWN], "VGG-11 on more GPUs")
    (RESULTS / "burst_scale.svg").write_text(picture + "\n")
    store("burst_scale", {"seconds": spread(times), "scaling": found})


if __name__ == "__main__":
    main()
