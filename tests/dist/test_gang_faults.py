"""Members of a gang that die or are stopped: the others train as one process does."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto import process_identity
from stretto.errors import CommTimeout
from stretto.gang import gang as gang_module
from stretto.gang.membership import GangMembership
from stretto.gang.sums import MemberSums
from support.gangs import (
    COUNT,
    alone,
    difference,
    loss_of,
    model_of,
    say_claimed,
    train,
    wait_for_claim,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

STEPS = 4


class Lines(logging.Handler):
    """What is logged from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("stretto").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60.0)


def on_call(number: int, act: Callable[[], Any]) -> Callable[..., None]:
    """A function that acts when it is called for the given time."""
    left = [number]

    def call(*_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            act()

    return call


def before(owner: type, name: str, act: Callable[..., None]) -> None:
    """Call ``act`` before a method of a class."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act()
        return method(*args, **kwargs)

    setattr(owner, name, call)


def after(owner: type, name: str, act: Callable[..., None]) -> None:
    """Call ``act`` after a method of a class."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        act()
        return found

    setattr(owner, name, call)


MOMENTS: dict[str, Callable[[], None]] = {
    "before the sum": lambda: before(MemberSums, "mean_gradients", on_call(2, die)),
    "in the sum": lambda: after(MemberSums, "_sum", on_call(3, die)),
    "after the sum": lambda: after(MemberSums, "mean_gradients", on_call(2, die)),
    "before it ends the step": lambda: before(
        GangMembership, "_propose", on_call(2, die)
    ),
    "after the step": lambda: after(GangMembership, "end_step", on_call(2, die)),
}


def rank_dies_at(rank: int, size: int, moment: str) -> dict[str, Any]:
    """Rank 1 dies in the second step."""
    torch.set_default_dtype(torch.float64)
    log, model = Lines(), model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=20.0)
    if rank == 1 and moment in MOMENTS:
        MOMENTS[moment]()
        if moment == "before it ends the step":  # the last one to come ends it
            before(GangMembership, "end_step", lambda *_: time.sleep(0.2))
    begin_s = time.perf_counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        if rank != 1 and step == 1 and moment.endswith("results"):
            wait_for_claim(step)
        for done, index in enumerate(gang.claims()):
            dies = rank == 1 and step == 1 and moment == f"after {done} results"
            if dies:
                say_claimed(step)
            loss_of(model, step, index).backward()
            time.sleep(0.01)
            if dies:
                die()
        gang.reduce()
        optimizer.step()
    return {
        "worst": difference(model, STEPS),
        "took_s": time.perf_counter() - begin_s,
        "members": gang.members,
        "lines": [line for line in log.lines if "lost rank 1" in line],
        "claims": gang.state_dict()["last_claims"],
    }


@pytest.mark.parametrize("moment", ["after 0 results", "after 1 results", *MOMENTS])
def test_the_others_do_the_part_of_a_member_that_dies(ranks: Any, moment: str) -> None:
    found = ranks(rank_dies_at, 3, moment, errors=True)
    assert found[1] is None
    for rank in (0, 2):
        assert found[rank]["worst"] < 1e-12
        assert found[rank]["members"] == (0, 2)
        (line,) = found[rank]["lines"]
        assert line.startswith(f"rank {rank}:")
        assert "continues with ranks 0, 2" in line
        assert "has ended" in line
        assert found[rank]["took_s"] < 15.0
        claims = found[rank]["claims"]
        assert len(claims) == 2
        assert sorted(i for row in claims for i in row) == list(range(COUNT))


def rank_dies_at_random(
    rank: int, size: int, seed: int, deaths: list[float]
) -> dict[str, Any]:
    """Some ranks die some time after the start; the model takes a while to sum."""
    torch.set_default_dtype(torch.float64)
    width, steps = 200_000, 25
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(width, 2), nn.Dropout(0.3), nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def loss_at(step: int, index: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 * step + index)
        rows = torch.randint(0, width, (64,), generator=draw)
        return model(rows).square().mean()

    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=20.0)
    dist.barrier()
    if deaths[rank]:
        threading.Timer(deaths[rank], die).start()
    rng = random.Random(100 * seed + rank)
    log, begin_s = Lines(), time.perf_counter()
    for step in range(steps):
        for index in gang.claims():
            loss_at(step, index).backward()
            time.sleep(rng.random() * 0.01)
        gang.reduce()
        optimizer.step()
    took_s = time.perf_counter() - begin_s
    trained = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(0)
    for part in model:
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        gang.step = step
        for index in range(COUNT):
            torch.manual_seed(gang._seed_of(index))
            (loss_at(step, index) / COUNT).backward()
        optimizer.step()
    worst = max(
        float((p - q).abs().max())
        for p, q in zip(trained, model.parameters(), strict=True)
    )
    return {
        "worst": worst,
        "members": gang.members,
        "took_s": took_s,
        "lines": [line for line in log.lines if "gang has lost" in line],
    }


@pytest.mark.parametrize("seed", range(4))
def test_members_die_at_random_moments(ranks: Any, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((3, 4))
    deaths = [0.0, rng.uniform(0.05, 1.0), 0.0, rng.uniform(0.05, 1.0)][:size]
    found = ranks(rank_dies_at_random, size, seed, deaths, errors=True)
    for rank in (0, 2):
        assert found[rank]["worst"] < 1e-12, deaths
        assert found[rank]["members"] == (0, 2)
        assert 1 <= len(found[rank]["lines"]) <= size - 2
        assert found[rank]["took_s"] < 30.0


def rank_stays_alone(rank: int, size: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        if step + 1 < size and rank != step + 1:
            wait_for_claim(step)
        for index in gang.claims():
            if rank == step + 1:
                say_claimed(step)
            loss_of(model, step, index).backward()
            if rank == step + 1:
                die()
        gang.reduce()
        optimizer.step()
    return {"worst": difference(model, STEPS), "members": gang.members}


def test_the_last_member_trains_alone(ranks: Any) -> None:
    found = ranks(rank_stays_alone, 3, errors=True)
    assert found[0] == {"worst": pytest.approx(0.0, abs=1e-12), "members": (0,)}
    assert found[1:] == [None, None]


def stop_for(seconds: float) -> None:
    """Stop this process by a signal; a child of it sends the other one."""
    mine = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(mine, signal.SIGCONT)
        os._exit(0)
    os.kill(mine, signal.SIGSTOP)


def rank_is_stopped(
    rank: int, size: int, seconds: float, timeout_s: float
) -> dict[str, Any]:
    """Rank 1 is stopped in its first micro-batch of the second step."""
    gang_module.SILENT_S = 1.0
    begin_s = time.perf_counter()
    torch.set_default_dtype(torch.float64)
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=timeout_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    counted, was_stopped = 0, False
    try:
        for step in range(STEPS):
            if rank != 1 and step == 1:
                wait_for_claim(step)
            for index in gang.claims():
                loss_of(model, step, index).backward()
                time.sleep(0.01)
                if rank == 1 and step == 1 and not was_stopped:
                    was_stopped = True
                    say_claimed(step)
                    stop_for(seconds)
            gang.reduce()
            optimizer.step()
            counted += len(gang._done)
    except CommTimeout as exc:
        return {"error": str(exc), "members": gang.members}
    found = {
        "worst": difference(model, STEPS),
        "members": gang.members,
        "counted": counted,
    }
    if not was_stopped:  # rank 0 holds the store
        time.sleep(max(0.0, begin_s + seconds + 1.0 - time.perf_counter()))
    return found


def test_a_member_that_continues_does_not_add_its_late_result(ranks: Any) -> None:
    found = ranks(rank_is_stopped, 3, 3.0, 30.0)
    assert max(one["worst"] for one in found) < 1e-12
    assert sum(one["counted"] for one in found) == STEPS * COUNT
    assert all(one["members"] == (0, 1, 2) for one in found)


def test_a_member_that_is_stopped_for_too_long_is_given_up(ranks: Any) -> None:
    found = ranks(rank_is_stopped, 3, 8.0, 2.0)
    for rank in (0, 2):
        assert found[rank]["worst"] < 1e-12
        assert found[rank]["members"] == (0, 2)
    assert "rank 1: the gang has removed this rank" in found[1]["error"]
    assert "stopped by a signal" in found[1]["error"]


def rank_on_another_host(rank: int, size: int) -> dict[str, Any]:
    """No rank can see another one's process."""
    gang_module.SILENT_S = 2.0
    process_identity.kernel_id.cache_clear()
    process_identity.kernel_id = lambda: f"host {rank}"  # type: ignore[assignment]
    torch.set_default_dtype(torch.float64)
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=60.0)
    if rank == 1:
        before(MemberSums, "mean_gradients", on_call(2, die))
    begin_s = time.perf_counter()
    train(gang, model, STEPS)
    took_s = time.perf_counter() - begin_s
    return {
        "worst": difference(model, STEPS),
        "members": gang.members,
        "took_s": took_s,
    }


def test_a_member_of_another_host_is_given_up_when_its_connection_ends(
    ranks: Any,
) -> None:
    found = ranks(rank_on_another_host, 3, errors=True)
    for rank in (0, 2):
        assert found[rank]["worst"] < 1e-12
        assert found[rank]["members"] == (0, 2)
        assert 2.0 < found[rank]["took_s"] < 30.0


def rank_loses_a_connection(rank: int, size: int) -> dict[str, Any]:
    """Rank 1's connections end, but every rank lives."""
    torch.set_default_dtype(torch.float64)
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=20.0)
    if rank == 1:

        def cut() -> None:
            gang._sums._pool.abort()

        before(MemberSums, "mean_gradients", on_call(2, cut))
    train(gang, model, STEPS)
    return {"worst": difference(model, STEPS), "members": gang.members}


def test_members_connect_again_after_a_network_failure(ranks: Any) -> None:
    for one in ranks(rank_loses_a_connection, 3):
        assert one["worst"] < 1e-12
        assert one["members"] == (0, 1, 2)


def rank_loses_the_store(rank: int, size: int) -> tuple[str, float]:
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, timeout_s=8.0)
    dist.barrier()
    begin_s = time.perf_counter()
    try:
        for step in range(1000):
            for index in gang.claims():
                loss_of(model, step, index).backward()
                if rank == 0 and step >= 2:  # it may get no micro-batch of one step
                    die()
            gang.reduce()
    except CommTimeout as exc:
        return str(exc), time.perf_counter() - begin_s
    return "", 0.0


def test_the_loss_of_the_store_ends_all_with_one_error(ranks: Any) -> None:
    found = ranks(rank_loses_the_store, 3, errors=True)
    assert found[0] is None
    for rank in (1, 2):
        text, took_s = found[rank]
        assert f"rank {rank} can't continue a gang: the store, held by rank 0" in text
        assert took_s < 20.0


def rank_replays_without_one(rank: int, size: int) -> float:
    """A step is replayed, and rank 1 dies in it."""
    torch.set_default_dtype(torch.float64)
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=20.0)
    if rank != 1:
        wait_for_claim(0)
    for index in gang.claims():
        if rank == 1:
            say_claimed(0)
        loss_of(model, 0, index).backward()
        time.sleep(0.02)
    gang.reduce()
    gang.replay(gang.state_dict())
    for index in gang.claims():
        loss_of(model, 0, index).backward()
        if rank == 1:
            die()
    gang.reduce()
    torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9).step()
    return max(
        float((p - want).abs().max())
        for p, want in zip(model.parameters(), alone(1), strict=True)
    )


def test_a_replay_is_complete_without_a_member(ranks: Any) -> None:
    found = ranks(rank_replays_without_one, 3, errors=True)
    assert found[0] < 1e-12
    assert found[2] < 1e-12


def rank_forgets_reduce(rank: int, size: int) -> str:
    gang = stretto.Gang(model_of(), micro_batches=2)
    for _ in gang.claims():
        pass
    with pytest.raises(stretto.errors.SpecError) as caught:
        next(gang.claims())
    gang.reduce()
    return str(caught.value)


def test_a_step_needs_its_end(ranks: Any) -> None:
    (text,) = ranks(rank_forgets_reduce, 1)
    assert "call reduce()" in text
