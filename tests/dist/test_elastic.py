"""A rank is killed in backward and replaced while the others train on.

Three tasks of srun, whose variables are set here, are the keepers of one rank each.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from stretto.elastic.training import Membership
from stretto.lab.ports import free_port
from stretto.testing import replay_memberships

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, BATCH = 205, 24
KILLED_AT = 3

RELEASED_AFTER = 6
"""A membership's groups and lanes are released in fewer steps than this."""

SCRIPT = f"""
import collections, contextlib, gc, json, os, signal, sys, time
import torch
import torch.distributed as dist
import stretto

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64),
    torch.nn.BatchNorm1d(64), torch.nn.SiLU(), torch.nn.Linear(64, 5),
).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
model = stretto.DistributedDataParallel(net, plan="ddp", broadcast_buffers=False)
gc.disable()
generator = torch.Generator().manual_seed(1)
data = [
    (torch.randn(16, generator=generator).double(), i % 5) for i in range({SAMPLES})
]
run = stretto.Elastic(model, optimizer, batch="global:{BATCH}")
member = int(os.environ["STRETTO_MEMBER"])
losses = {{}}

def die(_):
    if member == 0 and run.steps == {KILLED_AT}:
        os.kill(os.getpid(), signal.SIGKILL)

net[2].weight.register_post_accumulate_grad_hook(die)
is_trained = False
while not (
    is_trained
    and 3 in run.history[-1].ids
    and run.steps >= run.history[-1].first_step + {RELEASED_AFTER}
):
    is_trained = False
    for inputs, targets in run.batches(data):
        step = run.steps
        with run.step():
            loss = torch.nn.functional.cross_entropy(run.model(inputs), targets)
            (loss * run.weight).backward()
            optimizer.step()
        if run.steps > step:
            losses[step] = loss.item()
        is_trained = True
def threads():
    found = collections.Counter()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it may end now
            found[open("/proc/self/task/" + task + "/comm").read().strip()] += 1
    return {{name: count for name, count in found.items() if "gloo" in name}}
last, equal = threads(), 0
while equal < 20:  # those of past memberships end by themselves
    time.sleep(0.1)
    now = threads()
    last, equal = now, equal + 1 if now == last else 0
record = {{
    "threads": last,
    "history": [[m.generation, m.first_step, m.ids] for m in run.history],
    "losses": losses,
    "steps": run.steps,
    "place": [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]],
    "state": [p.tolist() for p in net.parameters()],
}}
with open(os.path.join(sys.argv[1], f"{{member}}.json"), "w") as file:
    json.dump(record, file)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What each member has recorded at its end, by id."""
    folder: Path = tmp_path_factory.mktemp("elastic")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "stretto", "run", "--elastic", "2:3"]
    srun = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "3",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_TASKS_PER_NODE": "3",
        "MASTER_PORT": str(free_port()),
    }
    with contextlib.ExitStack() as stack:
        tasks = []
        for task in range(3):
            log = stack.enter_context((folder / f"task{task}.log").open("w"))
            environment = {
                **os.environ,
                **srun,
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            started = subprocess.Popen(
                [*command, str(script), str(folder)], env=environment, stderr=log
            )
            stack.callback(started.wait)
            stack.callback(started.kill)
            tasks.append(started)
        codes = [started.wait(280) for started in tasks]
    said = [path.read_text() for path in sorted(folder.glob("*.log"))]
    assert codes == [0, 0, 0], said
    return {int(p.stem): json.loads(p.read_text()) for p in folder.glob("*.json")}


pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def test_the_other_ranks_and_the_replacement_finish(job: dict[int, Any]) -> None:
    assert job.keys() == {1, 2, 3}
    first, *between, last = [row[2] for row in job[1]["history"]]
    assert (first, last) == ([0, 1, 2], [1, 2, 3])
    # On a busy machine the ranks may meet more or less often.
    assert all(ids in ([1, 2], [1, 2, 3]) for ids in between)


def test_a_rank_has_its_task_s_place_on_the_host(job: dict[int, Any]) -> None:
    assert [job[m]["place"] for m in (1, 2, 3)] == [["1", "3"], ["2", "3"], ["0", "3"]]


def test_no_step_is_lost(job: dict[int, Any]) -> None:
    (_, first, _), (_, second, _), *_ = job[1]["history"]
    assert (first, second) == (0, KILLED_AT)
    assert sorted(map(int, job[1]["losses"])) == list(range(job[1]["steps"]))


def test_all_ranks_end_with_equal_parameters(job: dict[int, Any]) -> None:
    assert job[1]["state"] == job[2]["state"] == job[3]["state"]


def test_losses_are_those_of_the_memberships_in_one_process(
    job: dict[int, Any],
) -> None:
    history, steps = job[1]["history"], job[1]["steps"]
    wanted = _replayed(history, steps)
    for member, record in job.items():
        for step, loss in record["losses"].items():
            assert loss == pytest.approx(wanted[int(step)][member], abs=1e-6)


def test_the_replacement_knows_all_memberships(job: dict[int, Any]) -> None:
    assert job[3]["history"] == job[1]["history"]


def test_past_memberships_leave_no_thread(job: dict[int, Any]) -> None:
    knew_only_the_last = job[3]["threads"]
    assert knew_only_the_last
    assert job[1]["threads"] == job[2]["threads"] == knew_only_the_last


def _replayed(history: list[Any], steps: int) -> list[dict[int, float]]:
    """Train in one process as the members did; return losses by step and member."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.SiLU(),
        torch.nn.Linear(64, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.SiLU(),
        torch.nn.Linear(64, 5),
    ).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(16, generator=generator).double(), i % 5) for i in range(SAMPLES)
    ]
    return replay_memberships(
        net,
        optimizer,
        data,
        lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
        history=[
            Membership(generation=generation, first_step=first, ids=tuple(ids))
            for generation, first, ids in history
        ],
        steps=steps,
        batch=f"global:{BATCH}",
    )
