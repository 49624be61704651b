"""``plan="auto"`` inside a training, against DDP."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.errors import SpecError
from stretto.schema import Bucket
from stretto.tune import controller, initial_profile
from support.checks import Lines
from support.nets import mlp
from support.steady_network import use_steady_network

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

TorchDDP = nn.parallel.DistributedDataParallel

STEPS = 320
"""Enough for a second profile, where the machine is busy."""

LIMIT = 1600
"""The most steps until tuning has settled, where the machine is busy."""


net = partial(mlp, 64, 600, 600, 4)


def train(
    model: nn.Module,
    rank: int,
    micro_steps: int = 1,
    *,
    steps: int = STEPS,
    settled: list[Any] | None = None,
) -> list[float]:
    """Losses of some steps, each of some micro-steps of which the last reduces.

    It continues until tuning has ``settled`` on all ranks, if that is given.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps if settled is None else LIMIT):
        if settled is not None and step >= STEPS and step % 40 == 0:
            done = torch.tensor(len(settled))
            dist.all_reduce(done, dist.ReduceOp.MIN)
            if done:
                break
        optimizer.zero_grad()
        for micro in range(micro_steps):
            generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
            inputs = torch.randn(16, 64, generator=generator)
            last = micro == micro_steps - 1
            model.require_backward_grad_sync = last
            loss = model(inputs).square().mean()
            loss.backward()
        optimizer.step()
        # The probe may take the time of 20 steps: enough of it on a busy machine.
        time.sleep(0.03)
        losses.append(float(loss.detach()))
    return losses


def settles(rank: int, size: int, micro_steps: int) -> dict[str, Any]:
    use_steady_network()
    lines = Lines()
    settled: list[Any] = []
    # A busy machine could reopen the search, and then another plan is executed.
    model = stretto.DistributedDataParallel(
        net(), on_settled=settled.append, tune=stretto.TuneOptions(watch=False)
    )
    ours = train(model, rank, micro_steps, settled=settled)
    theirs = train(TorchDDP(net()), rank, micro_steps, steps=len(ours))
    plan = settled[0].plan
    return {
        "losses": (theirs, ours),
        "plan": plan.digest,
        "executed": model.plan == (plan if settled[0].applied else settled[0].ddp),
        "ranks": settled[0].cluster.ranks,
        "tensors": len(settled[0].workload.tensors),
        "lines": lines.lines,
    }


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_all_steps_of_an_automatic_run_are_ddp_s(ranks, micro_steps):
    found = ranks(settles, 2, micro_steps, timeout_s=300.0, group_s=120.0)
    for one in found:
        theirs, ours = one["losses"]
        assert ours == theirs
        assert one["ranks"] == 2
        assert one["tensors"] == 6
        assert one["executed"]
    assert found[0]["plan"] == found[1]["plan"]
    (line,) = found[0]["lines"]
    assert "measured step" in line
    assert "DDP's buckets" in line
    assert found[1]["lines"] == []


def fails_to_measure(rank: int, size: int, probes: int) -> dict[str, Any]:
    """Train where the first ``probes`` probes of the network fail."""
    lines = Lines()
    real, left = initial_profile.probe_network, [probes]

    def refuse(**options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return real(**options)
        raise SpecError("no probe today")

    initial_profile.probe_network = refuse
    controller.WAIT_STEPS = (4, 4)
    theirs = train(TorchDDP(net()), rank, steps=45)
    options = stretto.TuneOptions(steps=0, watch=False, plan_cache=False)
    model = stretto.DistributedDataParallel(net(), tune=options)
    ours = train(model, rank, steps=45)
    return {
        "same": ours == theirs,
        "plan": model.plan,
        "lines": lines.lines,
        "probes": probes - left[0],
    }


WAITS = "cannot measure the network: no probe today; next attempt in 4 steps"


def test_a_network_too_noisy_at_first_is_measured_later(ranks):
    first, second = ranks(fails_to_measure, 2, 3)
    assert first["same"]
    assert second["same"]
    assert first["lines"][0] == WAITS
    assert first["probes"] > 3


def test_training_continues_as_ddp_where_measuring_fails(ranks):
    first, second = ranks(fails_to_measure, 2, 1000)
    assert first["same"]
    assert second["same"]
    assert first["plan"] is second["plan"] is None
    assert first["lines"] == [
        WAITS,
        WAITS,
        "cannot make a plan, DDP's own rule stays in use: no probe today (3 attempts)",
    ]
    assert second["lines"] == []


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(inputs)
        return out


def forgets_a_parameter(rank: int, size: int) -> None:
    model = stretto.DistributedDataParallel(Unused())
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()


def test_ddp_s_message_about_parameters_without_gradients_survives(ranks):
    for error in ranks(forgets_a_parameter, 2, errors=True):
        assert error.kind == "RuntimeError"
        assert "Expected to have finished reduction in the prior iteration" in (
            error.message
        )


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(inputs))
        return out


def left_alone(rank: int, size: int) -> list[str]:
    lines = Lines()
    model = stretto.DistributedDataParallel(Words())
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.int64)).sum().backward()
    return lines.lines


def test_models_with_sparse_gradients_are_left_to_ddp_and_say_so(ranks):
    first, second = ranks(left_alone, 2)
    assert len(first) == 1
    assert first[0].startswith("DDP's rule is kept: the model has sparse gradients")
    assert second == []


def obeys_a_file(rank: int, size: int, path: str) -> tuple[Any, bool]:
    model = stretto.DDP(net(), plan=path)
    return model.plan, isinstance(model, TorchDDP)


def test_a_plan_file_is_executed_and_a_wrong_one_stops_every_rank(ranks, tmp_path):
    names = [f"{i}.{leaf}" for i in (4, 2, 0) for leaf in ("bias", "weight")]
    plan = stretto.Plan(
        planner="hand",
        workload_digest="",
        ranks=2,
        overlap="backward",
        lanes=2,
        buckets=(
            Bucket(tensors=tuple(names[:3]), slices=2, wire_dtype="float32"),
            Bucket(tensors=tuple(names[3:]), lane=1, wire_dtype="float32"),
        ),
    )
    good = tmp_path / "plan.json"
    plan.save(good)
    assert ranks(obeys_a_file, 2, str(good)) == [(plan, True)] * 2
    cut = tmp_path / "cut.json"
    cut.write_bytes(good.read_bytes()[:200])
    for error in ranks(obeys_a_file, 2, str(cut), errors=True):
        assert error.kind == "SpecError"
        assert str(cut) in error.message


def test_one_rank_is_plain_pytorch_and_plans_nothing(ranks):
    assert ranks(alone, 1) == [(True, [])]


def alone(rank: int, size: int) -> tuple[bool, list[str]]:
    lines = Lines()
    ours = train(stretto.DistributedDataParallel(net()), rank)
    plain = train(net(), rank)
    assert dist.get_world_size() == 1
    return ours == plain, lines.lines
