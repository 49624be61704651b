"""Training continues when ranks come and go."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import stretto.horovod.torch as hvd
from stretto.lab.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist


class _WithExtra(nn.Linear):
    """State of a module that is no parameter or buffer, of any type."""

    def __init__(self, extra: object) -> None:
        super().__init__(1, 1)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def _extra_state(rank: int, size: int) -> None:
    hvd.init()
    model = nn.Sequential(
        _WithExtra({"scale": rank}), _WithExtra(torch.full((rank + 1,), float(rank)))
    )
    state = hvd.elastic.TorchState(model)
    state.sync()
    assert model[0].extra == {"scale": 0}
    assert model[1].extra.tolist() == [0.0]
    model[0].extra = {"scale": 7}
    state.restore()
    assert model[0].extra == {"scale": 0}
    hvd.shutdown()


def _in_process(rank: int, size: int) -> None:
    hvd.init()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, float(rank))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    state = hvd.elastic.TorchState(
        model, optimizer, schedule=schedule, sampler=sampler, batch=0, seen=[]
    )
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, end: int) -> str:
        calls.append(state.batch)
        while state.batch < end:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            if state.batch == 3 and len(calls) == 1:
                # Not committed, and ranks disagree while gradients are under way.
                state.seen.append("lost")
                hvd.allreduce(torch.ones(1 + rank), name="bad")
            optimizer.step()
            sampler.record_batch(0, 1)
            state.seen.append(state.batch)
            state.batch += 1
            if state.batch == 5 and rank == 1 and len(calls) == 2:
                state.on_hosts_updated(0.0, 2)
            state.commit()
        return "done"

    assert train(state, 8) == "done"
    assert calls == [0, 3, 5]
    assert resets == [3, 5]
    assert state.seen == list(range(8))
    assert sampler.processed_num == 8 * size
    # Rank 0's weight, and as many steps as were not lost.
    assert model.weight.item() == pytest.approx(0.0 - 8 * 0.5)

    @hvd.elastic.run
    def fails(state: hvd.elastic.TorchState) -> None:
        calls.append(-1)
        raise hvd.HorovodInternalError("always")

    with pytest.raises(hvd.HorovodInternalError, match="always"):
        fails(state)
    assert calls.count(-1) == 3

    everything = list(range(7))
    sampler = hvd.elastic.ElasticSampler(everything, seed=4)
    parts = hvd.allgather_object(list(sampler))
    assert len(parts[0]) == len(sampler) == 4
    assert sorted({i for part in parts for i in part}) == everything
    first = [part[:2] for part in parts]
    sampler.record_batch(0, 2)
    sampler.reset()
    rest = hvd.allgather_object(list(sampler))
    assert sorted({i for part in [*first, *rest] for i in part}) == everything
    sampler.load_state_dict({"epoch": 1, "processed_num": 7})
    assert list(sampler) == []
    sampler.load_state_dict({"epoch": 1, "processed_num": 6})
    assert len(list(sampler)) == 1  # both ranks get the last one
    sampler.set_epoch(2)
    assert sampler.state_dict() == {"epoch": 2, "processed_num": 0}
    hvd.shutdown()


def test_training_continues_in_the_same_processes(ranks: Ranks) -> None:
    ranks(_in_process, 2, timeout_s=90)


def test_modules_extra_state_is_sent(ranks: Ranks) -> None:
    ranks(_extra_state, 2, timeout_s=60)


_STEPS = 26
_SCRIPT = """
import json, os, pathlib, signal, sys, time
import torch
import stretto.horovod.torch as hvd
folder, node = pathlib.Path(sys.argv[1]), sys.argv[2]
agent = os.getppid()
hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.step += 1
        line = json.dumps([node, hvd.size(), state.step, model.weight.item()])
        with open(folder / "log", "a") as file:
            file.write(line + chr(10))
        mark = folder / "lost"
        if node == "b" and hvd.size() == 2 and state.step >= 4 and not mark.exists():
            mark.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(1)
        state.commit()
        time.sleep(0.3)
        # The other host may need long to start: some steps are left for both.
        while mark.exists() and hvd.size() == 1 and state.step >= STEPS - 6:
            if os.getppid() != agent:
                sys.exit("the agent has ended")
            state.commit()
            time.sleep(0.3)

train(state)
""".replace("STEPS", str(_STEPS))


def _agent(folder: Path, node: str, port: int) -> subprocess.Popen[bytes]:
    # An agent that a busy machine delays by some seconds must not count as lost.
    settings = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10"
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command += [f"--rdzv-conf=is_host={int(node == 'a')},{settings}"]
    command += ["--monitor-interval=0.3", "--local-addr=127.0.0.1"]
    command += [str(folder / "script.py"), str(folder), node]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder),
        # Else an agent that stays does not tell one that comes where to meet.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / f"{node}.txt").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def _rows(folder: Path) -> list[tuple[str, int, int, float]]:
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.timeout(360)
def test_a_lost_host_and_one_that_comes_back(tmp_path: Path) -> None:
    """Two agents; one dies with its rank, and later another takes its place."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    port = free_port()
    agents = [_agent(tmp_path, "a", port), _agent(tmp_path, "b", port)]
    deadline = time.perf_counter() + 240
    try:
        came_back = False
        while agents[0].poll() is None and time.perf_counter() < deadline:
            time.sleep(0.2)
            alone = (tmp_path / "lost").exists() and _rows(tmp_path)[-1][1] == 1
            if alone and not came_back:
                came_back = True
                agents.append(_agent(tmp_path, "b", port))
        if agents[-1].poll() is None:
            agents[-1].wait(60)
        codes = [agent.poll() for agent in agents]
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    text = "".join((tmp_path / f"{n}.txt").read_text()[-3000:] for n in "ab")
    rows = _rows(tmp_path)
    assert codes[0] == 0, (rows, text)
    sizes = [size for _, size, *_ in rows]
    changes = [b for a, b in itertools.pairwise([0, *sizes]) if a != b]
    assert "2, 1, 2" in str(changes), (changes, text)
    # Each step's weight is what plain SGD has: no step was lost, none counted twice.
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    want = []
    for _ in range(_STEPS):
        weight.grad = torch.ones(1)
        sgd.step()
        want.append(weight.item())
    assert all(found == pytest.approx(want[step - 1]) for *_, step, found in rows)
    steps = [step for node, _, step, _ in rows if node == "a"]
    back = [a - b for a, b in itertools.pairwise(steps)]
    assert max(back) <= 1, steps  # what was not committed is done again
    assert steps[-1] == _STEPS
    left = list(tmp_path.glob("stretto-elastic-*/*/*.commit"))
    assert not [path for path in left if str(agents[0].pid) in path.parent.name]
