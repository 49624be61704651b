"""A plan executed on real ranks, with waiting as computation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import variable_names
from stretto._api.replaying import replay
from stretto.errors import PlanMismatch
from stretto.lab.ports import free_port
from stretto.schema import Cluster, Plan, TensorSpec, Workload
from stretto.testing import EmulatedModel
from stretto.testing.instances import build_cluster

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

TorchDDP = nn.parallel.DistributedDataParallel
LAYERS = 4


def workload() -> Workload:
    return Workload(
        name="layers",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=0.004,
        backward_s=0.008,
        tensors=tuple(
            TensorSpec(
                name=f"layer{LAYERS - 1 - i}.weight",
                bytes=40_000,
                dtype="float32",
                ready_s=0.002 * i + 0.001,
                needed_s=0.001 * (LAYERS - 1 - i),
            )
            for i in range(LAYERS)
        ),
    )


def planned(ranks: int) -> tuple[Plan, Cluster]:
    cluster = build_cluster(hosts=ranks)
    return stretto.plan(workload(), cluster, "wfbp"), cluster


def rank_that_replays(rank: int, size: int) -> dict[str, Any]:
    plan, cluster = planned(size)
    found = replay(workload(), plan, cluster, steps=3, warmup=1)
    with pytest.raises(PlanMismatch) as refused:
        replay(workload(), *planned(size + 1))
    return {
        "refused": str(refused.value),
        "ranks": found.ranks,
        "predicted_s": found.predicted_s,
        "steps_s": found.steps_s,
        "buckets": found.buckets,
        "tracks": found.timeline.tracks,
    }


def rank_that_replays_a_forward_plan(rank: int, size: int) -> list[Any]:
    from stretto.runtime.forward.overlap import ForwardOverlap

    os.environ[variable_names.POISON] = "1"  # buckets count as under way until a read
    deferred: list[int] = []
    defer = ForwardOverlap.defer

    def counted(self: Any, update: Any, members: Any) -> None:
        members = list(members)
        deferred.append(len(members))
        defer(self, update, members)

    ForwardOverlap.defer = counted  # type: ignore[assignment, method-assign]
    plan, cluster = planned(size)
    launch = (0, *range(len(plan.buckets) - 1, 0, -1))
    plan = replace(plan, overlap="forward", launch=launch, predicted=None)
    found = replay(workload(), plan, cluster, steps=4, warmup=2)
    return [deferred, len(found.buckets)]


def test_a_forward_plan_is_replayed_during_the_next_forward(ranks: Any) -> None:
    for deferred, buckets in ranks(rank_that_replays_a_forward_plan, 2):
        assert deferred == [LAYERS] * 5
        assert buckets == LAYERS


def test_every_rank_learns_the_same_of_a_replay(ranks: Any) -> None:
    plan, _ = planned(2)
    first, second = ranks(rank_that_replays, 2)
    assert first == second
    assert (first["ranks"], first["tracks"]) == (2, ("compute", "lane0"))
    assert first["predicted_s"] == plan.predicted.iteration_s
    assert "made for 3 ranks, but 2 run" in first["refused"]
    # Waiting takes at least its time.
    assert len(first["steps_s"]) == 3
    assert min(first["steps_s"]) >= 0.012
    assert [row.bucket for row in first["buckets"]] == list(range(LAYERS))
    for row, tensor in zip(first["buckets"], workload().tensors, strict=True):
        assert row.bytes == tensor.bytes
        assert row.measured_end_s > row.measured_launch_s >= tensor.ready_s - 1e-4
        assert row.predicted_launch_s == pytest.approx(tensor.ready_s)


def rank_that_replays_forward(rank: int, size: int) -> list[tuple[int, float, float]]:
    plan, cluster = planned(size)
    plan = replace(plan, overlap="forward", launch=(0, 2, 3, 1))
    found = replay(workload(), plan, cluster, steps=4, warmup=4)
    return [
        (row.bucket, row.measured_launch_s, row.measured_end_s) for row in found.buckets
    ]


def test_a_replay_follows_the_launch_order(ranks: Any) -> None:
    first, second = ranks(rank_that_replays_forward, 2)
    assert first == second
    launches_s = {bucket: launch_s for bucket, launch_s, _ in first}
    assert sorted(launches_s, key=launches_s.__getitem__) == [0, 2, 3, 1]
    assert all(end_s > launch_s for _, launch_s, end_s in first)


def rank_with_gradients(rank: int, size: int) -> dict[str, list[float]]:
    plan, _ = planned(size)
    found = {}
    for name, wrap in {
        "torch": TorchDDP,
        "planned": lambda model: stretto.DistributedDataParallel(model, plan=plan),
    }.items():
        model = wrap(EmulatedModel(workload()))
        (model(torch.ones(())) * (rank + 1)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found[name] = [float(value) for g in grads for value in (g.min(), g.max())]
    return found


def test_an_emulated_model_s_gradients_are_averaged(ranks: Any) -> None:
    for found in ranks(rank_with_gradients, 2):
        assert found == dict.fromkeys(("torch", "planned"), [1.5] * 2 * LAYERS)


def test_the_command_prints_predicted_beside_measured(tmp_path: Any) -> None:
    plan, cluster = planned(1)
    for name, value in {"w": workload(), "p": plan, "c": cluster}.items():
        value.save(tmp_path / f"{name}.json")
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, "-m", "stretto", "replay", tmp_path / "w.json"]
    command += ["--plan", tmp_path / "p.json", "--cluster", tmp_path / "c.json"]
    command += ["--steps", "2", "--warmup", "0", "--json"]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["predicted_s"] == pytest.approx(0.012)
    assert len(found["steps_s"]) == 2
    assert found["error"] == pytest.approx(0.012 / found["measured_s"] - 1)
