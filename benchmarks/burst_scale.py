"""Weak, strong, batch-optimal and burst scaling up to thousands of GPUs, and the time.

    .venv/bin/python benchmarks/burst_scale.py [--most 4096] [--runs 3] [--page HTML]

VGG-11 as DeepPool's section 2 has it: 256 samples on one GPU, profile by roofline on an
A100, its published network and three slower ones. The curve of samples to the target is
the critical-batch form (McCandlish et al., 2018); its critical batch is an assumption,
so it is varied. Stores results/burst_scale.json with machine and versions.
"""

from __future__ import annotations

import argparse
import time

from _record import spread, store
from stretto._api import burst
from stretto.report.burst import save_scaling
from stretto.schema.efficiency import SampleEfficiency
from stretto.zoo import layer_profile

CRITICAL = (1024, 8192)
GBIT_PER_S = (10, 100, 1000, None)
"""``None``: the published constants."""


def speedups(rows):
    return {
        row.gpus: {
            name: None
            if way is None
            else {"speedup": round(way.speedup, 3), "batch": way.batch}
            for name, way in row.ways.items()
        }
        for row in rows
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--page")
    given = parser.parse_args()
    profile = layer_profile("vgg11", samples=tuple(2**i for i in range(9)))
    gpus = [2**i for i in range(given.most.bit_length()) if 2**i <= given.most]
    found, times = {}, []
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
            network = "published" if gbit is None else f"{gbit} Gbit/s"
            found[f"{curve.name}, {network}"] = speedups(rows)
            if given.page and gbit is None and critical == CRITICAL[-1]:
                shown = [
                    {
                        "gpus": row.gpus,
                        "ways": {
                            name: None
                            if way is None
                            else {
                                "batch": way.batch,
                                "iteration_s": way.iteration_s,
                                "speedup": way.speedup,
                            }
                            for name, way in row.ways.items()
                        },
                    }
                    for row in rows
                ]
                save_scaling(
                    given.page,
                    profile=profile,
                    curve=curve,
                    rows=shown,
                    network="DeepPool's constants",
                )
    store("burst_scale", {"seconds": spread(times), "scaling": found})


if __name__ == "__main__":
    main()
