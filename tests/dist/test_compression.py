"""Narrow types on the wire against closed forms, float32 and PyTorch's PowerSGD."""

from __future__ import annotations

import functools
import gc
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

import stretto
from stretto.errors import SpecError
from stretto.runtime import DistributedDataParallel
from stretto.schema import (
    Bucket,
    Link,
    Plan,
)
from support.instances import one_link, workload_of_model
from support.nets import Given, mlp
from support.plans import plan_in_turn, plan_of_buckets, reversed_names

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TorchDDP = nn.parallel.DistributedDataParallel


def given_plan(ranks: int, buckets: int, wire: str | list[str], **how: Any) -> Plan:
    """One bucket a tensor, the last tensor first."""
    wires = [wire] * buckets if isinstance(wire, str) else wire
    lanes = how.get("lanes", 1)
    return plan_of_buckets(
        (
            Bucket(
                tensors=(f"w.{buckets - 1 - i}",),
                lane=i % lanes,
                slices=how.get("slices", 1),
                wire_dtype=wires[i],
            )
            for i in range(buckets)
        ),
        ranks=ranks,
        lanes=lanes,
        overlap=how.get("overlap", "backward"),
    )


def noise(rank: int, step: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(size, generator=generator, dtype=torch.float64)


SIZES = (1, 5, 257, 1024)


def rank_of_narrow_buckets(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def reduced(model: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        model(gradients).backward()
        return [p.grad.clone() for p in model.parameters()]

    # Whole numbers of few bits: every rounding is exact, so results are too.
    exact = [torch.arange(n).remainder(64).float() * (rank + 1) * size for n in SIZES]
    mean = (size + 1) / 2 * size
    want = [torch.arange(n).remainder(64).float() * mean for n in SIZES]
    ways = [
        {"wire": "float16"},
        {"wire": "bfloat16", "lanes": 2},
        {"wire": "float16", "lanes": 3, "slices": 3},
        {"wire": "bfloat16", "lanes": 2, "slices": 2, "overlap": "none"},
        {"wire": ["float16", "float32", "bfloat16", "float32"], "lanes": 1},
        {"wire": ["float32", "float16", "float32", "bfloat16"], "lanes": 2},
    ]
    threads = threading.active_count()
    for way in ways:
        for feedback in (False, True):
            model = DistributedDataParallel(
                Given(*SIZES),
                plan=given_plan(size, len(SIZES), **way),
                error_feedback=feedback,
            )
            for step in range(3):
                got = reduced(model, exact)
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b), (way, feedback, step)
            with model.no_sync():
                model(exact).backward()
            model(exact).backward()
            for p, b in zip(model.parameters(), want, strict=True):
                # Sent is the mean of before and twice this rank's own.
                assert torch.allclose(p.grad, b * 3, rtol=2**-7)

    # One rounding on each way: half a unit in the last place of each gradient, and
    # one of the mean.
    units = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
    everyone = [[noise(r, 0, n).float() for n in SIZES] for r in range(size)]
    for wire, unit in units.items():
        plan = given_plan(size, len(SIZES), wire, lanes=2, slices=2)
        model = DistributedDataParallel(Given(*SIZES), plan=plan)
        for _ in range(2):
            got = reduced(model, everyone[rank])
        for i, value in enumerate(got):
            stack = torch.stack([g[i] for g in everyone]).double()
            bound = unit * 1.01 * (stack.abs().mean(0) + stack.mean(0).abs()) + 1e-7
            error = (value.double() - stack.mean(0)).abs()
            assert bool((error <= bound).all()), (wire, float((error / bound).max()))
        found[wire] = got
    # In float64 the wire may be float32.
    model = DistributedDataParallel(
        Given(300, dtype=torch.float64), plan=given_plan(size, 1, "float32")
    )
    (got64,) = reduced(model, [noise(rank, 1, 300)])
    mean64 = sum(noise(r, 1, 300) for r in range(size)) / size
    assert got64.dtype is torch.float64
    assert torch.allclose(got64, mean64, rtol=1e-6, atol=1e-7)
    assert not torch.equal(got64, mean64)
    found["float64"] = got64

    # What a float16 holds on each rank, it holds of the mean: no sum overflows, and
    # nothing small is lost to the division.
    model = DistributedDataParallel(Given(3), plan=given_plan(size, 1, "float16"))
    ends = torch.tensor([60000.0, 2.0**-24, -60000.0])
    found["ends"] = reduced(model, [ends])[0]
    assert torch.equal(found["ends"], torch.tensor([60000.0, 2.0**-24, -60000.0]))
    # Not finite stays so, also with error feedback, and leaves nothing behind.
    model = DistributedDataParallel(
        Given(4), plan=given_plan(size, 1, "float16"), error_feedback=True
    )
    bad = torch.tensor([1.0, float("inf"), float("nan"), 1e6])
    if rank:
        bad = torch.ones(4)
    got_bad = reduced(model, [bad])[0]
    assert got_bad[0] == 1
    assert got_bad[1] == float("inf")
    assert torch.isnan(got_bad[2])
    assert got_bad[3] == float("inf")
    assert torch.equal(reduced(model, [torch.ones(4)])[0], torch.ones(4))

    # Error feedback: what rounding takes comes back, so the mean over steps is exact
    # to one rounding in all, where without it the same error is made in every step.
    value = torch.full((64,), 1.0 + 2.0**-12) * (1 + rank * 2.0**-13)
    true = torch.stack(
        [torch.full((64,), 1.0 + 2.0**-12) * (1 + r * 2.0**-13) for r in range(size)]
    ).mean(0)
    drift = {}
    for feedback in (False, True):
        model = DistributedDataParallel(
            Given(64), plan=given_plan(size, 1, "float16"), error_feedback=feedback
        )
        total = torch.zeros(64)
        for _ in range(64):
            total += reduced(model, [value])[0]
        drift[feedback] = float((total / 64 - true).abs().max())
    assert drift[True] < 2.0**-15 < 2.0**-13 < drift[False], drift
    # A new plan begins without residuals: its first step is as without them.
    model.apply_plan(given_plan(size, 1, "float16", slices=2))
    assert torch.equal(reduced(model, [value])[0], torch.ones(64))

    del model
    for _ in range(100):
        gc.collect()
        if threading.active_count() <= threads:
            break
        time.sleep(0.05)
    found["threads"] = threading.active_count() - threads
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_narrow_buckets_are_exact_where_they_can_be(ranks: Any, size: int) -> None:
    found = ranks(rank_of_narrow_buckets, size)
    for other in found[1:]:
        for wire in ("float16", "bfloat16"):
            for a, b in zip(found[0][wire], other[wire], strict=True):
                assert torch.equal(a, b)
        assert torch.equal(found[0]["float64"], other["float64"])
    assert [rank["threads"] for rank in found] == [0] * size


net = partial(mlp, 24, 48, 32, 1, seed=5)


def net_plan(ranks: int, wire: str = "float32", *, lanes: int = 2, **how: Any) -> Plan:
    names = reversed_names(net())
    groups = (names[:2], names[2:4], names[4:])
    return plan_in_turn(groups, ranks=ranks, lanes=lanes, wire_dtype=wire, **how)


def losses(model: Any, rank: int, steps: int, between: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    kept = []
    for step in range(steps):
        if between is not None:
            between(step)
        x = torch.randn(16, 24, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - 2 * x[:, :1] + x[:, 1:2]).square().mean()
        loss.backward()
        optimizer.step()
        kept.append(float(loss.detach()))
    return kept


def rank_that_trains(rank: int, size: int) -> dict[str, Any]:
    exact = losses(TorchDDP(net()), rank, 60)
    found: dict[str, Any] = {}
    for wire in ("float16", "bfloat16"):
        for feedback in (False, True):
            plan = net_plan(size, wire, slices=2)
            model = DistributedDataParallel(net(), plan=plan, error_feedback=feedback)

            def again(step: int, model: Any = model, wire: str = wire) -> None:
                if step == 30:
                    model.apply_plan(net_plan(size, wire, lanes=1))

            mine = losses(model, rank, 60, again)
            found[f"{wire} {feedback}"] = max(
                abs(a - b) for a, b in zip(mine, exact, strict=True)
            )
    # Uneven inputs: a rank that has ended joins in with zeros.
    model = DistributedDataParallel(Given(40), plan=given_plan(size, 1, "float16"))
    joined = []
    with model.join():
        for _ in range(2 + rank):
            model.zero_grad()
            model([torch.ones(40)]).backward()
            joined.append(float(next(model.parameters()).grad[0]))
    found["joined"] = joined
    # GradScaler skips the step in which the scaled gradients overflow the wire.
    model = DistributedDataParallel(Given(8), plan=given_plan(size, 1, "float16"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scales = []
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model([torch.ones(8)])).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    found["scales"] = scales
    found["weight"] = float(next(model.parameters())[0].detach())
    # A plan made for a narrower type is executed.
    model = DistributedDataParallel(net())
    workload = workload_of_model(list(net().named_parameters())[::-1])
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e8)
    cluster = one_link(link, hosts=size)
    plan = stretto.plan(workload, cluster, wire_dtype="bfloat16")
    found["planned"] = sorted({bucket.wire_dtype for bucket in plan.buckets})
    model.apply_plan(plan)
    losses(model, rank, 2)
    return found


def test_training_with_narrow_buckets_follows_float32(ranks: Any) -> None:
    for rank, found in enumerate(ranks(rank_that_trains, 2)):
        for feedback in (True, False):
            assert 0 < found[f"float16 {feedback}"] < 2e-3
            assert 0 < found[f"bfloat16 {feedback}"] < 2e-2
        assert found["joined"] == [1.0, 1.0, 0.5][: 2 + rank]
        # 2**17 and 2**16 overflow float16; then the three bits left train.
        assert found["scales"] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
        assert found["weight"] == -2.0
        assert found["planned"] == ["bfloat16"]


def rank_names_a_plan_and_a_wire(rank: int, size: int) -> str:
    with pytest.raises(SpecError) as error:
        stretto.DistributedDataParallel(net(), plan="ddp", wire_dtype="float16")
    return str(error.value)


def test_a_wire_of_its_own_is_for_automatic_plans(ranks: Any) -> None:
    (message,) = ranks(rank_names_a_plan_and_a_wire, 1)
    assert "stretto plan --wire-dtype" in message


def waiting(hook: Any) -> Any:
    """A hook that ends before the next bucket begins, as an oracle for order."""

    @functools.wraps(hook)
    def run(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        future.wait()
        return future

    return run


def state_of(kind: Any) -> Any:
    return kind.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=4,
        min_compression_rate=1,
    )


def rank_of_power_sgd(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for hook in (power_sgd.powerSGD_hook,):
        plan = net_plan(size)
        ours = DistributedDataParallel(net(), plan=plan)
        state = state_of(power_sgd)
        ours.register_lane_hook(state, hook)
        mine = losses(ours, rank, 40)
        # The same buckets under PyTorch's own way of registering.
        stock = DistributedDataParallel(net(), plan=plan)
        stock.register_comm_hook(state_of(power_sgd), waiting(hook))
        theirs = losses(stock, rank, 40)
        assert mine == theirs, hook.__name__
        assert all(
            torch.equal(a, b)
            for a, b in zip(ours.parameters(), stock.parameters(), strict=True)
        )
        assert len(state.p_memory_dict) == 3
        found[hook.__name__] = mine
        # Memory of the old buckets' shapes goes with them.
        ours.apply_plan(net_plan(size, lanes=1))
        ours.apply_plan(
            plan_in_turn([[n for n, _ in net().named_parameters()]], ranks=size)
        )
        found[hook.__name__] += losses(ours, rank, 20)
        assert len(state.p_memory_dict) == 1
    # One bucket: PyTorch's DDP as it is.
    one = DistributedDataParallel(net(), plan=None)
    one.register_lane_hook(state_of(power_sgd), power_sgd.powerSGD_hook)
    ddp = TorchDDP(net())
    ddp.register_comm_hook(state_of(power_sgd), power_sgd.powerSGD_hook)
    assert losses(one, rank, 12) == losses(ddp, rank, 12)
    # A hook whose state is the group itself.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    plain = DistributedDataParallel(net(), plan=net_plan(size, lanes=3))
    plain.register_lane_hook(None, default_hooks.allreduce_hook)
    assert losses(plain, rank, 5) == losses(TorchDDP(net()), rank, 5)
    return found


def test_power_sgd_runs_over_the_plans_buckets_and_trains(ranks: Any) -> None:
    for found in ranks(rank_of_power_sgd, 2):
        for kept in found.values():
            assert sum(kept[-10:]) < 0.8 * sum(kept[:10])
