"""A rank that gets SIGTERM leaves between two steps, then its keeper does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from torch.nn.functional import cross_entropy

from stretto.elastic.training import Membership
from stretto.resume.manifests import manifests_in
from stretto.testing import replay_memberships

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

SAMPLES, BATCH = 205, 24
RANK_AT, KEEPER_AT = 3, 12
FAR_TOO_MANY = 1000

LATER = 2
"""A rank that is asked within a step leaves after the next one."""

MODEL = f"""
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 5)
).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
data = [
    (torch.randn(16, generator=generator).double(), i % 5) for i in range({SAMPLES})
]
"""

SCRIPT = f"""
import json, os, signal, sys
import torch.distributed as dist
import stretto
dist.init_process_group("gloo")
{MODEL}
folder = sys.argv[1]
run = stretto.Elastic(
    stretto.DistributedDataParallel(net, plan="ddp"), optimizer, batch="global:{BATCH}",
    checkpoint=folder + "/snapshots", every="1 h",
)
member, losses = int(os.environ["STRETTO_MEMBER"]), {{}}
try:
    while run.steps < {FAR_TOO_MANY}:
        for inputs, targets in run.batches(data):
            if member == 0 and run.steps == {RANK_AT}:
                os.kill(os.getpid(), signal.SIGTERM)
            if member == 1 and run.steps == {KEEPER_AT}:
                os.kill(os.getppid(), signal.SIGTERM)
            with run.step() as step:
                loss = torch.nn.functional.cross_entropy(run.model(inputs), targets)
                (loss * run.weight).backward()
                optimizer.step()
            assert step.is_committed
            losses[run.steps - 1] = loss.item()
finally:
    history = [[m.generation, m.first_step, m.ids] for m in run.history]
    record = {{"history": history, "losses": losses, "steps": run.steps}}
    with open(f"{{folder}}/{{member}}.json", "w") as file:
        json.dump(record, file)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("draining")
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "stretto", "run", "--elastic", "1:3"]
    try:
        ended = subprocess.run(
            [*command, str(folder / "train.py"), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        said = exc.stderr or b""
        pytest.fail(said.decode() if isinstance(said, bytes) else said)
    records = {int(p.stem): json.loads(p.read_text()) for p in folder.glob("*.json")}
    return {"code": ended.returncode, "said": ended.stderr, "folder": folder} | {
        "records": records
    }


def test_the_others_lose_no_step_and_start_no_rank_in_its_place(
    job: dict[str, Any],
) -> None:
    records = job["records"]
    assert records.keys() == {0, 1, 2}, job["said"]
    assert records[1]["steps"] < FAR_TOO_MANY, job["said"]
    first, second, *later = records[1]["history"]
    assert first == [1, 0, [0, 1, 2]]
    assert second[1:] == [RANK_AT + LATER, [1, 2]]
    # On a busy machine the same ranks may meet again.
    assert all(ids == [1, 2] for _, _, ids in later)
    assert records[0]["steps"] == RANK_AT + LATER


def test_all_leave_with_their_keeper_after_the_same_step(job: dict[str, Any]) -> None:
    steps = [job["records"][member]["steps"] for member in (1, 2)]
    assert steps[0] == steps[1]
    # Whether this step or the next is the last depends on when the keeper asks.
    assert steps[0] >= KEEPER_AT + 1
    assert job["code"] == 128 + 15


def test_the_last_ranks_write_a_snapshot(job: dict[str, Any]) -> None:
    newest = manifests_in(job["folder"] / "snapshots")[0]
    assert newest.step == job["records"][1]["steps"]


def test_losses_are_those_of_the_memberships_in_one_process(
    job: dict[str, Any],
) -> None:
    made: dict[str, Any] = {}
    exec(MODEL, made)
    end = job["records"][1]
    wanted = replay_memberships(
        made["net"],
        made["optimizer"],
        made["data"],
        lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
        history=[
            Membership(generation=generation, first_step=first, ids=tuple(ids))
            for generation, first, ids in end["history"]
        ],
        steps=end["steps"],
        batch=f"global:{BATCH}",
    )
    for member, record in job["records"].items():
        assert sorted(map(int, record["losses"])) == list(range(record["steps"]))
        for step, loss in record["losses"].items():
            assert loss == pytest.approx(wanted[int(step)][member], abs=1e-6)


def test_nothing_is_reported_as_lost(job: dict[str, Any]) -> None:
    assert "rank 0 leaves after step" in job["said"]
    assert "ended with" not in job["said"]
