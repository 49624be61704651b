"""Lanes over Gloo: resources, several pools, an end."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.runtime import DistributedDataParallel
from stretto.runtime.lanes import LanePool
from stretto.runtime.store import ranks_of
from stretto.schema import Bucket, Plan
from support.nets import mlp
from support.plans import plan_of_buckets

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TorchDDP = nn.parallel.DistributedDataParallel


def counts() -> tuple[int, ...]:
    """Threads and descriptors of this process."""
    return tuple(
        sum(1 for _ in Path(f"/proc/self/{kind}").iterdir()) for kind in ("task", "fd")
    )


def pool(serial: int) -> LanePool:
    ranks = ranks_of(torch.distributed.group.WORLD, timeout_s=20.0)
    device = torch.device("cpu")
    return LanePool(ranks, serial=serial, backend="gloo", device=device)


net = partial(mlp, 7, 33, 3, between=nn.Tanh, seed=5)


def resourceful(size: int, **more: Any) -> Plan:
    """Buckets of different resource on the same lanes; one has fewer elements."""
    buckets = (
        Bucket(tensors=("2.bias",), lane=0, resource=4, wire_dtype="float32"),
        Bucket(
            tensors=("2.weight",), lane=1, slices=2, resource=3, wire_dtype="float32"
        ),
        Bucket(tensors=("0.bias",), lane=0, wire_dtype="float32"),
        Bucket(tensors=("0.weight",), lane=0, resource=2, wire_dtype="float32"),
    )
    return plan_of_buckets(buckets, ranks=size, lanes=2, **more)


def rank_with_resources(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reference = TorchDDP(net())
    for overlap in ("backward", "none"):
        plan = resourceful(size, overlap=overlap)
        model = DistributedDataParallel(net(), plan=plan)
        for step in range(3):
            x = torch.randn(5, 7, generator=torch.Generator().manual_seed(9 * step))
            for each in (model, reference):
                each.zero_grad()
                each(x + rank).square().sum().backward()
            found[f"{overlap} {step}"] = all(
                torch.equal(p.grad, q.grad)
                if size == 2
                else torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6)
                for p, q in zip(model.parameters(), reference.parameters(), strict=True)
            )
        found[f"{overlap} pieces"] = [
            len(schedule.slices) for schedule in model._planned.schedules
        ]
        found[f"{overlap} connections"] = sorted(
            backend.options._threads for backend in set(model._planned._lanes.values())
        )
    lanes = pool(901)
    opened = lanes.open([(0, None), (0, 4), (1, None)])
    found["one backend a lane"] = opened[0, None] is opened[0, 4]
    found["own backends"] = opened[0, None] is not opened[1, None]
    found["kept"] = lanes.lane(1) is opened[1, None]
    pieces = torch.arange(8.0).chunk(4)
    for work in [opened[0, 4].allreduce([piece]) for piece in pieces]:
        work.wait()
    found["sum"] = torch.cat(pieces).tolist() == [size * v for v in range(8)]
    del opened
    lanes.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_resources_are_pieces_on_connections_and_change_no_gradient(
    ranks: Any, size: int
) -> None:
    for found in ranks(rank_with_resources, size):
        for overlap in ("backward", "none"):
            assert [found[f"{overlap} {step}"] for step in range(3)] == [True] * 3
            # Three elements in four pieces are three; two slices of three each.
            assert found[f"{overlap} pieces"] == [3, 6, 1, 2]
            assert found[f"{overlap} connections"] == [3, 4]
        assert found["one backend a lane"]
        assert found["own backends"]
        assert found["kept"]
        assert found["sum"]


def rank_opens_and_closes(rank: int, size: int) -> dict[str, Any]:
    seen = []
    for turn in range(30):
        lanes = pool(turn)
        for lane in range(3):
            lanes.lane(lane, 1 + lane).allreduce([torch.ones(64)]).wait()
        if turn % 2:
            lanes.close()
        del lanes
        if turn in (4, 29):
            time.sleep(0.5)  # threads that have ended are still being reaped
            seen.append(counts())
    return {"early": seen[0], "late": seen[1]}


def test_pools_that_were_closed_or_dropped_leave_nothing(ranks: Any) -> None:
    for found in ranks(rank_opens_and_closes, 2):
        threads, descriptors = found["late"]
        assert threads <= found["early"][0] + 1
        assert descriptors <= found["early"][1] + 2


def rank_loses_a_peer(rank: int, size: int) -> float:
    lanes = pool(1)
    opened = lanes.open([(0, 4)])[0, 4]
    opened.allreduce([torch.ones(4)]).wait()
    if rank == 1:
        time.sleep(4)  # stuck: it neither takes part nor closes a connection
        return 0.0
    work = [opened.allreduce([torch.ones(1 << 18)]) for _ in range(4)]
    begin = time.perf_counter()
    lanes.abort()
    for each in work:
        with pytest.raises(RuntimeError):
            each.wait()
    return time.perf_counter() - begin


def test_an_aborted_lane_ends_its_collectives_at_once_on_all_connections(
    ranks: Any,
) -> None:
    waited, _ = ranks(rank_loses_a_peer, 2)
    assert waited < 3  # its timeout is 20


def rank_interrupted_while_it_waits(rank: int, size: int) -> list[str]:
    """Interrupt rank 0 (Ctrl-C) while it waits in backward for rank 1."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = []
    # The first step of a plan waits in futures, later ones in the step's works.
    for steps_before in (0, 3):
        model = DistributedDataParallel(net(), plan=resourceful(size))
        for _ in range(steps_before):
            model(torch.ones(5, 7)).sum().backward()
        loss = model(torch.ones(5, 7)).sum()
        torch.distributed.barrier()
        if rank == 1:
            time.sleep(1.0)
            loss.backward()
            continue
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            loss.backward()
            found.append("nothing")
        except BaseException as exc:  # noqa: BLE001 - the type is what is tested
            found.append(type(exc).__name__)
        timer.join()
    return found


def test_an_interrupt_in_backward_is_a_keyboard_interrupt(ranks):
    first, second = ranks(rank_interrupted_while_it_waits, size=2)
    assert first == ["KeyboardInterrupt", "KeyboardInterrupt"]
    assert second == []
