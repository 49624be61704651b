"""Plans that choose each bucket's algorithm, on four ranks that count as two hosts."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stretto.errors import PlanMismatch, StrettoError
from stretto.runtime import DistributedDataParallel
from stretto.runtime.backends import hierarchical
from stretto.schema import Bucket
from support.plans import plan_of_buckets, reversed_names

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

    from stretto.schema import Plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TorchDDP = nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (8, 200, 30, 300, 8):
        layers += [nn.LazyLinear(width), nn.Tanh()]
    model = nn.Sequential(*layers)
    model(torch.zeros(1, 8))
    return model


def mixed_plan(seed: int, *, lanes: int = 2, **more: Any) -> Plan:
    """Random buckets in order, each with an algorithm of its own."""
    draw = random.Random(seed)
    names = reversed_names(net())
    buckets: list[Bucket] = []
    while names:
        taken = draw.randint(1, 3)
        buckets.append(
            Bucket(
                tensors=tuple(names[:taken]),
                lane=draw.randrange(lanes),
                slices=draw.randint(1, 3),
                algorithm=draw.choice(["ring", "hierarchical"]),
                wire_dtype="float32",
                resource=draw.choice([None, 2]),
            )
        )
        names = names[taken:]
    kinds = ["ring", "hierarchical"]
    buckets[0] = replace(buckets[0], algorithm=kinds[seed % 2])
    buckets[1] = replace(buckets[1], algorithm=kinds[1 - seed % 2])
    return plan_of_buckets(buckets, ranks=4, lanes=lanes, **more)


def step(model: Any, rank: int, number: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * rank + number)
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    module = getattr(model, "module", model)
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def _on_hosts(rank: int, hosts: str) -> None:
    hierarchical.own_host = lambda: f"host-{hosts[rank]} k n"


def rank_of_mixed_plans(rank: int, size: int, hosts: str) -> list[str]:
    _on_hosts(rank, hosts)
    wanted = TorchDDP(net())
    expected = [step(wanted, rank, number) for number in range(8)]
    plans = [mixed_plan(seed) for seed in range(3)]
    turned = tuple(range(len(plans[2].buckets) - 1, -1, -1))
    plans.append(replace(plans[2], overlap="forward", launch=turned))
    model = DistributedDataParallel(net(), plan=plans[0])
    assert model.backend == "hierarchical"
    wrong = []
    for number, plan in enumerate([*plans, plans[0], plans[1]]):
        if number:
            model.apply_plan(plan)
        for name, found in step(model, rank, number).items():
            if not torch.allclose(found, expected[number][name], rtol=1e-4, atol=1e-7):
                wrong.append(f"{number}: {name} of rank {rank}")
    return wrong


@pytest.mark.parametrize("hosts", ["aabb", "abba", "aaaa", "abcd"])
def test_gradients_are_ddp_s_within_rounding(ranks: Ranks, hosts: str) -> None:
    found = ranks(rank_of_mixed_plans, 4, hosts, timeout_s=60)
    assert found == [[]] * 4


def rank_of_rings(rank: int, size: int) -> list[str]:
    _on_hosts(rank, "aabb")
    plan = mixed_plan(5)
    rings = replace(
        plan, buckets=tuple(replace(b, algorithm="ring") for b in plan.buckets)
    )
    expected = step(DistributedDataParallel(net(), plan=rings), rank, 0)
    found = step(DistributedDataParallel(net(), plan=plan), rank, 0)
    ringed = [n for b in plan.buckets if b.algorithm == "ring" for n in b.tensors]
    assert 0 < len(ringed) < len(found)
    return [name for name in ringed if not torch.equal(found[name], expected[name])]


def test_buckets_that_name_rings_have_the_bits_of_rings(ranks: Ranks) -> None:
    assert ranks(rank_of_rings, 4, timeout_s=60) == [[]] * 4


def rank_of_narrow_buckets(rank: int, size: int) -> float:
    _on_hosts(rank, "aabb")
    plan = mixed_plan(6)
    wire = ["bfloat16", "float32"]
    narrow = tuple(
        replace(b, wire_dtype=wire[i % 2], resource=None)
        for i, b in enumerate(plan.buckets)
    )
    expected = step(TorchDDP(net()), rank, 0)
    found = step(
        DistributedDataParallel(net(), plan=replace(plan, buckets=narrow)), rank, 0
    )
    return max(
        float((found[name] - expected[name]).abs().max() / expected[name].abs().max())
        for name in found
    )


def test_narrow_buckets_may_name_algorithms(ranks: Ranks) -> None:
    found = ranks(rank_of_narrow_buckets, 4, timeout_s=60)
    assert max(found) < 0.02


def rank_of_a_death(rank: int, size: int) -> tuple[str, str]:
    _on_hosts(rank, "aabb")
    model = DistributedDataParallel(net(), plan=mixed_plan(1), timeout_s=20)
    step(model, rank, 0)
    if rank == 3:
        os._exit(9)
    try:
        for number in range(3):
            step(model, rank, number)
    except StrettoError as exc:
        if rank == 0:
            time.sleep(5.0)  # it holds the store, which the others still ask
        return type(exc).__name__, str(exc)
    return "", ""


def test_a_dead_rank_is_named_on_both_hosts(ranks: Ranks) -> None:
    found = ranks(rank_of_a_death, 4, errors=True, timeout_s=90)
    for kind, text in found[:3]:
        assert kind == "CommTimeout", text
        assert "rank 3 is gone" in text


def rank_of_refusals(rank: int, size: int) -> dict[str, str]:
    plan = mixed_plan(0)

    def refused(**options: Any) -> str:
        try:
            DistributedDataParallel(net(), **options)
        except StrettoError as exc:
            return f"{type(exc).__name__}: {exc}"
        return ""

    tree = replace(plan.buckets[0], algorithm="tree")
    model = DistributedDataParallel(net())
    with pytest.raises(PlanMismatch) as caught:
        model.apply_plan(plan)
    return {
        "applied": str(caught.value),
        "gloo": refused(plan=plan, lane_backend="gloo"),
        "tree": refused(plan=replace(plan, buckets=(tree, *plan.buckets[1:]))),
    }


def test_what_lanes_do_not_support_is_refused(ranks: Ranks) -> None:
    for found in ranks(rank_of_refusals, 4, timeout_s=60):
        for case in ("applied", "gloo"):
            assert "gloo lanes do not support algorithm 'hierarchical'" in found[case]
            assert "lane_backend='hierarchical'" in found[case]
        assert "does not support algorithm 'tree'" in found["tree"]
