"""One process that runs several scripts one after another, with the same noise.

The original scripts draw samples in the order that DistributedSampler would give one
process, and noise of a batch is drawn for the whole batch, of which each rank takes its
samples' rows; nothing else differs from how a user runs them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch.utils.data import RandomSampler

from stretto.runtime.quiesce import wait_for_workers

jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
torch.set_num_threads(1)
warnings.simplefilter("ignore")
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
randn = torch.randn


def as_divided(first_epoch):
    """RandomSampler's order as that of DistributedSampler over one process."""
    epochs = {}

    def order(self):
        epoch = epochs[id(self)] = epochs.get(id(self), first_epoch - 1) + 1
        generator = torch.Generator().manual_seed(epoch)
        yield from torch.randperm(len(self.data_source), generator=generator).tolist()

    return order


def noise_of(batch_rows):
    """torch.randn whose rows are this rank's of the batch of all ranks."""
    calls = 0

    def draw(*shape, **options):
        nonlocal calls
        if not batch_rows or shape[0] != batch_rows // size:
            return randn(*shape, **options)
        calls += 1
        generator = torch.Generator().manual_seed(1000 + calls)
        return randn(batch_rows, *shape[1:], generator=generator)[rank::size]

    return draw


found = {}

for job in jobs:
    os.environ["MASTER_PORT"] = str(job["port"])
    folder = out.parent / job["name"]  # as on a disk that all ranks share
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    RandomSampler.__iter__ = as_divided(job["first_epoch"])
    torch.randn = noise_of(job["noise_rows"])
    sys.argv = [job["path"], *job["arguments"]]
    text, error = io.StringIO(), None
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_path(job["path"], run_name="__main__")
        except BaseException:  # noqa: BLE001 - reported by the test, with the others
            error = traceback.format_exc()
    # A later collection of this script's DDP would wait for Gloo's workers with the
    # interpreter's lock, while they may wait for it (docs/known-issues-of-torch.md).
    wait_for_workers(60.0)
    found[job["name"]] = {
        "text": text.getvalue(),
        "error": error,
        "folder": str(folder),
    }
    if error is not None and size > 1:
        sys.stderr.write(f"{job['name']}: {error}")
        os._exit(1)  # the other rank may be waiting for this one
out.write_text(json.dumps(found))
