"""NaN and infinity: step, parameter and origin named, on every rank, when asked."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stretto.errors import NumericsError, SpecError
from stretto.runtime import DistributedDataParallel
from support.checks import Lines
from support.nets import Given
from support.plans import plan_in_turn
from support.ranks import Ranks

if TYPE_CHECKING:
    from stretto.schema import Plan
    from support.ranks import RankServers

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


SIZES = (3, 40, 7)


def given_plan(ranks: int, wire: str = "float32", **how: Any) -> Plan:
    """One bucket of the last two tensors, one of the first."""
    return plan_in_turn((("w.2", "w.1"), ("w.0",)), ranks=ranks, wire_dtype=wire, **how)


def ones(value: float = 1.0, at: int | None = None) -> list[torch.Tensor]:
    gradients = [torch.ones(n) for n in SIZES]
    if at is not None:
        gradients[at][-1] = value
    return gradients


NAN, INF = float("nan"), float("inf")

CASES: dict[str, Any] = {
    "plan": {},
    "lanes and slices": {"lanes": 2, "slices": 3},
    "deferred": {"lanes": 2, "overlap": "none"},
    "narrow": {"wire": "bfloat16", "lanes": 2},
    "views": {"views": True},
    "static": {"static": True},
    "ddp's rule": {"plan": None},
    "ddp's rule, views": {"plan": None, "views": True},
}


def build(size: int, *, nan: str, patience: int = 0, **case: Any) -> Any:
    options = {
        "gradient_as_bucket_view": case.pop("views", False),
        "static_graph": case.pop("static", False),
    }
    plan = None if "plan" in case else given_plan(size, **case)
    return DistributedDataParallel(
        Given(*SIZES), plan=plan, nan=nan, nan_patience=patience, **options
    )


def rank_that_raises(rank: int, size: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, case in CASES.items():
        model = build(size, nan="raise", **case)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen: list[Any] = []
        # In the very first step, from one rank; later from another; then from none.
        steps = [ones(NAN, 1) if rank == 1 else ones(), ones(), ones()]
        steps += [ones(INF, 0) if rank == 0 else ones(), ones(), ones(3e38, 2)]
        for gradients in steps:
            optimizer.zero_grad()
            loss = model(gradients)
            if gradients[2][-1] > 1e38:
                # Each rank's own is finite, times the ranks in the sum is not.
                loss = loss * 1.1
            try:
                loss.backward()
            except NumericsError as exc:
                seen.append(str(exc))
                continue
            optimizer.step()
            seen.append([float(p.detach()[0]) for p in model.parameters()])
        found[name] = seen
    return found


def test_raise_names_step_parameter_and_origin_before_the_optimizer(
    ranks: Any,
) -> None:
    everyone = ranks(rank_that_raises, 3)
    for rank, found in enumerate(everyone):
        for name, seen in found.items():
            first, second, third, fourth, fifth, last = seen
            assert first.startswith(f"rank {rank}: step 0: the gradient of 'w.1' "), (
                name,
                first,
            )
            assert "before the reduction, in the local gradient of rank 1" in first
            assert "rank 0" not in first.partition(";")[2]
            # No step of the optimizer saw it.
            assert second == [-1.0] * 3
            assert third == [-2.0] * 3
            assert ": step 3: the gradient of 'w.0' " in fourth
            assert "in the local gradient of rank 0" in fourth
            assert fifth == [-3.0] * 3
            if "narrow" in name:
                # 3.3e38 is finite in float32 and rounds to it in bfloat16.
                continue
            # The mean of equal values: DDP divides first, so nothing overflows.
            assert last == [pytest.approx(-4.1)] * 3, name
        # With gradients of its own a rank names its parameter.
        assert "rank 1 ('w.1')" in found["plan"][3 - 3] or "rank 1." in found["plan"][0]
        assert "rank 0 ('w.0')" in found["plan"][3]
        assert "rank 0." in found["views"][3]


def rank_that_warns(rank: int, size: int) -> dict[str, Any]:
    lines = Lines(logging.WARNING, "stretto.runtime.nan_check")
    found: dict[str, Any] = {}
    # Off: nothing is said.
    model = build(size, nan="off")
    model(ones(NAN, 0)).backward()
    model(ones(NAN, 0)).backward()
    found["off"] = list(lines.lines)
    # A warning is repeated, and comes ever more rarely while nothing changes.
    model = build(size, nan="warn")
    for _ in range(9):
        model(ones(NAN, 0) if rank else ones()).backward()
    found["warn"] = list(lines.lines)
    assert torch.isnan(next(model.parameters()).grad[-1])
    lines.lines.clear()
    # What only the wire overflows was in no rank's own gradient.
    model = build(size, nan="warn", wire="float16")
    model(ones()).backward()
    model.zero_grad()
    model(ones(1e6, 1)).backward()
    found["wire"] = list(lines.lines)
    lines.lines.clear()
    # A new plan continues counting; finite values whose sum overflows are no finding.
    model = build(size, nan="raise")
    model(ones()).backward()
    model.apply_plan(given_plan(size, lanes=2))
    model.zero_grad()
    model([torch.full((n,), 3e38) for n in SIZES]).backward()
    model.zero_grad()
    try:
        model(ones(INF, 2)).backward()
    except NumericsError as exc:
        found["replanned"] = str(exc)
    # no_sync reduces nothing; what it left is found in the step that does.
    model.zero_grad()
    with model.no_sync():
        model(ones(NAN, 1) if rank == 0 else ones()).backward()
    try:
        model(ones()).backward()
    except NumericsError as exc:
        found["no_sync"] = str(exc)
    # A GradScaler finds its scale within the patience, and then one is reported.
    model = build(size, nan="raise", patience=3, wire="float16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(ones())).backward()
        scaler.step(optimizer)
        scaler.update()
    found["weight"] = float(next(model.parameters())[0].detach())
    count = 0
    try:
        for _ in range(10):
            optimizer.zero_grad()
            model(ones(NAN, 1)).backward()
            count += 1
    except NumericsError as exc:
        found["patience"] = (count, str(exc))
    return found


@pytest.fixture(scope="module")
def warned(
    tmp_path_factory: pytest.TempPathFactory, rank_servers: RankServers
) -> list[dict[str, Any]]:
    """What each rank found in the cases of `rank_that_warns`."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), rank_servers)
    rows: list[dict[str, Any]] = ranks(rank_that_warns, 2)
    return rows


def test_rank_0_warns_of_some_steps_and_names_the_ranks(warned: Any) -> None:
    lines = warned[0]["warn"]
    assert [line.partition(": the")[0] for line in lines] == [
        f"rank 0: step {step}" for step in (0, 1, 3, 7)
    ]
    assert "the local gradient of rank 1" in lines[0]
    assert warned[1]["warn"] == []


def test_an_overflow_of_the_wire_type_is_named(warned: Any) -> None:
    (line,) = warned[0]["wire"]
    assert "'w.1'" in line
    assert "finite before the reduction on every rank" in line
    assert "wire_dtype" in line
    assert warned[1]["wire"] == []


def test_nothing_is_found_where_the_check_is_off(warned: Any) -> None:
    assert [found["off"] for found in warned] == [[], []]


def test_the_check_continues_after_another_plan_and_after_no_sync(warned: Any) -> None:
    for found in warned:
        assert "step 2: the gradient of 'w.2' " in found["replanned"]
        assert "rank 0 ('w.2'), rank 1 ('w.2')" in found["replanned"] or (
            "rank 0, rank 1." in found["replanned"]
        )
        assert "the local gradient of rank 0 ('w.1')" in found["no_sync"]


def test_a_scaler_finds_its_scale_within_the_patience(warned: Any) -> None:
    assert [found["weight"] for found in warned] == [-2.0, -2.0]


def test_patience_ends_after_consecutive_steps(warned: Any) -> None:
    for found in warned:
        assert found["patience"][0] == 3
        assert "4 consecutive steps have had such gradients." in found["patience"][1]


def rank_alone(rank: int, size: int) -> list[str]:
    del rank
    found = []
    for case in ({}, {"plan": None}):
        model = build(size, nan="raise", **case)
        model(ones()).backward()
        try:
            model(ones(NAN, 1)).backward()
        except NumericsError as exc:
            found.append(str(exc))
    for wrong in ({"nan": "on"}, {"nan": "raise", "patience": -1}):
        try:
            build(size, **wrong)
        except SpecError as exc:
            found.append(str(exc))
    return found


def test_a_rank_alone_names_the_tensor_and_invalid_options(ranks: Any) -> None:
    ((planned, plain, word, patience),) = ranks(rank_alone, 1)
    for text in (planned, plain):
        assert text.startswith("rank 0: step 1: the gradient of 'w.1' is not finite")
    assert word == "nan must be one of 'off', 'warn', 'raise', got 'on'"
    assert patience == "nan_patience must be >= 0 steps, got -1"
