"""Gradients of every type against PyTorch's DDP: plans of all kinds, and tuning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import planners
from stretto.runtime import DistributedDataParallel
from stretto.schema import (
    Bucket,
    Cluster,
    Link,
    Plan,
    Workload,
)
from stretto.tune import TuneOptions
from stretto.tune.initial_profile import deferred_plan
from support.instances import one_link, workload_of_model
from support.plans import plan_of_buckets
from support.steady_network import use_steady_network

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

TorchDDP = nn.parallel.DistributedDataParallel

TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


class Net(nn.Module):
    """Layers of one type; ``mixed``: with norms in float32, as is often done."""

    def __init__(self, dtype: torch.dtype, *, mixed: bool = False) -> None:
        super().__init__()
        wide = torch.float32 if mixed else dtype
        self.first = nn.Linear(24, 48, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(48, dtype=wide))
        self.second = nn.Linear(48, 40, dtype=dtype)
        self.shift = nn.Parameter(torch.zeros(40, dtype=wide))
        self.last = nn.Linear(40, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.first.weight.dtype
        x = (self.first(x) * self.scale).to(dtype)
        x = self.second(x)
        x = (x / (1 + x.abs()) + self.shift).to(dtype)  # bounded, complex or not
        return self.last(x)


def net(kind: str) -> Net:
    torch.manual_seed(5)
    if kind == "mixed":
        return Net(torch.bfloat16, mixed=True)
    return Net(TYPES[kind])


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    inner = model.module
    dtype = inner.first.weight.dtype
    real = torch.float64 if dtype in (torch.float64, torch.complex128) else None
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 24, generator=generator, dtype=real).to(dtype)
    out = model(x)
    if out.is_complex():
        out = torch.view_as_real(out)
    return out.square().mean()


def train(
    model: Any, rank: int, steps: int, settled: list[Any] | None = None
) -> list[list[torch.Tensor]]:
    """Return each step's gradients; with `settled`, stop once something is in it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        if settled:
            break
    return seen


def differences(
    ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]], tolerance: float
) -> list[int]:
    """Return the steps whose gradients differ in type or by more than rounding."""

    def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.dtype != b.dtype:
            return True
        if not tolerance:
            return not torch.equal(a, b)
        kind = torch.complex128 if b.is_complex() else torch.float64
        scale = b.to(kind).norm().item() or 1.0
        return (a.to(kind) - b.to(kind)).norm().item() > tolerance * scale

    return [
        step
        for step, (left, right) in enumerate(zip(ours, theirs, strict=True))
        if any(differs(a, b) for a, b in zip(left, right, strict=True))
    ]


def workload_of(model: nn.Module, rng: random.Random | None = None) -> Workload:
    """A profile such as `stretto profile` takes, with made-up times."""
    rows = list(model.named_parameters())[::-1]
    if rng is not None:
        rng.shuffle(rows)
    return workload_of_model(rows)


def cluster_of(ranks: int) -> Cluster:
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e7)
    return one_link(link, hosts=1, ranks_per_host=ranks)


def random_plan(model: nn.Module, ranks: int, rng: random.Random) -> Plan:
    """Random buckets of one type each, which need not be neighbors."""
    by_type: dict[str, list[str]] = {}
    for name, p in model.named_parameters():
        by_type.setdefault(str(p.dtype).removeprefix("torch."), []).append(name)
    lanes = rng.randint(1, 3)
    buckets = []
    for dtype, names in by_type.items():
        rng.shuffle(names)
        cut = rng.randint(1, len(names))
        buckets += [
            Bucket(
                tensors=tuple(group),
                lane=rng.randrange(lanes),
                slices=rng.randint(1, 4),
                resource=rng.choice((None, 2)),
                wire_dtype=dtype,
            )
            for group in (names[:cut], names[cut:])
            if group
        ]
    rng.shuffle(buckets)
    return plan_of_buckets(
        ranks=ranks,
        overlap=rng.choice(("backward", "none")),
        lanes=lanes,
        buckets=tuple(buckets),
    )


KINDS = (*TYPES, "mixed")


def rank_trains_by_plans(rank: int, size: int, folder: str) -> list[str]:
    wrong = []
    for kind in KINDS:
        tolerance = 0.0
        if size > 2:
            low = kind in ("bfloat16", "float16", "mixed")
            tolerance = 2**-6 if low else 1e-4
        expected = train(TorchDDP(net(kind)), rank, 3)
        workload = workload_of(net(kind))
        plans = {
            name: planners.get(name).plan(workload, cluster_of(size))
            for name in ("joint", "ddp", "single")
        }
        file = Path(folder) / f"{kind}-{rank}.json"
        # Gradients became ready in another order when the profile was taken.
        shuffled = workload_of(net(kind), random.Random(kind))
        plans["shuffled"] = planners.get("ddp").plan(shuffled, cluster_of(size))
        plans["joint"].save(file)
        rng = random.Random(kind)
        plans |= {f"random {i}": random_plan(net(kind), size, rng) for i in range(2)}
        for name, plan in {"file": file, **plans}.items():
            model = stretto.DDP(net(kind), plan=plan)
            found = differences(train(model, rank, 3), expected, tolerance)
            wrong += [f"{kind}, {name}, step {step}" for step in found]
        model = DistributedDataParallel(net(kind))
        model.apply_plan(deferred_plan(model))
        found = differences(train(model, rank, 3), expected, tolerance)
        wrong += [f"{kind}, deferred, step {step}" for step in found]
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 3])
def test_plans_keep_gradients_of_every_type_as_ddp_has_them(
    ranks: Any, size: int, tmp_path: Path
) -> None:
    for wrong in ranks(rank_trains_by_plans, size, str(tmp_path), timeout_s=200):
        assert wrong == []


MAX_STEPS = 4000
"""Tuning has settled by then; steps last milliseconds."""


def rank_tunes(rank: int, size: int) -> dict[str, Any]:
    use_steady_network()
    return {kind: tuned(kind, rank) for kind in KINDS}


def tuned(kind: str, rank: int) -> dict[str, Any]:
    """Return what tuning did."""
    settled: list[Any] = []
    model = stretto.DDP(
        net(kind),
        on_settled=settled.append,
        tune=TuneOptions(steps=12, lost_ratio=100.0, watch=False, plan_cache=False),
    )
    deferred = deferred_plan(model).digest
    plans: list[str] = []
    model.register_forward_hook(
        lambda model, *_, plans=plans: plans.append(
            "" if model.plan is None else model.plan.digest
        )
    )
    ours = train(model, rank, MAX_STEPS, settled)
    expected = train(TorchDDP(net(kind)), rank, len(ours))
    return {
        "wrong": differences(ours, expected, 0.0),
        "profiled": deferred in plans,
        "tried": len(set(plans) - {deferred, ""}),
        "settled": len(settled),
        "types": sorted({t.dtype for s in settled for t in s.workload.tensors}),
    }


@pytest.mark.filterwarnings("ignore")
def test_tuning_serves_gradients_of_every_type(ranks: Any) -> None:
    for found in ranks(rank_tunes, 2, timeout_s=200):
        for kind, one in found.items():
            mixed = ["bfloat16", "float32"]
            assert one["wrong"] == [], kind
            assert one["profiled"], kind
            assert one["tried"] > 0, kind
            assert one["settled"] == 1, kind
            assert one["types"] == (mixed if kind == "mixed" else [kind])
