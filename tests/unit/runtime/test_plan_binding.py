"""A plan's buckets on the wire: what is executed and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stretto.errors import PlanMismatch, SpecError
from stretto.runtime import ddp
from stretto.runtime.plan_binding import parameter_rows, schedules_of
from support.plans import plan_in_turn


def schedules(module: nn.Module, backend: str = "gloo", **bucket: Any) -> Any:
    table = parameter_rows(module)
    bucket = {"wire_dtype": table[0][0].dtype} | bucket
    plan = plan_in_turn([[row.name for row, _ in table]], lanes=2, **bucket)
    device = next(module.parameters()).device
    return schedules_of(plan, table, module, backend=backend, device=device)


@pytest.mark.parametrize(
    ("dtype", "wire", "expected"),
    [
        (torch.float32, "float32", None),
        (torch.float32, "float16", "float16"),
        (torch.float32, "bfloat16", "bfloat16"),
        (torch.float64, "float32", "float32"),
        (torch.float16, "float16", None),
    ],
)
def test_a_narrower_type_is_converted_to(
    dtype: torch.dtype, wire: str, expected: str | None
) -> None:
    (schedule,) = schedules(nn.Linear(3, 5).to(dtype), wire_dtype=wire, slices=3)
    assert schedule.wire == expected
    assert [(p.start, p.end) for p in schedule.slices] == [(0, 7), (7, 14), (14, 20)]
    assert [p.lane for p in schedule.slices] == [0, 1, 0]


@pytest.mark.parametrize(
    ("dtype", "wire", "instead"),
    [
        (torch.float32, "float64", "float32 or float16 or bfloat16"),
        (torch.float16, "float32", "set wire_dtype to float16."),
        (torch.float16, "bfloat16", "set wire_dtype to float16."),
        (torch.float64, "float16", "float64 or float32"),
    ],
)
def test_a_type_that_is_not_narrower_is_refused(
    dtype: torch.dtype, wire: str, instead: str
) -> None:
    with pytest.raises(PlanMismatch, match="bucket 0 has wire_dtype") as raised:
        schedules(nn.Linear(3, 5).to(dtype), wire_dtype=wire)
    assert instead in str(raised.value)


def test_sparse_gradients_are_not_converted() -> None:
    with pytest.raises(PlanMismatch, match="sparse float32"):
        schedules(nn.Embedding(4, 3, sparse=True), wire_dtype="float16")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_levels_are_refused_where_tensors_are_not_on_the_cpu(backend: str) -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 5)
    why = (
        f"{backend} lanes do not support algorithm 'hierarchical' of bucket 0 with "
        "tensors on meta: plan with ring."
    )
    with pytest.raises(PlanMismatch, match=why):
        schedules(module, backend, algorithm="hierarchical")
    plan = plan_in_turn([["weight", "bias"]], algorithm="hierarchical")
    assert ddp._lane_backend_for(plan, NoGroup(), module) is None


class NoGroup:
    """Stands for a group that must not be asked for its backends."""


def test_an_object_as_lane_backend_is_refused_with_how_to_make_it_known() -> None:
    with pytest.raises(SpecError, match=r"backends\.register\(backend\) on every rank"):
        ddp._check_lane_backend(object())


def test_gloo_converts_on_the_cpu_only() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 5)
    with pytest.raises(PlanMismatch, match=r"(on the CPU|cpu) "):
        schedules(module, wire_dtype="float16")
