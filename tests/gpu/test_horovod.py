"""Horovod's operations on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stretto.horovod.torch as hvd
from support.nets import mlp

DEVICE = torch.device("cuda", 0)


def rank_operates(rank: int, size: int) -> dict[str, Any]:
    torch.cuda.set_device(0)
    hvd.init()
    found: dict[str, Any] = {}
    ones = torch.full((1000,), float(rank + 1), device=DEVICE)
    total = size * (size + 1) / 2
    result = hvd.allreduce(ones, op=hvd.Sum)
    found["sum"] = bool((result == total).all()) and result.device == DEVICE
    found["average"] = bool((hvd.allreduce(ones) == total / size).all())
    handles = [
        hvd.allreduce_async(ones * i, name=f"t{i}", op=hvd.Sum) for i in range(9)
    ]
    found["many"] = all(
        bool((hvd.synchronize(h) == total * i).all()) for i, h in enumerate(handles)
    )
    found["large"] = bool(
        (hvd.allreduce(torch.ones(2**22, device=DEVICE), op=hvd.Sum) == size).all()
    )
    gathered = hvd.allgather(torch.full((rank + 1, 2), float(rank), device=DEVICE))
    found["gather"] = gathered.tolist() == [
        [float(r)] * 2 for r in range(size) for _ in range(r + 1)
    ]
    sent = (
        torch.arange(4.0, device=DEVICE) if rank == 1 else torch.zeros(4, device=DEVICE)
    )
    found["broadcast"] = hvd.broadcast(sent, 1).tolist() == [0.0, 1.0, 2.0, 3.0]
    found["alltoall"] = hvd.alltoall(
        torch.arange(float(size), device=DEVICE) + 10 * rank
    ).tolist() == [10.0 * r + rank for r in range(size)]
    scattered = hvd.reducescatter(torch.ones(2 * size, device=DEVICE), op=hvd.Sum)
    found["reducescatter"] = scattered.tolist() == [float(size)] * 2
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32):
        value = torch.full((7,), 2, dtype=dtype, device=DEVICE)
        found[f"{dtype}"] = bool((hvd.allreduce(value, op=hvd.Sum) == 2 * size).all())
    found.update(late_values(rank, size))
    return found


def late_values(rank: int, size: int) -> dict[str, bool]:
    """Operations on values that are written long after the call, and read at once."""
    total = size * (size + 1) / 2
    room = torch.empty(2**18, 2, device=DEVICE)
    operations = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum) == total,
        "allreduce_": lambda x: hvd.allreduce_(x, op=hvd.Sum) == total,
        "not contiguous": lambda x: (
            hvd.allreduce_(room[:, 0].copy_(x), op=hvd.Sum) == total
        ),
        "large": lambda x: hvd.allreduce(x.repeat(40), op=hvd.Sum) == total,
        "broadcast": lambda x: hvd.broadcast(x, 1) == 2,
        "allgather": lambda x: (
            hvd.allgather(x).view(size, -1)
            == torch.arange(1.0, size + 1, device=DEVICE)[:, None]
        ),
        "alltoall": lambda x: (
            hvd.alltoall(x).view(size, -1)
            == torch.arange(1.0, size + 1, device=DEVICE)[:, None]
        ),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum) == total,
    }
    found = {}
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        for name, operation in operations.items():
            with torch.cuda.stream(stream):
                right = []
                for _ in range(4):
                    values = torch.full((2**18,), -1.0, device=DEVICE)
                    torch.cuda._sleep(10_000_000)
                    values.fill_(rank + 1)
                    right.append(operation(values).all())
                    values.fill_(-7.0)  # its memory is used again at once
                    del values
                found[f"late {name}, {stream.cuda_stream != 0}"] = bool(
                    torch.stack(right).all()
                )
    return found


def rank_optimizes(rank: int, size: int) -> float:
    torch.cuda.set_device(0)
    hvd.init()

    def data(who: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + who)
        return torch.randn(8, 16, generator=generator, dtype=torch.float64).to(DEVICE)

    def net() -> nn.Module:
        return mlp(16, 64, 64, 2, seed=3).double().to(DEVICE)

    one, model = net(), net()
    alone = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    for step in range(20):
        optimizer.zero_grad()
        model(data(rank, step)).square().mean().backward()
        optimizer.step()
        alone.zero_grad()
        for who in range(size):
            (one(data(who, step)).square().mean() / size).backward()
        alone.step()
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(model.parameters(), one.parameters(), strict=True)
    )


@pytest.mark.parametrize("group", ["nccl", "gloo"])
def test_operations_on_a_device(gpu_ranks: Any, group: str) -> None:
    for found in gpu_ranks(rank_operates, 2, group=group, timeout_s=60):
        assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize("group", ["nccl", "gloo"])
def test_an_optimizer_on_a_device_trains_as_one_process(
    gpu_ranks: Any, group: str
) -> None:
    assert max(gpu_ranks(rank_optimizes, 2, group=group)) < 1e-12
