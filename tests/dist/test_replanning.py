"""Another plan between two steps."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.runtime import DistributedDataParallel, Recorder
from stretto.testing.soak import random_plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

TorchDDP = nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, 40),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        nn.Linear(40, 30),
        nn.ReLU(),
        nn.Linear(30, 4),
    )


def losses(
    model: Any, rank: int, steps: int, *, every: int = 0, ranks: int = 2, keep: bool
) -> list[float]:
    rng = random.Random(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(steps):
        if every and step % every == 0:
            plan = random_plan(model.module, ranks, rng)
            model.apply_plan(None if step % 7 == 6 else plan)
        optimizer.zero_grad(set_to_none=not keep)
        x = torch.randn(16, 12, generator=generator)
        with model.no_sync():
            model(x * 2).square().mean().backward()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def rank_replans(rank: int, size: int) -> dict[str, bool]:
    found = {}
    for settings in (
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ):
        for keep in (False, True):
            expected = losses(TorchDDP(net(), **settings), rank, 30, keep=keep)
            model = DistributedDataParallel(net(), **settings)
            got = losses(model, rank, 30, every=3, ranks=size, keep=keep)
            found[f"{settings} {keep}"] = got == expected
    return found


@pytest.mark.filterwarnings("ignore")
def test_replanning_every_few_steps_changes_no_loss(ranks: Any) -> None:
    for found in ranks(rank_replans, 2):
        assert [k for k, equal in found.items() if not equal] == []


def rank_keeps_gradients(rank: int, size: int) -> bool:
    """Gradients that wait for a step survive a plan that comes in between."""
    ok = True
    for view in (False, True):
        model = DistributedDataParallel(net(), gradient_as_bucket_view=view)
        rng = random.Random(3)
        model(torch.randn(8, 12)).sum().backward()
        before = [p.grad.clone() for p in model.parameters()]
        model.apply_plan(random_plan(model.module, size, rng))
        now = [p.grad for p in model.parameters()]
        ok &= all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    return ok


def test_gradients_survive_a_new_plan(ranks: Any) -> None:
    assert ranks(rank_keeps_gradients, 2) == [True, True]


def _sockets() -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")  # noqa: PTH115
        except OSError:
            continue
    return count


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def rank_counts(rank: int, size: int) -> dict[str, Any]:
    model = DistributedDataParallel(net())
    rng = random.Random(9)
    plans = [random_plan(model.module, size, rng) for _ in range(10)]
    marks = []
    fired = []
    for step in range(100):
        model.apply_plan(plans[step % 10] if step % 11 else None)
        for parameter in model.parameters():
            parameter.grad = None
        model(torch.randn(8, 12)).sum().backward()
        if step % 10 == 9:
            gc.collect()
            marks.append((_sockets(), _threads(), _resident_bytes()))
    # Hooks of the old Reducers are gone: a parameter's gradient counts once.
    x = torch.ones(4, 12)
    model.eval()
    model.zero_grad()
    model(x).sum().backward()
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    alone(x).sum().backward()
    fired = [
        torch.allclose(a.grad, b.grad)
        for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    reducer = weakref.ref(model)
    del model
    gc.collect()
    return {
        "marks": marks,
        "once": all(fired),
        "freed": reducer() is None,
        "after": (_sockets(), _threads()),
        "python threads": threading.active_count(),
    }


def test_a_hundred_plans_leave_nothing_behind(ranks: Any) -> None:
    for found in ranks(rank_counts, 2):
        sockets = [m[0] for m in found["marks"]]
        threads = [m[1] for m in found["marks"]]
        resident = [m[2] for m in found["marks"]]
        # Lanes open as plans first need them, then stay.
        assert sockets[-1] == sockets[2]
        assert threads[-1] == threads[2]
        assert resident[-1] - resident[2] < 4 * 2**20
        assert found["once"]
        assert found["freed"]
        assert found["after"][0] < sockets[-1]
        assert found["after"][1] < threads[-1]


def rank_drops_lanes(rank: int, size: int) -> dict[str, list[int]]:
    """Threads before a tuned model and after it, without a collection of garbage."""
    os.environ["STRETTO_TUNE_SCHEDULE"] = "forced"
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    found = {}
    for steps in (1, 3, 5, 12, 20):
        gc.collect()
        gc.disable()
        before = _threads()
        model = stretto.DDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        for _ in range(steps):
            model(torch.ones(2, 3)).sum().backward()
        del model
        deadline = time.monotonic() + 10.0
        while _threads() > before and time.monotonic() < deadline:
            time.sleep(0.05)
        found[f"{steps} steps"] = [before, _threads()]
        gc.enable()
    return found


def test_a_dropped_model_ends_its_lanes_at_once(ranks: Any) -> None:
    for found in ranks(rank_drops_lanes, 2):
        assert all(after <= before for before, after in found.values()), found


def rank_drops_models(rank: int, size: int) -> dict[str, bool]:
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2))  # imports what leaves cycles
    found = {}
    for name, plan in (("none", None), ("ddp", "ddp"), ("auto", "auto")):
        for fails in (False, True):
            model = stretto.DDP(nn.Linear(3, 3), plan=plan)
            gc.collect()
            gc.disable()
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
            if fails:
                with contextlib.suppress(RuntimeError):
                    model(torch.ones(2, 4))
            reference = weakref.ref(model)
            del model
            found[f"{name}, {'error' if fails else 'no error'}"] = reference() is None
            gc.enable()
    return found


def test_a_dropped_model_is_freed_at_once(ranks: Any) -> None:
    """Its Reducer's hooks would reduce gradients of whatever wraps the module next."""
    for found in ranks(rank_drops_models, 2):
        assert all(found.values()), found


def rank_uses_a_hook(rank: int, size: int) -> dict[str, Any]:
    import logging

    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("stretto.runtime").addHandler(Keep())
    rng = random.Random(11)
    module = net()
    plan = random_plan(module, size, rng)
    model = DistributedDataParallel(module, plan=plan)
    names = {id(p): n for n, p in module.named_parameters()}
    seen: list[tuple[str, ...]] = []

    def hook(_state, bucket):
        seen.append(tuple(names[id(p)] for p in bucket.parameters()))
        return (
            dist.all_reduce(bucket.buffer().div_(size), async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        )

    model.register_comm_hook(None, hook)
    expected = TorchDDP(net())
    same = True
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(rank))
    wanted = [tuple(b.tensors) for b in plan.buckets]
    rounds = []
    for _ in range(3):
        seen.clear()
        model.zero_grad()
        expected.zero_grad()
        model(x).sum().backward()
        expected(x).sum().backward()
        same &= all(
            torch.equal(a.grad, b.grad)
            for a, b in zip(model.parameters(), expected.parameters(), strict=True)
        )
        rounds.append(list(seen))
    # The hook stays when the plan changes.
    plan = random_plan(module, size, rng)
    model.apply_plan(plan)
    seen.clear()
    model(x).sum().backward()
    return {
        "same": same,
        "buckets": all(r == wanted for r in rounds),
        "after": seen == [tuple(b.tensors) for b in plan.buckets],
        "lines": [r for r in records if "takes over" in r],
    }


def test_a_users_hook_takes_over_and_the_plans_buckets_stay(ranks: Any) -> None:
    for rank, found in enumerate(ranks(rank_uses_a_hook, 2)):
        assert found["same"]
        assert found["buckets"]
        assert found["after"]
        assert len(found["lines"]) == (1 if rank == 0 else 0)


def rank_is_a_ddp(rank: int, size: int) -> dict[str, bool]:
    rng = random.Random(2)
    module = net()
    plan = random_plan(module, size, rng)
    model = DistributedDataParallel(module, plan=plan)
    stock = TorchDDP(net())
    found = {"isinstance": isinstance(model, TorchDDP)}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    stock.load_state_dict(model.state_dict())
    model.load_state_dict(stock.state_dict())
    found["state"] = list(stock.state_dict()) == list(model.state_dict())
    found["values"] = all(
        torch.equal(a, b)
        for a, b in zip(
            stock.state_dict().values(), model.state_dict().values(), strict=True
        )
    )
    model(torch.randn(8, 12)).sum().backward()
    order = model.ready_order()
    names = sorted(n for n, _ in module.named_parameters())
    # A rank alone reduces nothing, so no Reducer watches its gradients.
    found["all ready"] = sorted(order) == (names if size > 1 else [])
    found["order"] = not order or order[0].startswith("5.")
    found["table"] = [tuple(row) for row in model.tensor_table()] == [
        (n, p.numel() * 4, "float32") for n, p in module.named_parameters()
    ]
    copied = copy.deepcopy(model)
    copied(torch.randn(8, 12)).sum().backward()
    found["copy"] = copied.plan == plan
    copied(torch.randn(8, 12)).sum().backward()
    # A rank alone reduces nothing, by no plan.
    found["copy executes"] = size == 1 or [
        r.tensors for r in copied._planned.schedules
    ] == [b.tensors for b in plan.buckets]
    with model.join():
        for _ in range(3 + rank):
            model(torch.randn(8, 12)).sum().backward()
    found["join"] = True
    return found


@pytest.mark.filterwarnings("ignore")
def test_it_is_a_ddp_in_every_respect_a_user_sees(ranks: Any) -> None:
    for size in (1, 2):
        for found in ranks(rank_is_a_ddp, size):
            assert [k for k, ok in found.items() if not ok] == []


def rank_records(rank: int, size: int) -> dict[str, Any]:
    rng = random.Random(4)
    module = net()
    recorder = Recorder()
    model = DistributedDataParallel(module, record=recorder)
    model(torch.randn(8, 12)).sum().backward()
    stock = recorder.timeline
    plan = random_plan(module, size, rng)
    model.apply_plan(plan)
    for _ in range(3):
        model(torch.randn(8, 12)).sum().backward()
    timeline = recorder.timeline
    kept = len(recorder.timelines)
    ready = recorder.ready_s
    model.observe(None)
    model(torch.randn(8, 12)).sum().backward()
    assert stock is not None
    assert timeline is not None
    return {
        "stock": [s.args["kind"] for s in stock.spans],
        "spans": [(s.track, s.args, s.start_s, s.end_s) for s in timeline.spans],
        "kept": kept,
        "after": len(recorder.timelines),
        "ready": ready,
        "plan": [(b.tensors, b.slices) for b in plan.buckets],
        "lanes": plan.lanes,
    }


def test_a_recorded_step_has_every_slice_in_order_on_its_lane(ranks: Any) -> None:
    for found in ranks(rank_records, 2):
        assert found["stock"] == ["forward", "backward"]
        assert found["kept"] == found["after"] == 4
        assert len(found["ready"]) == 8
        sends = [s for s in found["spans"] if s[1]["kind"] == "send"]
        assert {s[1]["bucket"] for s in sends} == set(range(len(found["plan"])))
        for index, (tensors, slices) in enumerate(found["plan"]):
            mine = [s for s in sends if s[1]["bucket"] == index]
            assert 1 <= len(mine) <= slices
            assert all(s[1]["tensors"] == len(tensors) for s in mine)
        for lane in range(found["lanes"]):
            track = [s for s in sends if s[0] == f"lane{lane}"]
            for earlier, later in itertools.pairwise(track):
                assert later[2] >= earlier[3]
        assert all(0 <= s[2] <= s[3] for s in found["spans"])
