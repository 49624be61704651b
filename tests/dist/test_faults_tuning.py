"""Ranks that are lost while ``plan="auto"`` tunes: named, in bounded time, by all.

The forced schedule puts every phase of tuning into the first ten steps. Timeouts are
long, so that only the look for a rank's process can end a wait in time; where the rank
is stopped rather than gone, they are short.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import stretto
from stretto import variable_names
from stretto.runtime.backends import gloo
from stretto.runtime.backends.gloo import GlooLanes
from stretto.tune import initial_profile
from stretto.tune.tuning_meeting import TuningMeeting

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

LONG_S = 1800.0


def call_is_fatal(owner: Any, name: str, number: int, how: signal.Signals) -> None:
    """Let this process get a signal at the n-th call of a method."""
    real, calls = getattr(owner, name), [0]

    def fatal(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), how)
            time.sleep(60.0)
        return real(*args, **kwargs)

    setattr(owner, name, fatal)


MOMENTS = {
    "beginning": (TuningMeeting, "begin", 3),
    "lane": (GlooLanes, "_make", 2),
    "probe": (initial_profile, "probe_network", 1),
}


def rank_that_tunes(
    rank: int, size: int, victim: int, moment: str, how: signal.Signals
) -> tuple[str, str, float]:
    os.environ[variable_names.TUNE_SCHEDULE] = "forced"
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    model: Any = stretto.DDP(module)
    if rank == victim:
        call_is_fatal(*MOMENTS[moment], how)
    ended_s = time.perf_counter()
    for _ in range(30):
        try:
            model(torch.randn(4, 8)).sum().backward()
        except Exception as exc:  # noqa: BLE001
            took_s = time.perf_counter() - ended_s
            if how is signal.SIGSTOP:
                os.kill(model._ranks.presence._known[victim].pid, signal.SIGKILL)
            return type(exc).__name__, str(exc), took_s
        ended_s = time.perf_counter()
    return "", "", 0.0


@pytest.mark.parametrize(
    ("moment", "victim"),
    [("beginning", 1), ("lane", 0), ("probe", 1)],
)
def test_a_rank_that_dies_while_tuning_is_named(
    ranks: Any, moment: str, victim: int
) -> None:
    how = signal.SIGKILL
    found = ranks(rank_that_tunes, 3, victim, moment, how, errors=True, group_s=LONG_S)
    assert found[victim] is None
    for rank in {0, 1, 2} - {victim}:
        kind, text, took_s = found[rank]
        assert kind == "CommTimeout", text
        # Another survivor may have ended by then, and with rank 0 the store.
        several = rf"ranks? [\d, ]*\b{victim}\b[\d, ]*"
        assert re.search(rf"{several} (is|are) gone \(process |from: {several}", text)
        assert took_s < 20.0


def test_a_rank_that_is_stopped_while_tuning_is_late_or_stuck(ranks: Any) -> None:
    how, group_s = signal.SIGSTOP, 8.0
    # It holds the store, which does not answer then.
    found = ranks(rank_that_tunes, 2, 0, "beginning", how, errors=True, group_s=group_s)
    kind, text, took_s = found[1]
    assert kind == "CommTimeout", text
    assert "rank 0 is late or stuck" in text
    assert "is stopped by a signal" in text
    assert took_s < 4 * group_s


def rank_that_opens_few_lanes(rank: int, _size: int, opened: int) -> tuple[bool, float]:
    """Train while rank 0 runs out of file descriptors at its n-th lane."""
    os.environ[variable_names.TUNE_SCHEDULE] = "forced"
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    model: Any = stretto.DDP(copy.deepcopy(module))
    expected = nn.parallel.DistributedDataParallel(module)
    real, made = gloo._gloo_device, [0]

    def device(number: int) -> Any:
        made[0] += 1
        if rank == 0 and made[0] > opened:
            raise RuntimeError("rv != -1. socket: Too many open files")
        return real(number)

    gloo._gloo_device = device
    begin_s = time.perf_counter()
    equal = True
    for step in range(30):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        for each in (model, expected):
            each(x).sum().backward()
        equal &= all(
            torch.equal(a.grad, b.grad)
            for a, b in zip(model.parameters(), expected.parameters(), strict=True)
        )
    return equal, time.perf_counter() - begin_s


@pytest.mark.parametrize("opened", [0, 2, 5, 8])
def test_a_rank_that_cant_open_a_lane_keeps_no_other_waiting(
    ranks: Any, opened: int
) -> None:
    for equal, took_s in ranks(rank_that_opens_few_lanes, 2, opened, group_s=LONG_S):
        assert equal
        assert took_s < 60.0


def rank_with_a_hook_after_missing_gradients(_rank: int, _size: int) -> list[str]:
    os.environ[variable_names.TUNE_SCHEDULE] = "forced"
    found = []
    for kind in (nn.parallel.DistributedDataParallel, stretto.DDP):
        torch.manual_seed(0)
        model: Any = kind(Partial())
        x = torch.randn(2, 8)
        for _ in range(8):
            model(x).sum().backward()
        model(x, first_only=True).sum().backward()
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        try:
            model(x).sum().backward()
        except RuntimeError as exc:
            found.append(str(exc)[:60])
        else:
            found.append("")
    return found


class Partial(nn.Module):
    """Leaves one layer out on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, first_only: bool = False) -> torch.Tensor:
        return self.first(x) if first_only else self.second(self.first(x))


def test_a_hook_hides_no_error_of_ddp(ranks: Any) -> None:
    for theirs, ours in ranks(rank_with_a_hook_after_missing_gradients, 2):
        assert theirs.startswith("Expected to have finished reduction")
        assert ours == theirs
