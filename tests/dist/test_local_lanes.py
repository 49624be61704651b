"""Local lanes in training: chosen by name, DDP's gradients, faults, ends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stretto.errors import CommTimeout, PlanMismatch, RankDisagreement, SpecError
from stretto.lab.ports import free_port
from stretto.process_identity import own_identity
from stretto.runtime import DistributedDataParallel
from stretto.runtime.backends import local_lanes
from stretto.runtime.lanes import LanePool
from stretto.runtime.store import ranks_of
from stretto.schema import Bucket, Plan
from support.nets import mlp
from support.plans import plan_in_turn, plan_of_buckets

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TorchDDP = nn.parallel.DistributedDataParallel
CPU = torch.device("cpu")


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return mlp(7, 33, 3, between=nn.Tanh, seed=5).to(dtype)


def plan_for(
    size: int, dtype: str = "float32", *, wire: str | None = None, **more: Any
) -> Plan:
    buckets = (
        Bucket(tensors=("2.bias", "2.weight"), slices=2, wire_dtype=dtype),
        Bucket(
            tensors=("0.bias", "0.weight"), lane=1, resource=2, wire_dtype=wire or dtype
        ),
    )
    return plan_of_buckets(buckets, ranks=size, lanes=2, **more)


def gradients(model: Any, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(4, 7, generator=generator)
    first = next(model.parameters())
    if first.is_complex():
        model(x.to(first.dtype)).abs().square().sum().backward()
    else:
        model(x.to(first.dtype)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


TYPES = ("float32", "float64", "bfloat16", "float16")


def rank_trains(rank: int, size: int) -> dict[str, bool]:
    found = {}
    for dtype in TYPES:
        for overlap in ("backward", "none"):
            kind = getattr(torch, dtype)
            plan = plan_for(size, dtype, overlap=overlap)
            model = DistributedDataParallel(net(kind), plan=plan, lane_backend="local")
            reference = TorchDDP(net(kind))
            for step in range(3):
                pairs = zip(
                    gradients(model, rank, step),
                    gradients(reference, rank, step),
                    strict=True,
                )
                found[f"{dtype} {overlap} {step}"] = all(
                    torch.equal(mine, theirs)
                    if size == 2
                    else torch.allclose(mine, theirs, rtol=0.02, atol=0.02)
                    for mine, theirs in pairs
                )
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_ddps(ranks: Any, size: int) -> None:
    for found in ranks(rank_trains, size):
        assert len(found) == 24
        assert [key for key, equal in found.items() if not equal] == []


def pool(serial: str, backend: str, timeout_s: float = 30.0) -> LanePool:
    ranks = ranks_of(dist.group.WORLD, timeout_s=timeout_s)
    return LanePool(ranks, serial=serial, backend=backend, device=CPU)


def rank_compares_bits(rank: int, size: int) -> list[str]:
    """Reduce the same values on both backends."""
    pools = {name: pool(f"bits/{name}", name) for name in ("gloo", "local")}
    lanes = {name: made.lane(0) for name, made in pools.items()}
    different = []
    for dtype in (*TYPES, "uint8", "int8", "int32", "int64"):
        kind = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(rank)
        # Bits of every kind: tiny and huge numbers, and infinities.
        words = torch.randint(-(2**63), 2**63 - 1, (40_000,), generator=generator)
        drawn = words.view(kind)
        if kind.is_floating_point:
            infinite = float("inf")
            drawn = drawn.nan_to_num(nan=1.5, posinf=infinite, neginf=-infinite)
        results = []
        for lane in lanes.values():
            value = drawn.clone()
            lane.allreduce([value]).wait()
            results.append(value)
        # Opposite infinities sum to NaN, which differs from itself.
        whole = [r.nan_to_num(nan=0.25) for r in results]
        if not torch.equal(*whole):
            different.append(dtype)
    for made in pools.values():
        made.close()
    return different


def test_two_ranks_get_gloos_bits(ranks: Any) -> None:
    assert ranks(rank_compares_bits, 2) == [[], []]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(20, 4, sparse=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(x))


def rank_trains_sparse(rank: int, size: int) -> list[bool]:
    groups = (("last.bias", "last.weight"), ("table.weight",))
    plan = plan_in_turn(groups, ranks=size)
    model = DistributedDataParallel(Words(), plan=plan, lane_backend="local")
    reference = TorchDDP(Words())
    equal = []
    for step in range(3):
        x = torch.tensor([rank, 3, step])
        for each in (model, reference):
            each.zero_grad()
            each(x).sum().backward()
        equal += [
            torch.equal(p.grad.to_dense(), q.grad.to_dense())
            for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        ]
    return equal


def test_sparse_gradients_are_ddps(ranks: Any) -> None:
    assert ranks(rank_trains_sparse, 2) == [[True] * 9] * 2


def rank_trains_narrow(rank: int, size: int) -> list[torch.Tensor]:
    plan = plan_for(size, wire="bfloat16")
    found = []
    for backend in ("gloo", "local"):
        model = DistributedDataParallel(net(), plan=plan, lane_backend=backend)
        for step in range(3):
            found.append(torch.cat([g.view(-1) for g in gradients(model, rank, step)]))
    return found


def test_narrow_buckets_are_those_of_gloo(ranks: Any) -> None:
    first, second = ranks(rank_trains_narrow, 2)
    for i in range(3):
        assert torch.equal(first[i], first[3 + i])  # Gloo's, local
        assert torch.equal(first[i], second[i])


def rank_chooses(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def outcome(**arguments: Any) -> tuple[str, str]:
        try:
            made = DistributedDataParallel(net(), plan=plan_for(size), **arguments)
            gradients(made, rank, 0)
        except (PlanMismatch, RankDisagreement, SpecError) as exc:
            return type(exc).__name__, str(exc)
        return made.backend, type(made._pool().lane(0)).__name__

    found["usual"] = outcome()
    found["argument"] = outcome(lane_backend="local")
    os.environ["STRETTO_LANE_BACKEND"] = "local"
    found["variable"] = outcome()
    found["argument first"] = outcome(lane_backend="gloo")
    os.environ["STRETTO_LANE_BACKEND"] = ""
    found["empty"] = outcome()
    found["different"] = outcome(lane_backend="local" if rank else None)
    found["unknown"] = outcome(lane_backend="carrier pigeons")
    return found


def test_lanes_use_the_chosen_backend(ranks: Any) -> None:
    for found in ranks(rank_chooses, 2):
        for case in ("usual", "argument first", "empty"):
            assert found[case] == ("gloo", "ProcessGroupGloo")
        for case in ("argument", "variable"):
            assert found[case] == ("local", "LocalLane")
        kind, text = found["different"]
        assert kind == "RankDisagreement"
        assert "lane_backend: rank 0 reported gloo; rank 1 reported local" in text
        kind, text = found["unknown"]
        assert kind == "SpecError"
        assert text == (
            "lane_backend must be one of 'gloo', 'nccl', 'local', 'hierarchical', got "
            "'carrier pigeons'"
        )


def rank_on_another_host(rank: int, size: int) -> tuple[str, str]:
    mine = dataclasses.replace(own_identity(), host=f"h{rank}", kernel=f"boot {rank}")
    local_lanes.own_identity = lambda: mine
    try:
        DistributedDataParallel(net(), plan=plan_for(size), lane_backend="local")
    except PlanMismatch as exc:
        return "refused", str(exc)
    return "", ""


def test_ranks_on_two_hosts_are_refused(ranks: Any) -> None:
    for kind, text in ranks(rank_on_another_host, 2):
        assert kind == "refused"
        assert "rank 0 on h0; rank 1 on h1" in text


def rank_loses_a_peer(rank: int, size: int, how: str) -> tuple[str, float]:
    model = DistributedDataParallel(
        net(), plan=plan_for(size), lane_backend="local", timeout_s=4.0
    )
    for step in range(2):
        gradients(model, rank, step)
    # Let every rank learn the others' processes.
    dist.barrier()
    if rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "", 0.0
    if how == "stops":
        time.sleep(0.5)
    began_s = time.perf_counter()
    try:
        gradients(model, rank, 2)
    except CommTimeout as exc:
        error = str(exc)
    else:
        error = ""
    with contextlib.suppress(CommTimeout):  # the same error, at once
        gradients(model, rank, 3)
        error = ""
    if how == "stops" and rank == 0:
        # Waits for all survivors: the rank must not resume before they have ended.
        time.sleep(4.0)
        os.kill(int(error.partition("process ")[2].split()[0]), signal.SIGCONT)
    return error, time.perf_counter() - began_s


def test_a_dead_rank_is_named_by_every_other(ranks: Any) -> None:
    first, _, last = ranks(rank_loses_a_peer, 3, "dies", errors=True)
    for rank, (error, took_s) in ((0, first), (2, last)):
        assert error.startswith(f"rank {rank}: the all-reduce of bucket ")
        assert "rank 1 is gone (process " in error
        assert took_s < 20.0


def test_a_stopped_rank_is_named_after_the_time_out(ranks: Any) -> None:
    first, _, last = ranks(rank_loses_a_peer, 3, "stops", errors=True)
    for rank, (error, took_s) in ((0, first), (2, last)):
        assert error.startswith(f"rank {rank}: the all-reduce of bucket ")
        assert "rank 1" in error
        assert "is stopped by a signal" in error
        assert took_s < 30.0


def rank_forks(rank: int, size: int) -> tuple[list[float], int]:
    """Fork while lanes are open, as a DataLoader does; the child ends as it likes."""
    model = DistributedDataParallel(net(), plan=plan_for(size), lane_backend="local")
    gradients(model, rank, 0)
    child = os.fork()
    if child == 0:
        model._pool().abort()
        model._pool().close()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    sums = [sum(g.sum().item() for g in gradients(model, rank, 1)) for _ in range(3)]
    return sums, os.waitstatus_to_exitcode(status)


def test_a_forked_child_does_not_disturb_lanes(ranks: Any) -> None:
    (first, status), (second, other) = ranks(rank_forks, 2)
    assert first == second
    assert (status, other) == (7, 7)


def rank_waits(rank: int, size: int) -> float:
    lanes = pool("waiting", "local")
    opened = [lanes.lane(number) for number in range(4)]
    for lane in opened:
        lane.barrier().wait()
    if rank == size - 1:
        time.sleep(3.0)
    used_s = time.process_time()
    works = [lane.allreduce([torch.ones(10)]) for lane in opened]
    for work in works:
        work.wait()
    used_s = time.process_time() - used_s
    lanes.close()
    return used_s


def test_waiting_takes_little_processor_time(ranks: Any) -> None:
    # Spinning would take three seconds on each lane.
    assert max(ranks(rank_waits, 4)) < 0.6


_SCRIPT = """
import os, sys, torch, torch.distributed as dist, stretto
from pathlib import Path
dist.init_process_group("gloo")
model = stretto.DDP(torch.nn.Linear(40, 40), plan=sys.argv[1])
for _ in range(5):
    model(torch.ones(2, 40)).sum().backward()
print("lanes on", model.backend, flush=True)
if len(sys.argv) > 2:
    raise ValueError("an error of the script")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_ends_with_its_own_status(tmp_path: Path, fails: bool) -> None:
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(_SCRIPT)
    plan_in_turn([("bias", "weight")], lanes=2, slices=2).save(plan)
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "stretto", "run", "--lane-backend", "local"]
    processes = [
        subprocess.Popen(
            [*command, str(script), str(plan), *["fail"] * fails],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == (1 if fails else 0), text
        assert "lanes on local" in text
        assert "terminate called" not in text
