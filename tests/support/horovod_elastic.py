"""A Horovod script that loses ranks, and the same memberships in one process."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SAMPLES, BATCH, AFTER = 205, 8, 4

SCRIPT = f"""
import faulthandler, json, os, signal, sys, time
import torch
import stretto.horovod.torch as hvd

faulthandler.enable()
folder, joins, min_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
member = int(os.environ["STRETTO_MEMBER"])
hvd.init()
first = [hvd.rank(), hvd.size()]
torch.manual_seed(member)  # rank 0's parameters are those of all
net = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.SiLU(), torch.nn.Linear(64, 5)
).double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(net.parameters(), lr=1e-3), net.named_parameters()
)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn({SAMPLES}, 16, generator=generator).double()
targets = torch.arange({SAMPLES}) % 5
sampler = hvd.elastic.ElasticSampler(inputs)
state = hvd.elastic.TorchState(
    net, optimizer, sampler=sampler, step=0, size=0, joined=0, joined_at=0, sizes=[]
)
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
log = open(os.path.join(folder, f"{{member}}.jsonl"), "a", buffering=1)

def die(_):
    is_first = member == 0 and state.step == 3
    is_next = member == 2 and state.joined and state.step == state.joined_at + 2
    if joins and (is_first or is_next):
        os.kill(os.getpid(), signal.SIGKILL)

net[2].weight.register_post_accumulate_grad_hook(die)

@hvd.elastic.run
def train(state):
    if state.size and hvd.size() > state.size:
        state.joined, state.joined_at = state.joined + 1, state.step
    if hvd.size() != state.size:
        state.sizes = [*state.sizes, [state.step, hvd.size()]]
        state.size = hvd.size()
    while True:
        mine, base = list(sampler), [sampler.epoch, sampler.processed_num]
        for number, at in enumerate(range(0, len(mine), {BATCH})):
            batch = mine[at : at + {BATCH}]
            loss = torch.nn.functional.cross_entropy(net(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()  # not before the backward of a lost step
            sampler.record_batch(number, len(batch))
            total = sum(p.detach().abs().sum().item() for p in net.parameters())
            row = dict(
                step=state.step, rank=hvd.rank(), size=hvd.size(), batch=batch,
                base=base, number=number, loss=loss.item(), total=total,
                at=time.time(), local=[hvd.local_rank(), hvd.local_size()],
                resets=list(resets), process=os.getpid(), first=first,
            )
            print(json.dumps(row), file=log)
            state.step += 1
            state.commit()
            if (
                state.joined >= joins
                and state.step >= max(min_steps, state.joined_at + {AFTER})
            ):
                return
            time.sleep(0.01)
        sampler.set_epoch(sampler.epoch + 1)
        state.commit()

train(state)
end = dict(sizes=state.sizes, parameters=[p.tolist() for p in net.parameters()])
print(json.dumps(end), file=log)
"""


class Job:
    """What a job's members have recorded, by id; rows by step, ends without."""

    def __init__(self, folder: Path) -> None:
        self.rows: dict[int, list[Any]] = {}
        self.ends: dict[int, Any] = {}
        for path in folder.glob("*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            # A rank may be killed while it writes.
            read = [json.loads(line) for line in lines if line.endswith("\n")]
            self.rows[int(path.stem)] = [row for row in read if "step" in row]
            self.ends |= {int(path.stem): row for row in read if "step" not in row}

    def steps(self) -> list[list[Any]]:
        """Return each step's rows, by rank, of the membership that ran it last."""
        found = []
        rows = [row for rows in self.rows.values() for row in rows]
        for step in range(max(row["step"] for row in rows) + 1):
            tried = [row for row in rows if row["step"] == step]
            last = max(tried, key=lambda row: row["at"])
            same = [r for r in tried if (r["size"], r["total"]) == _key(last)]
            by_rank = {row["rank"]: row for row in sorted(same, key=lambda r: r["at"])}
            for rank in set(range(last["size"])) - by_rank.keys():  # killed meanwhile
                by_rank[rank] = {"batch": _batch(last, rank), "loss": None}
            found.append([by_rank[rank] for rank in range(last["size"])])
        return found


def _key(row: Any) -> tuple[int, float]:
    return row["size"], row["total"]


def _batch(row: Any, rank: int) -> list[int]:
    """Return another rank's samples of a step, by the documented division."""
    epoch, done = row["base"]
    order = list(range(SAMPLES))
    random.Random(epoch).shuffle(order)
    rest, size = order[done:], row["size"]
    total = math.ceil(len(rest) / size) * size
    mine = list(itertools.islice(itertools.cycle(rest), rank, total, size))
    return mine[row["number"] * BATCH : (row["number"] + 1) * BATCH]


def require_replay(job: Job) -> None:
    """Require that each step is what one process computes, and each sample trained."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 5)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 16, generator=generator).double()
    targets = torch.arange(SAMPLES) % 5
    seen: list[int] = []
    for rows in job.steps():
        sums = [torch.zeros_like(p) for p in net.parameters()]
        for row in rows:
            optimizer.zero_grad()
            loss = cross_entropy(net(inputs[row["batch"]]), targets[row["batch"]])
            loss.backward()
            for total, parameter in zip(sums, net.parameters(), strict=True):
                total += parameter.grad / len(rows)
            assert row["loss"] in (None, pytest.approx(loss.item(), abs=1e-9))
        for total, parameter in zip(sums, net.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
        seen += _once([row["batch"] for row in rows], len(seen))
    parameters = [end["parameters"] for end in job.ends.values()]
    assert all(one == parameters[0] for one in parameters)
    for found, wanted in zip(parameters[0], net.parameters(), strict=True):
        torch.testing.assert_close(
            torch.tensor(found).double(), wanted.detach(), atol=1e-7, rtol=0
        )
    for at in range(0, len(seen) - SAMPLES + 1, SAMPLES):
        assert sorted(seen[at : at + SAMPLES]) == list(range(SAMPLES))


def _once(batches: Sequence[list[int]], done: int) -> list[int]:
    """Return a step's samples, without those that fill up the end of an epoch."""
    together = [i for rows in zip(*batches, strict=True) for i in rows]
    return together[: SAMPLES - done % SAMPLES]
