"""Runs that end before tuning has settled: what stays, and what the next one does."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stretto
from stretto.schema import Cluster, Plan, Workload
from stretto.schema.tuning import Tuning
from stretto.tune import TuneOptions
from stretto.tune.plan_cache import CachedPlan, PlanCache
from stretto.tune.tuning_state import best_so_far
from support.checks import Lines
from support.nets import mlp
from support.ranks import Ranks
from support.steady_network import use_steady_network

if TYPE_CHECKING:
    from support.ranks import RankServers

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

TorchDDP = nn.parallel.DistributedDataParallel

MAX_STEPS = 250
"""By then every tuning here has settled, also on a busy machine."""

OPTIONS = TuneOptions(steps=40, lost_ratio=5.0, watch=False)

FILES = ("plan", "profile", "cluster", "trace", "report", "tuning")


net = partial(mlp, 64, 400, 400)


def step(model: nn.Module, optimizer: Any, number: int, rank: int) -> float:
    generator = torch.Generator().manual_seed(number * 10 + rank)
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
    return float(loss.detach())


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def knows(model: Any) -> bool:
    """Whether some plan was tried for as many steps as a median needs; on rank 0."""
    search = model._auto._known.search
    return search is not None and best_so_far(search) is not None


def ends_before_it_has_settled(folder: Path, rank: int) -> dict[str, Any]:
    """Steps until the first plan has its median; then the model is no more."""
    use_steady_network()
    lines, settled = Lines(), []
    for name in FILES:
        variable = "STRETTO_SAVE_PLAN" if name == "plan" else f"STRETTO_{name.upper()}"
        os.environ[variable] = str(folder / name)
    model = stretto.DistributedDataParallel(
        net(), on_settled=settled.append, tune=OPTIONS
    )
    for name in FILES:
        variable = "STRETTO_SAVE_PLAN" if name == "plan" else f"STRETTO_{name.upper()}"
        del os.environ[variable]
    optimizer, number, over = sgd(model), 0, 0
    while not over and number < MAX_STEPS:
        step(model, optimizer, number, rank)
        number += 1
        over = model._auto._sync.broadcast_int(int(knows(model)))
    before = list(lines.lines)
    del model, optimizer
    gc.collect()
    logging.getLogger("stretto").removeHandler(lines)
    return {
        "steps": number,
        "settled": len(settled),
        "before": before,
        "lines": lines.lines,
    }


def goes_on(rank: int) -> dict[str, Any]:
    """The same job again, until it has settled."""
    settled: list[Any] = []
    model = stretto.DistributedDataParallel(
        net(), on_settled=settled.append, tune=OPTIONS
    )
    optimizer, losses, first = sgd(model), [], None
    while not settled and len(losses) < MAX_STEPS:
        losses.append(step(model, optimizer, len(losses), rank))
        first = first or model.plan
    theirs = TorchDDP(net())
    optimizer = sgd(theirs)
    want = [step(theirs, optimizer, i, rank) for i in range(len(losses))]
    return {
        "first": first,
        "same": losses == want,
        "events": settled[0].record.events,
        "plan": settled[0].executed,
        "now": model.plan,
    }


def two_runs(rank: int, size: int, folder: str) -> dict[str, Any]:
    memory = Path(folder) / "plans.sqlite"
    os.environ["STRETTO_PLAN_CACHE"] = str(memory)
    found = {"short": ends_before_it_has_settled(Path(folder), rank)}
    if rank == 0:
        found["kept"] = PlanCache(memory, strict=True).all()
    found["long"] = goes_on(rank)
    if rank == 0:
        found["settled"] = PlanCache(memory, strict=True).all()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unfinished")


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, rank_servers: RankServers, folder: Path
) -> list[dict[str, Any]]:
    """What each rank found in a run that was too short and in the next one."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), rank_servers)
    rows: list[dict[str, Any]] = ranks(two_runs, 2, str(folder), timeout_s=120.0)
    return rows


@pytest.fixture
def kept(found: list[dict[str, Any]]) -> CachedPlan:
    """The cache's entry after the short run."""
    (entry,) = found[0]["kept"]
    assert isinstance(entry, CachedPlan)
    return entry


def test_a_run_that_was_too_short_says_so_in_one_line(
    found: list[dict[str, Any]], folder: Path
) -> None:
    short, other = (row["short"] for row in found)
    assert (short["settled"], short["before"]) == (0, [])
    (line,) = short["lines"]
    assert f"not settled after {short['steps']} steps; best so far, " in line
    assert "an equal job continues from there; this is in " in line
    assert f"not written: {folder / 'trace'}" in line
    assert other["lines"] == []


def test_the_cache_knows_after_how_many_steps_it_ended(
    found: list[dict[str, Any]], kept: CachedPlan
) -> None:
    assert kept.unfinished_steps == found[0]["short"]["steps"]


def test_its_files_hold_what_the_cache_does(kept: CachedPlan, folder: Path) -> None:
    assert Plan.load(folder / "plan") == kept.plan
    assert Workload.load(folder / "profile") == kept.workload
    assert Cluster.load(folder / "cluster") == kept.cluster
    assert not (folder / "trace").exists()


def test_its_record_and_its_page_say_that_it_has_not_settled(
    kept: CachedPlan, folder: Path
) -> None:
    what = [event.what for event in Tuning.load(folder / "tuning").events]
    assert what[:3] == ["started", "profiled", "planned"]
    assert "settled" not in what
    page = (folder / "report").read_text()
    assert "The run ended before tuning had settled." in page
    assert "<svg" in page


def test_the_next_run_begins_with_its_best_plan_and_settles(
    found: list[dict[str, Any]], kept: CachedPlan
) -> None:
    for one in (row["long"] for row in found):
        assert one["first"] == kept.plan
        assert [event.what for event in one["events"]][:2] == ["started", "remembered"]
        assert one["events"][-1].what == "settled"


def test_the_next_run_computes_what_ddp_does(found: list[dict[str, Any]]) -> None:
    assert [row["long"]["same"] for row in found] == [True, True]


def test_all_ranks_execute_the_settled_plan(found: list[dict[str, Any]]) -> None:
    first, second = (row["long"] for row in found)
    assert first["now"] == first["plan"]
    assert second["now"] == second["plan"] == first["plan"]


def test_the_next_run_tries_the_best_plan_without_a_second_profile(
    found: list[dict[str, Any]], kept: CachedPlan
) -> None:
    events = found[0]["long"]["events"]
    tried = [e.values["plan"] for e in events if e.what == "tried"]
    assert kept.plan.digest in tried
    if not any(event.what == "changed" for event in events):
        # The measurements of the short run's profile still hold.
        assert [event.what for event in events][:3] == [
            *("started", "remembered", "planned")
        ]
        assert tried[0] == kept.plan.digest


def test_the_settled_plan_replaces_the_unfinished_one(
    found: list[dict[str, Any]],
) -> None:
    (settled,) = found[0]["settled"]
    assert settled.unfinished_steps is None
    assert settled.plan == found[0]["long"]["plan"]


SCRIPT = """
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 300)))
for step in range(200):
    model(torch.randn(8, 64)).square().mean().backward()
    time.sleep(0.02)
    if model._auto is None:  # the measurements of a busy machine fit no model
        sys.exit(7)
    # The first trial is still under way, however long its beginning took.
    search = model._auto._known.search
    enough = search is not None and len(search.trials[0].steps_s) == 3
    if model._auto._sync.broadcast_int(enough):
        break
if dist.get_rank() == 0:
    print(step + 1)
raise RuntimeError("the disk is full")
"""


def test_a_script_that_ends_in_an_error_keeps_what_is_known(tmp_path: Path) -> None:
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    memory = tmp_path / "plans.sqlite"
    options = ["--save-plan", str(plan), "--plan-cache", str(memory), "--standalone"]
    for _ in range(4):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "stretto", "run", *options),
                *("--nproc-per-node", "2", str(script)),
            ],
            env={
                **{
                    k: v
                    for k, v in os.environ.items()
                    if k not in ("RANK", "WORLD_SIZE")
                },
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if "cannot make a plan" not in done.stderr:
            break
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: the disk is full" in done.stderr
    logged = [line for line in done.stderr.splitlines() if "had not settled" in line]
    assert len(logged) == 1, done.stderr
    steps = int(done.stdout)
    assert f"not settled after {steps} steps; " in logged[0]
    assert logged[0].endswith(f"this is in {plan}")
    (entry,) = PlanCache(memory, strict=True).all()
    assert isinstance(entry, CachedPlan)
    assert entry.unfinished_steps == steps
    assert Plan.load(plan) == entry.plan
