"""The loop: profile, plan, train, measure, and the plan that follows from it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import stretto
from stretto._api import burst
from stretto.burst.executor import BurstParallel
from stretto.cost.burst_times import updated
from stretto.errors import SpecError
from stretto.schema import Cluster, Link
from stretto.testing.models import VGG
from support.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

BATCH = 8
SLOW = Cluster(
    name="slow",
    hosts=2,
    ranks_per_host=1,
    inter_host=Link(latency_s=1e-4, bandwidth_bytes_per_s=1e7),
    intra_host=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10),
)
FAST = Cluster(
    name="fast",
    hosts=2,
    ranks_per_host=1,
    inter_host=Link(latency_s=1e-9, bandwidth_bytes_per_s=1e13),
    intra_host=Link(latency_s=1e-9, bandwidth_bytes_per_s=1e13),
)


def model() -> VGG:
    torch.manual_seed(0)
    return VGG(11, width=4, dense=256, image=16, classes=5, dropout=0.0).double()


def images() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, 16, 16, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 5, (BATCH,), generator=draw)


def loop(rank: int, size: int, folder: str) -> dict[str, Any]:
    made, (x, y) = model(), images()
    refused = ""
    try:
        stretto.profile_layers(made, (x[:2],), batch=BATCH, gpus=size, repetitions=1)
    except SpecError as exc:
        refused = str(exc)
    found = stretto.profile_layers(
        made,
        (x[:2],),
        batch=BATCH,
        gpus=size,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        repetitions=2,
        min_layer_s=2e-4,
        max_spread_ratio=1e9,
    )
    problem = burst.problem(found, gpus=size, batch=BATCH, cluster=SLOW)
    plan, step = burst.plan_on(problem, SLOW)
    trained = BurstParallel(made, plan)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)

    def train() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(trained(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        total = loss.detach() / size
        dist.all_reduce(total)
        return float(total)

    os.environ["STRETTO_RUNTIME_DIR"] = folder
    foreground = stretto.Foreground(f"cpu:{rank}")
    losses = [train()]
    predicted = trained.predict_windows(found, SLOW)
    published = [foreground._board.windows()]
    trained.measure(3)
    losses += [train() for _ in range(3)]
    every: list[Any] = [None] * size
    dist.all_gather_object(every, trained.measured())
    waited = trained.waiting()
    again = updated(found, [timing for each in every for timing in each])
    narrow = {entry.layer: entry.gpus for entry in plan.layers}
    problem = burst.problem(again, gpus=size, batch=BATCH, cluster=FAST)
    wider, _ = burst.plan_on(problem, FAST)
    trained.apply_plan(wider, optimizer)
    published.append(foreground._board.windows())
    foreground.close()
    losses += [train() for _ in range(2)]
    return {
        "losses": losses,
        "names": [layer.name for layer in found.layers],
        "narrow": narrow,
        "digests": (found.digest, again.digest, wider.profile_digest),
        "timings": every,
        "waited": waited,
        "idle_s": step.idle_s,
        "again": again,
        "refused": refused,
        "profile": found,
        "predicted": predicted,
        "published": published,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory, rank_servers):
    """What each rank found: one profile, two plans, and steps with both."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), rank_servers)
    return ranks(loop, 2, str(tmp_path_factory.mktemp("loop") / "run"), timeout_s=120)


def test_a_background_sees_the_simulated_windows_until_the_plan_changes(found):
    for each, idle_s in zip(found, found[0]["idle_s"], strict=True):
        assert sum(w.length_s for w in each["predicted"]) == pytest.approx(idle_s)
        assert each["published"] == [each["predicted"], ()]


def test_every_rank_has_the_profile_or_the_reason_for_its_absence(found):
    assert found[1]["profile"] == found[0]["profile"]
    assert all("repetitions must be >= 2" in each["refused"] for each in found)


def test_the_profile_has_the_host_s_costs(found):
    host = found[0]["profile"].host
    assert 0 < host.message_s < 1
    assert 0 < host.exchange_s < 1
    assert 0 < host.copy_s_per_byte < 1e-6
    assert 0 <= host.message_s_per_byte < 1e-6
    assert [slowed.ranks for slowed in host.slowdowns] == [2]


def test_losses_are_those_of_one_process_with_the_whole_batch(found):
    alone, (x, y) = model(), images()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    expected = []
    for _ in found[0]["losses"]:
        optimizer.zero_grad()
        loss = cross_entropy(alone(x), y)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for each in found:
        assert each["losses"] == pytest.approx(expected, rel=1e-10)


def test_plans_and_profiles_are_of_one_model(found):
    assert len(set(found[0]["digests"])) == 1


def test_on_a_slow_network_the_heaviest_layer_is_not_synchronized(found):
    names = found[0]["names"]
    heavy = next(name for name in reversed(names) if "classifier.0" in name)
    assert found[0]["narrow"][heavy] == 1
    assert len(found[0]["idle_s"]) == 2
    assert found[0]["waited"]["total"] >= 0


def test_each_rank_measures_the_layers_that_it_runs(found):
    """Rank 0 runs every layer, rank 1 the wide ones."""
    by_rank = found[0]["timings"]
    wide = {name for name, width in found[0]["narrow"].items() if width > 1}
    assert [t.layer for t in by_rank[0]] == found[0]["names"]
    assert {t.layer for t in by_rank[1]} == wide


def test_the_measured_times_are_in_the_next_profile(found):
    by_rank = found[0]["timings"]
    for timing in by_rank[0]:
        layer = next(e for e in found[0]["again"].layers if e.name == timing.layer)
        same = [
            t
            for each in by_rank
            for t in each
            if (t.layer, t.samples) == (timing.layer, timing.samples)
        ]
        low, high = min(t.forward_s for t in same), max(t.forward_s for t in same)
        time = next(t for t in layer.times if t.samples == timing.samples)
        assert low <= time.forward_s <= high


def rank_whose_loss_fails(_rank: int, size: int) -> tuple[str, str]:
    def fails(_output: Any) -> Any:
        raise ValueError("a loss of its own")

    x, _ = images()
    try:
        stretto.profile_layers(model(), (x[:2],), batch=BATCH, gpus=size, loss=fails)
    except Exception as exc:  # noqa: BLE001
        return type(exc).__name__, str(exc)
    return "", ""


def test_an_error_of_the_first_rank_in_profiling_reaches_all(ranks: Any) -> None:
    found = ranks(rank_whose_loss_fails, 2)
    assert found[0] == ("ValueError", "a loss of its own")
    assert found[1] == (
        "StrettoError",
        "rank 0 can't profile: ValueError: a loss of its own",
    )
