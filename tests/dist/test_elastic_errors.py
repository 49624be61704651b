"""Ranks of an elastic job end by errors of the script, not by faults around it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

SCRIPT = """
import atexit, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
import stretto

dist.init_process_group("gloo")
folder = pathlib.Path(sys.argv[1])
member = int(os.environ["STRETTO_MEMBER"])
atexit.register((folder / f"ended{member}").touch)
torch.manual_seed(0)
net = torch.nn.Linear(3, WIDTH)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = [torch.full((3,), float(i)) for i in range(12)]
run = stretto.Elastic(net, optimizer, batch="global:6")
while not (DONE):
    for batch in run.batches(data):
        with run.step():
            if member == 0 and run.steps == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if FAULT:
                raise ValueError("a fault of the script")
            run.model(batch).square().mean().backward()
            optimizer.step()
        time.sleep(0.005)
print(f"member {member} ends after step {run.steps}", flush=True)
"""


def run_job(
    folder: Path, *, width: str = "2", done: str = "False", fault: str = "False"
) -> subprocess.CompletedProcess[str]:
    """Run two ranks of which the first is killed; arguments are expressions."""
    script = folder / "train.py"
    script.write_text(
        SCRIPT.replace("WIDTH", width).replace("DONE", done).replace("FAULT", fault)
    )
    return subprocess.run(
        [
            *(sys.executable, "-m", "stretto", "run", "--elastic", "1:2"),
            *(str(script), str(folder)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )


def test_a_rank_that_would_join_with_another_model_ends_alone(tmp_path: Path) -> None:
    ended = run_job(
        tmp_path,
        width="2 if member < 2 else 4",
        done="(folder / 'ended2').exists()",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("member 1 ends after step ")
    assert "which would join it, has stretto " in ended.stderr


def test_an_error_of_all_ranks_ends_the_job(tmp_path: Path) -> None:
    ended = run_job(tmp_path, fault="run.size == 2 and run.steps >= 5")
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("ValueError: a fault of the script") == 2
    assert "the last rank that had trained ended by an error of its own" in ended.stderr


@pytest.mark.faults
def test_an_error_that_comes_again_in_a_step_is_not_met_forever(tmp_path: Path) -> None:
    ended = run_job(
        tmp_path,
        fault="run.size == 2 and run.rank and run.steps >= 5",
        done="run.history[-1].generation > 2 and (folder / 'ended4').exists()",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("ValueError: a fault of the script") == 3
    assert "3 ranks ended in their first steps" in ended.stderr
