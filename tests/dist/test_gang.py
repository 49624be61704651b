"""A gang's training against one process, with ranks of other speeds."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.errors import RankDisagreement, SpecError
from stretto.gang import gang as gang_module
from support.gangs import COUNT, difference, loss_of, model_of, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def rank_trains(rank: int, size: int, slow_s: list[float]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    model = model_of(rank)  # rank 0's values count
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=20.0)
    counts = train(gang, model, 4, slow_s[rank])
    worst = difference(model, 4)
    return {"counts": counts, "worst": worst}


@pytest.mark.parametrize("slow_s", [[0.0, 0.0, 0.0], [0.0, 0.05, 0.2]])
def test_a_gang_trains_as_one_process(ranks: Any, slow_s: list[float]) -> None:
    found = ranks(rank_trains, 3, slow_s)
    for step in range(4):
        assert sum(one["counts"][step] for one in found) == COUNT
    assert max(one["worst"] for one in found) < 1e-12
    if slow_s[2]:
        done = [sum(one["counts"]) for one in found]
        assert done[0] > done[2]


def rank_falls_asleep(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 takes very long for its first micro-batch."""
    torch.set_default_dtype(torch.float64)
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=60.0)
    own, slept = 0, False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for index in gang.claims():
        loss_of(model, 0, index).backward()
        if rank == 1 and not slept:
            time.sleep(4.0)
            slept = True
        own += 1
    gang.reduce()
    optimizer.step()
    worst = difference(model, 1)
    return {"own": own, "done": len(gang._done), "worst": worst}


def test_a_claim_that_is_late_is_computed_by_another_and_counts_once(
    ranks: Any,
) -> None:
    found = ranks(rank_falls_asleep, 2)
    assert sum(one["done"] for one in found) == COUNT
    assert max(one["worst"] for one in found) < 1e-12
    assert found[1]["own"] == 0 or found[1]["done"] < found[1]["own"]


class LateDevice:
    """A background that gets its device after more time than a rank waits for others.

    It is a clock too, so no time passes.
    """

    def __init__(self) -> None:
        self.now_s, self.left_s = 0.0, 200.0
        self.sleep = time.sleep

    def perf_counter(self) -> float:
        return self.now_s

    def wait(self, label: str, *, timeout_s: float) -> bool:
        del label, timeout_s
        self.now_s, self.left_s = self.now_s + 20.0, self.left_s - 20.0
        return self.left_s <= 0.0

    def end_task(self) -> None:
        """Do nothing."""


def rank_without_its_device(rank: int, size: int) -> float:
    torch.set_default_dtype(torch.float64)
    model, device = model_of(), LateDevice()
    background: Any = device
    gang = stretto.Gang(
        model, micro_batches=COUNT, seed=3, background=background, timeout_s=60.0
    )
    gang_module.time = background
    try:
        train(gang, model, 1)
    finally:
        gang_module.time = time
    return difference(model, 1)


def test_a_gang_waits_for_its_devices_however_long(ranks: Any) -> None:
    assert ranks(rank_without_its_device, 1)[0] < 1e-12


def rank_leaves_early(rank: int, size: int) -> tuple[str, float]:
    torch.set_default_dtype(torch.float64)
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=60.0)
    for index in gang.claims():
        loss_of(model, 0, index).backward()
        break
    began_s = time.perf_counter()
    with pytest.raises(SpecError) as caught:
        gang.reduce()
    return str(caught.value), time.perf_counter() - began_s


def test_ranks_that_all_leave_their_claims_early_get_one_error(ranks: Any) -> None:
    found = ranks(rank_leaves_early, 2)
    (text,) = {text for text, _ in found}
    assert "step 0 of a gang: every rank left its loop over claims() early" in text
    assert f"and {COUNT} of {COUNT} micro-batches have no gradient" in text
    assert all(seconds < 60.0 for _, seconds in found)  # not by the timeout


def rank_replays(rank: int, size: int) -> bool:
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for index in gang.claims():
        loss_of(model, 0, index).backward()
        time.sleep(0.02 * rank)
    gang.reduce()
    grads = [p.grad.clone() for p in model.parameters()]
    state = gang.state_dict()
    assert sorted(i for row in state["last_claims"] for i in row) == list(range(COUNT))
    for p in model.parameters():
        p.grad = None
    model.load_state_dict(before)
    gang.replay(state)
    for index in gang.claims():
        loss_of(model, 0, index).backward()
    gang.reduce()
    equal = all(
        torch.equal(p.grad, grad)
        for p, grad in zip(model.parameters(), grads, strict=True)
    )
    return equal and gang.step == 1


def test_a_step_is_replayed_bit_for_bit(ranks: Any) -> None:
    assert all(ranks(rank_replays, 3))


def rank_leaves_the_loop(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 leaves its first micro-batch; rank 0 computes that one too."""
    torch.set_default_dtype(torch.float64)
    model = model_of()
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3, timeout_s=30.0)
    for index in gang.claims():
        loss_of(model, 0, index).backward()
        if rank == 1:
            break
    gang.reduce()
    torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9).step()
    worst = difference(model, 1)
    return {"done": len(gang._done), "worst": worst}


def test_a_rank_that_leaves_its_loop_loses_nothing(ranks: Any) -> None:
    found = ranks(rank_leaves_the_loop, 2)
    assert found[1]["done"] == 0
    assert max(one["worst"] for one in found) < 1e-12


def rank_disagrees(rank: int, size: int) -> str:
    try:
        stretto.Gang(model_of(), micro_batches=COUNT + rank)
    except RankDisagreement as exc:
        return str(exc)
    return ""


def test_ranks_that_disagree_are_refused_together(ranks: Any) -> None:
    for text in ranks(rank_disagrees, 2):
        assert "micro_batches" in text


def rank_misuses(rank: int, size: int) -> list[str]:
    found = []
    with pytest.raises(SpecError) as caught:
        stretto.Gang(model_of(), micro_batches=0)
    found.append(str(caught.value))
    norms = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    gang = stretto.Gang(norms, micro_batches=2)
    with pytest.raises(SpecError) as caught:
        next(iter(gang.claims()))
    found.append(str(caught.value))
    with pytest.raises(SpecError) as caught:
        gang.reduce()
    found.append(str(caught.value))
    with pytest.raises(SpecError) as caught:
        gang.replay({"last_claims": [[]] * 5, "step": 2})
    found.append(str(caught.value))
    with pytest.raises(SpecError) as caught:
        gang.load_state_dict({"seed": 9, "micro_batches": 2, "step": 1})
    found.append(str(caught.value))
    return found


def test_what_cannot_be_exact_is_refused(ranks: Any) -> None:
    for texts in ranks(rank_misuses, 2):
        for text, part in zip(
            texts,
            ["at least 1", "running statistics", "loop over claims", "5 ranks", "seed"],
            strict=True,
        ):
            assert part in text


def rank_changes_buffers(rank: int, size: int) -> list[str]:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), model_of()[1:]
    )
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stretto.gang.gang").addHandler(handler)
    gang = stretto.Gang(model, micro_batches=COUNT, seed=3)
    train(gang, model, 2)
    return found


def test_a_buffer_that_forward_changes_is_reported_once(ranks: Any) -> None:
    (lines,) = ranks(rank_changes_buffers, 1)
    (line,) = lines
    assert "buffer 0.parametrizations.weight.0._u and 1 more" in line


def rank_beside_a_foreground(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Only rank 0's device is free; the other has a foreground that never waits."""
    os.environ["STRETTO_RUNTIME_DIR"] = folder
    torch.set_default_dtype(torch.float64)
    foreground = stretto.Foreground("exclusive:g1") if rank == 1 else None
    if foreground is not None:
        foreground.step()
    model = model_of()
    with stretto.Background(f"exclusive:g{rank}") as background:
        gang = stretto.Gang(
            model, micro_batches=COUNT, seed=3, background=background, timeout_s=30.0
        )
        counts = train(gang, model, 2)
    worst = difference(model, 2)
    return {"counts": counts, "worst": worst}


def test_a_rank_without_its_device_does_nothing_and_stays_equal(
    ranks: Any, tmp_path: Any
) -> None:
    found = ranks(rank_beside_a_foreground, 2, str(tmp_path / "run"))
    assert found[0]["counts"] == [COUNT, COUNT]
    assert found[1]["counts"] == [0, 0]
    assert max(one["worst"] for one in found) < 1e-12
