"""Timeline files, and `horovod.run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import stretto.horovod
import stretto.horovod.torch as hvd

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist


def _names(path: str) -> set[str]:
    events = json.loads(Path(path).read_text())
    names = {event["name"] for event in events}
    names |= {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    return names


def _writes(rank: int, size: int, folder: str) -> None:
    os.environ["HOROVOD_TIMELINE"] = f"{folder}/first"
    os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    hvd.init()
    hvd.allreduce(torch.ones(3), name="one")
    hvd.broadcast(torch.ones(3), 0, name="two")
    time.sleep(0.3)
    wanted = {"allreduce.one", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"}
    wanted |= {"NEGOTIATE_BROADCAST", "BROADCAST", "start_time_since_epoch_in_micros"}
    if rank == 0:  # while it is being written
        assert wanted <= _names(f"{folder}/first")
    hvd.start_timeline(f"{folder}/second")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for _ in range(8):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(3), name="three")
    if rank == 0:
        names = _names(f"{folder}/second")
        assert {"allreduce.0.weight", "MEMCPY_IN_FUSION_BUFFER", "lane0"} <= names
        assert not {"allreduce.three", "CYCLE_START", "allreduce.one"} & names
        events = json.loads(Path(folder, "second").read_text())
        pids = [
            e["pid"] for e in events if e.get("args") == {"name": "allreduce.0.bias"}
        ]
        spans = [e for e in events if e["pid"] in pids and e["name"] == "ALLREDUCE"]
        assert len(spans) == 8
        with pytest.raises(ValueError, match="can't be written"):
            hvd.start_timeline(f"{folder}/nowhere/x")
    hvd.shutdown()


def test_timelines_hold_horovods_spans(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_writes, 2, str(tmp_path), timeout_s=60)
    assert not (tmp_path / "nowhere").exists()


_KILLED = """
import os, signal, sys, torch, time
import stretto.horovod.torch as hvd
hvd.init()
hvd.start_timeline(sys.argv[1])
for i in range(50):
    hvd.allreduce(torch.ones(3), name=f"x{i}")
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""

_RUN = """
import stretto.horovod, stretto.horovod.torch as hvd, torch

def train(factor, *, more=0):
    hvd.init()
    return hvd.rank(), hvd.allreduce(torch.ones(1) * factor, op=hvd.Sum).item() + more

if __name__ == "__main__":
    print(stretto.horovod.run(train, (2.0,), {"more": 1}, num_proc=2))
"""


def test_a_killed_process_leaves_valid_json_and_run_returns_by_rank(
    tmp_path: Path,
) -> None:
    path = tmp_path / "timeline"
    command = [sys.executable, "-c", _KILLED, str(path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    assert {"allreduce.x0", "allreduce.x49"} <= _names(str(path))
    script = tmp_path / "job.py"
    script.write_text(_RUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert "[(0, 5.0), (1, 5.0)]" in done.stdout, done.stderr
    for wrong, text in (
        ({"num_proc": 3, "slots": 2}, "number of slots"),
        ({"hosts": "far:2"}, "this host only"),
        ({"hostfile": "x"}, "this host only"),
        ({"use_mpi": True}, "MPI is not supported"),
    ):
        with pytest.raises(ValueError, match=text):
            stretto.horovod.run(print, **wrong)
    with pytest.raises(ValueError, match="picklable"):
        stretto.horovod.run(lambda: None)
