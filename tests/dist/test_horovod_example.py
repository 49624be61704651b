"""A script for Horovod whose import line was changed, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

_SCRIPT = Path(__file__).parents[2] / "examples" / "horovod_mnist.py"


def test_the_example_trains_on_two_ranks() -> None:
    command = [sys.executable, "-m", "stretto", "run", "--nproc-per-node", "2"]
    command += [str(_SCRIPT), "--epochs", "4", "--batches-per-allreduce", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--fp16-allreduce"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 4, done.stdout  # rank 0 alone prints
    assert losses[-1] < losses[0]
