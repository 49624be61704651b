"""`stretto.compression`'s hooks against DDP, closed forms and PyTorch's own hook."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

from stretto.compression import PowerSGD, TopK, power_sgd, power_sgd_hook, top_k_hook
from stretto.errors import StrettoError
from stretto.runtime import DistributedDataParallel
from support.nets import Given, mlp
from support.plans import plan_in_turn, reversed_names

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TorchDDP = nn.parallel.DistributedDataParallel

net = partial(mlp, 24, 48, 32, 1, seed=5)


def net_plan(size: int, *cuts: int) -> Any:
    """Buckets that end at these tensors, on two lanes."""
    names = reversed_names(net())
    ends = (0, *cuts, len(names))
    groups = [names[a:b] for a, b in pairwise(ends)]
    return plan_in_turn(groups, ranks=size, lanes=2)


def trained(model: Any, rank: int, steps: int, first: int = 0) -> list[torch.Tensor]:
    """Train, and return the last gradients and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(first, first + steps):
        draws = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 24, generator=draws)
        optimizer.zero_grad()
        (model(x) - 2 * x[:, :1] + x[:, 1:2]).square().mean().backward()
        optimizer.step()
    parameters = list(model.module.parameters())
    return [p.grad.clone() for p in parameters] + [p.detach() for p in parameters]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def top_k_model(plan: Any, ratio: float) -> tuple[Any, TopK]:
    model, state = DistributedDataParallel(net(), plan=plan), TopK(ratio)
    model.register_lane_hook(state, top_k_hook)
    return model, state


def reduced(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    model(rows).backward()
    return [p.grad.clone() for p in model.module.parameters() if p.grad is not None]


def rank_of_top_k(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # The whole gradient is DDP's.
    ddp = trained(TorchDDP(net()), rank, 4)
    whole = trained(top_k_model(net_plan(size, 2, 4), 1.0)[0], rank, 4)
    found["as DDP"] = equal(whole, ddp)
    found["near DDP"] = max(
        float((a - b).norm() / b.norm()) for a, b in zip(whole, ddp, strict=True)
    )

    # One choice whatever the buckets: two plans, a change of plan, PyTorch's class.
    found["values"] = trained(top_k_model(net_plan(size, 2, 4), 0.1)[0], rank, 6)
    other, state = top_k_model(net_plan(size, 3), 0.1)
    half = trained(other, rank, 3)
    saved, kept = state.state_dict(other), other.module.state_dict()
    kept = {name: value.clone() for name, value in kept.items()}
    other.apply_plan(net_plan(size, 1, 2))
    found["another plan"] = equal(trained(other, rank, 3, 3), found["values"])
    assert not equal(half, found["values"])
    stock = TorchDDP(net(), bucket_cap_mb=0.004)
    stock.register_comm_hook(TopK(0.1), top_k_hook)
    found["PyTorch's class"] = equal(trained(stock, rank, 6), found["values"])

    # A job that resumes.
    again, fresh = top_k_model(net_plan(size, 2), 0.1)
    again.module.load_state_dict(kept)
    fresh.load_state_dict(again, saved)
    found["resumed"] = equal(trained(again, rank, 3, 3), found["values"])

    # Received and residuals are the sum of all gradients: whole numbers, exact.
    sizes = (50, 1, 333)
    model, state = DistributedDataParallel(Given(*sizes)), TopK(0.02)
    model.register_lane_hook(state, top_k_hook)
    draws = torch.Generator().manual_seed(rank)
    mine = [torch.zeros(n) for n in sizes]
    received = [torch.zeros(n) for n in sizes]
    for step in range(6):
        rows = [torch.randint(-8, 9, (n,), generator=draws) * 1.0 for n in sizes]
        if step == 2:
            rows = [torch.zeros(n) for n in sizes]
        for total, row in zip(mine, rows, strict=True):
            total += row
        if step == 3:  # accumulated
            model.zero_grad()
            with model.no_sync():
                model(rows).backward()
            model(rows).backward()
            got = [p.grad for p in model.module.parameters()]
            for total, row in zip(mine, rows, strict=True):
                total += row
        else:
            got = reduced(model, rows)
        for total, row in zip(received, got, strict=True):
            total += row
    residuals = state.state_dict(model)["residuals"].values()
    found["sums"] = [
        [m, r, k] for m, r, k in zip(mine, received, residuals, strict=True)
    ]

    # NaN reaches all ranks, and the next step is free of it.
    bad = [torch.ones(n) for n in sizes]
    if rank == size - 1:
        bad[0][7] = math.nan
    got = reduced(model, bad)
    found["NaN"] = [bool(torch.isnan(row).any()) for row in got]
    found["after NaN"] = all(
        bool(torch.isfinite(row).all())
        for row in reduced(model, [torch.ones(n) for n in sizes])
    )
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_top_k_is_ddp_where_all_is_sent_and_loses_nothing(
    ranks: Any, size: int
) -> None:
    found = ranks(rank_of_top_k, size)
    for rank in found:
        assert rank["as DDP"] or size > 2
        assert rank["near DDP"] < 1e-6
        assert equal(rank["values"], found[0]["values"])
        assert rank["another plan"]
        assert rank["PyTorch's class"]
        assert rank["resumed"]
        assert rank["NaN"] == [True, False, False]
        assert rank["after NaN"]
    for rows in zip(*(rank["sums"] for rank in found), strict=True):
        given = sum(row[0] for row in rows)
        assert torch.equal(size * rows[0][1] + sum(row[2] for row in rows), given)


class Branches(nn.Module):
    """One parameter that is used at times, one that is frozen, one that is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(40))
        self.sometimes = nn.Parameter(torch.zeros(40))
        self.frozen = nn.Parameter(torch.ones(40), requires_grad=False)

    def forward(self, values: torch.Tensor, *, both: bool) -> torch.Tensor:
        total = (self.always * values * self.frozen).sum()
        return total + (self.sometimes * values).sum() if both else total


def rank_of_unused(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = TopK(0.1)
    model.register_lane_hook(state, top_k_hook)
    values = torch.arange(40.0) * (rank + 1)
    received = torch.zeros(40)
    for both in (True, False, rank == 0, True):
        model.zero_grad()
        model(values, both=both).backward()
        gradient = model.module.sometimes.grad
        if gradient is not None:
            received += gradient
    used = 4 - 1 - (rank != 0)
    found["sums"] = [
        used * values,
        received,
        state.state_dict(model)["residuals"]["sometimes"],
    ]
    found["frozen"] = model.module.frozen.grad

    # Sparse, complex and narrow gradients.
    draws = torch.Generator().manual_seed(rank)
    for name, make, given in (
        ("sparse", partial(nn.Embedding, sparse=True), torch.arange(10) + rank),
        ("complex", partial(nn.Linear, dtype=torch.complex64), torch.complex64),
        ("bfloat16", partial(nn.Linear, dtype=torch.bfloat16), torch.bfloat16),
    ):
        if isinstance(given, torch.dtype):
            given = torch.randn(5, 30, generator=draws).to(given)
        results = []
        for kind in (DistributedDataParallel, TorchDDP):
            torch.manual_seed(1)
            wrapped = kind(make(30, 4))
            if kind is DistributedDataParallel:
                wrapped.register_lane_hook(TopK(1.0), top_k_hook)
            out = wrapped(given)
            (out * out.conj()).real.float().sum().backward()
            gradient = wrapped.module.weight.grad
            results.append(gradient.to_dense() if gradient.is_sparse else gradient)
        found[name] = torch.equal(*results)

    negotiated = DistributedDataParallel(net(), order="negotiated")
    with pytest.raises(StrettoError) as error:
        negotiated.register_lane_hook(TopK(), top_k_hook)
    found["refused"] = str(error.value)
    return found


def test_top_k_with_unused_frozen_and_other_gradients(ranks: Any) -> None:
    found = ranks(rank_of_unused, 2)
    for rank in found:
        assert rank["frozen"] is None
        assert rank["sparse"]
        assert rank["complex"]
        assert rank["bfloat16"]
        assert "gradients have no buckets" in rank["refused"]
    given = sum(rank["sums"][0] for rank in found)
    kept = sum(rank["sums"][2] for rank in found)
    assert torch.equal(2 * found[0]["sums"][1] + kept, given)


def power_model(plan: Any) -> tuple[Any, PowerSGD]:
    model = DistributedDataParallel(net(), plan=plan)
    state = PowerSGD(2, start_step=3, min_compression_rate=1)
    model.register_lane_hook(state, power_sgd_hook)
    return model, state


def rank_of_power_sgd(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ours, state = power_model(net_plan(size, 2, 4))
    mine = trained(ours, rank, 8)
    found["values"] = [value.clone() for value in mine]
    theirs = DistributedDataParallel(net(), plan=net_plan(size, 2, 4))
    theirs.register_lane_hook(
        torch_hook.PowerSGDState(None, 2, 3, min_compression_rate=1),
        torch_hook.powerSGD_hook,
    )
    found["PyTorch's hook"] = equal(trained(theirs, rank, 8), mine)

    # Errors are the parameters' own with the next plan, and in a job that resumes.
    before = state.state_dict(ours)
    ours.apply_plan(net_plan(size, 1, 3))
    again, fresh = power_model(net_plan(size, 5))
    again.module.load_state_dict(ours.module.state_dict())
    fresh.load_state_dict(again, before)
    found["step"] = fresh.torch_state.iter == state.torch_state.iter == 8
    seen: list[dict[str, torch.Tensor]] = []
    for wrapped in (ours, again):
        names = {id(p): n for n, p in wrapped.module.named_parameters()}
        given: dict[str, torch.Tensor] = {}

        def noted(torch_state: Any, bucket: Any, names: Any, given: Any) -> Any:
            rows, flat = bucket.parameters(), torch_state.error_dict[bucket.index()]
            sizes = [p.numel() for p in rows]
            for p, piece in zip(rows, flat.split(sizes), strict=True):
                given[names[id(p)]] = piece.clone()
            return torch_hook.powerSGD_hook(torch_state, bucket)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                power_sgd, "powerSGD_hook", partial(noted, names=names, given=given)
            )
            trained(wrapped, rank, 1, 8)
        seen.append(given)
    found["errors"] = [
        {n: torch.equal(given[n], before["errors"][n]) for n in before["errors"]}
        for given in seen
    ]

    # NaN does not return.
    bad, _ = power_model(net_plan(size, 2))
    trained(bad, rank, 4)
    bad.zero_grad()
    (bad(torch.full((4, 24), math.nan)).sum() * (rank == 0)).backward()
    found["NaN"] = any(bool(p.grad.isnan().any()) for p in bad.module.parameters())
    trained(bad, rank, 2, 5)
    found["after NaN"] = all(
        bool(p.grad.isfinite().all()) for p in bad.module.parameters()
    )
    return found


def test_power_sgd_is_pytorchs_and_keeps_errors_by_parameter(ranks: Any) -> None:
    found = ranks(rank_of_power_sgd, 2)
    for rank in found:
        assert rank["PyTorch's hook"]
        assert equal(rank["values"], found[0]["values"])
        assert rank["step"]
        for names in rank["errors"]:
            assert len(names) == 6
            assert all(names.values())
        assert rank["NaN"]
        assert rank["after NaN"]
