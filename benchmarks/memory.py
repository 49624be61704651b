"""Measure memory over DDP: the peak of a rank while it trains.

Two ranks, Gloo on loopback. Each variant runs in its own processes, in turn, several
times: DDP, DDP again (the noise between equal variants), a plan of DDP's own buckets on
one lane, on four lanes in four slices, and the same with a narrower type on the wire,
which keeps the rounding errors (as much as all gradients) and is not part of the
figure. The figure is the peak of resident memory after the model was built, over some
steps, less the resident memory before the wrapper was: the wrapper, its buckets, and
data in flight.

All of it is measured twice. ``held``: the C library takes every large buffer from the
system and returns it when it is freed, so that only memory in use counts. ``as it is``:
the C library keeps freed buffers for each thread that used them, and each lane has two
threads.

``--runs 2`` is the short form.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from _ranks import run
from _record import spread, store
from equal_buckets import Tower, ddp_buckets, make, plan_of
from stretto.runtime import DistributedDataParallel

LAYERS, WIDTH, CAP_MIB = 16, 1024, 16.0
STEPS = 5
VARIANTS = {
    "ddp": None,
    "ddp again": None,
    "one lane": {},
    "four lanes, four slices": {"lanes": 4, "slices": 4},
    "four lanes, float16 on the wire": {"lanes": 4, "wire_dtype": "float16"},
}
OURS = ("one lane", "four lanes, four slices")
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
MODES = {"held": "65536", "as it is": None}


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def wrapped(model: Tower, how: dict | None, size: int) -> nn.Module:
    if how is None:
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb_list=[CAP_MIB])
    groups = ddp_buckets(model, CAP_MIB)
    return DistributedDataParallel(model, plan=plan_of(model, groups, size, **how))


def measure(rank: int, size: int, how: dict | None, out: str) -> None:
    """Write the bytes of one variant in this pair of processes, a file per rank."""
    model = make(LAYERS, WIDTH)
    x = torch.randn(8, WIDTH)
    model(x).square().mean().backward()  # gradients and the libraries' own buffers
    gc.collect()
    before_bytes = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    ours = wrapped(model, how, size)
    for _ in range(STEPS):
        # Gradients stay allocated: the changes are the wrapper's.
        ours.zero_grad(set_to_none=False)
        ours(x).square().mean().backward()
    dist.barrier()
    found = {
        "peak_bytes": resident_bytes("VmHWM") - before_bytes,
        "held_bytes": resident_bytes("VmRSS") - before_bytes,
    }
    Path(f"{out}.{rank}").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--name", default="memory", help="of the result")
    options = parser.parse_args()
    model = make(LAYERS, WIDTH)
    sizes = dict(model.named_parameters())
    largest_bytes = max(
        sum(sizes[n].numel() * 4 for n in names)
        for names in ddp_buckets(model, CAP_MIB)
    )
    result = {mode: runs_of(options.runs, value) for mode, value in MODES.items()}
    store(
        options.name,
        {
            "what": "resident memory of a rank over DDP's, the worse of two ranks",
            "reach": "held: peak at most one extra bucket over DDP, median",
            "gradient_bytes": sum(p.numel() * 4 for p in sizes.values()),
            "largest_bucket_bytes": largest_bytes,
            **result,
            "met": {
                mode: all(
                    found["over_ddp"][name]["peak_bytes"]["median"] <= largest_bytes
                    for name in OURS
                )
                for mode, found in result.items()
            },
        },
    )


def runs_of(runs: int, threshold: str | None) -> dict:
    """Run each variant ``runs`` times with one setting of the C allocator."""
    os.environ.pop(THRESHOLD, None)
    if threshold is not None:
        os.environ[THRESHOLD] = threshold  # read by the ranks when they start
    found: dict[str, list[dict]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(runs):
            names = list(VARIANTS) if turn % 2 else list(VARIANTS)[::-1]
            for name in names:
                out = f"{folder}/{turn}"
                run(measure, 2, VARIANTS[name], out, timeout_s=180)
                ranks = [json.loads(Path(f"{out}.{r}").read_text()) for r in (0, 1)]
                found[name].append(
                    {key: max(row[key] for row in ranks) for key in ranks[0]}
                )
    os.environ.pop(THRESHOLD, None)
    base = {
        key: statistics.median(row[key] for row in found["ddp"])
        for key in ("peak_bytes", "held_bytes")
    }
    return {
        "ddp": {key: spread([float(row[key]) for row in found["ddp"]]) for key in base},
        "over_ddp": {
            name: {key: spread([row[key] - base[key] for row in rows]) for key in base}
            for name, rows in found.items()
        },
    }


if __name__ == "__main__":
    main()
