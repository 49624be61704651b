"""What DDP's constructor refuses, ours refuses with the same error."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from torch import nn

import stretto

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


class Meta(nn.Module):
    """Parameters of two device types."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(2, 2)
        self.there = nn.Linear(2, 2, device="meta")


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(requires_grad=False)


CASES: dict[str, Any] = {
    "nothing to train": lambda wrap: wrap(frozen()),
    "no parameters": lambda wrap: wrap(nn.ReLU()),
    "uninitialized": lambda wrap: wrap(nn.LazyLinear(3)),
    "lazy and frozen": lambda wrap: wrap(nn.Sequential(nn.LazyLinear(3), frozen())),
    "two device types": lambda wrap: wrap(Meta()),
    "device ids on a CPU": lambda wrap: wrap(nn.Linear(2, 2), device_ids=[0]),
    "two device ids": lambda wrap: wrap(nn.Linear(2, 2), device_ids=[0, 1]),
    "output device": lambda wrap: wrap(nn.Linear(2, 2), output_device=0),
    "unknown option": lambda wrap: wrap(nn.Linear(2, 2), no_such_option=1),
    "no module": lambda wrap: wrap(),
    "a negative cap": lambda wrap: wrap(nn.Linear(2, 2), bucket_cap_mb=-1),
    "cap of a word": lambda wrap: wrap(nn.Linear(2, 2), bucket_cap_mb="much"),
}


def errors(wrap: Any) -> dict[str, tuple[str, str]]:
    found = {}
    for name, case in CASES.items():
        try:
            case(wrap)
        except Exception as exc:  # noqa: BLE001 - errors are compared
            # A call's own words name the class.
            line = (str(exc).splitlines() or [""])[0]
            found[name] = (type(exc).__name__, line.split("__init__()")[-1].strip())
        else:
            found[name] = ("none", "")
    return found


def rank_builds(rank: int, size: int) -> tuple[Any, Any]:
    return errors(nn.parallel.DistributedDataParallel), errors(stretto.DDP)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_errors_of_the_constructor_are_ddp_s(ranks: Any, size: int) -> None:
    assert torch.distributed.is_available()
    for theirs, ours in ranks(rank_builds, size):
        assert ours == theirs


INVALID: tuple[dict[str, Any], ...] = (
    {"plan": 3},
    {"plan": "no-such-plan.json"},
    {"tune": {"steps": 3}},
    {"wire_dtype": "int8"},
    {"overlap": "sideways"},
    {"order": "sorted"},
    {"order": "negotiated", "lanes": 0},
    {"order": "negotiated", "unit_bytes": "1"},
    {"nan": "perhaps"},
    {"nan": "warn", "nan_patience": "1"},
    {"timeout_s": 0},
    {"timeout_s": "5"},
    {"record": "steps.json"},
    {"on_settled": "print"},
    {"lane_backend": "pigeon"},
)


def one_rank_has_invalid_options(rank: int, size: int) -> list[str]:
    found = []
    for options in INVALID:
        try:
            stretto.DDP(nn.Linear(2, 2), **(options if rank else {}))
        except Exception as exc:  # noqa: BLE001 - errors are compared
            found.append(type(exc).__name__)
        else:
            found.append("none")
    return found


def test_an_option_that_is_invalid_on_one_rank_is_an_error_on_all(ranks: Any) -> None:
    """The others waited for as long as the process group lets them."""
    others, mine = ranks(one_rank_has_invalid_options, 2, group_s=100.0)
    assert others == ["RankDisagreement"] * len(INVALID)
    assert mine == ["SpecError"] * (len(INVALID) - 1) + ["PlanMismatch"]


def one_rank_tunes_on_another_schedule(rank: int, size: int) -> list[tuple[str, str]]:
    found = []
    for first, other in (("forced", ""), ("", "forcd")):
        os.environ["STRETTO_TUNE_SCHEDULE"] = other if rank else first
        try:
            stretto.DDP(nn.Linear(2, 2))
        except Exception as exc:  # noqa: BLE001 - errors are compared
            found.append((type(exc).__name__, str(exc)))
        else:
            found.append(("none", ""))
    return found


def test_schedules_that_differ_or_do_not_exist_are_errors_on_all(ranks: Any) -> None:
    others, mine = ranks(one_rank_tunes_on_another_schedule, 2, group_s=100.0)
    assert others[0] == mine[0]
    assert "rank 0 reported 'forced'; rank 1 reported ''" in mine[0][1]
    assert [others[1][0], mine[1][0]] == ["RankDisagreement", "SpecError"]


def test_variables_that_are_empty_count_as_not_set(
    ranks: Any, monkeypatch: Any
) -> None:
    for name in ("PLAN", "OVERLAP", "LANE_BACKEND", "TUNE_SCHEDULE"):
        monkeypatch.setenv(f"STRETTO_{name}", "")
    assert ranks(builds, 2) == ["gloo"] * 2


def builds(_rank: int, _size: int) -> str:
    return stretto.DDP(nn.Linear(2, 2)).backend


def test_the_signature_has_ddp_s_arguments_in_ddp_s_order() -> None:
    theirs = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    ours = inspect.signature(stretto.DDP).parameters
    rows = [(p.name, p.kind, p.default) for p in theirs.values()]
    assert [(p.name, p.kind, p.default) for p in ours.values()][: len(rows)] == rows
    assert {"plan", "tune", "lane_backend"} <= ours.keys()
