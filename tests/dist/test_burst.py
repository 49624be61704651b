"""Burst-parallel training against one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import burst_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


def rank_in_float64(
    rank: int, size: int, seed: int, kind: str, shares: str, more: Any
) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    return burst_ranks.compare(kind, rank, size, seed=seed, shares=shares, **more)


CASES = [
    (4, "vgg11", "uneven", {"steps": 20}),
    (4, "vgg16", "even", {"steps": 3, "bucket_bytes": 256, "lanes": 2}),
    (4, "vgg11", "one", {"steps": 2, "batch": 3}),
    (4, "transformer", "uneven", {"steps": 20}),
    (4, "inception", "uneven", {"steps": 20, "lr": 1e-4}),
    (2, "inception", "even", {"steps": 20, "lr": 1e-4}),
    (4, "wide resnet", "even", {"steps": 20, "lr": 1e-4}),
    (2, "wide resnet", "uneven", {"steps": 20, "lr": 1e-4}),
    (2, "vgg16", "uneven", {"steps": 20}),
    (2, "transformer", "one", {"steps": 3}),
]


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]} on {case[0]}")
def test_losses_gradients_and_state_are_those_of_one_process(
    ranks: Any, case: tuple[int, str, str, dict[str, Any]]
) -> None:
    size, *rest = case
    seed = CASES.index(case)
    everyone = ranks(rank_in_float64, size, seed, *rest, timeout_s=170, group_s=120)
    for rank, differences in enumerate(everyone):
        for what, value in differences.items():
            assert value < 1e-10, (rank, what, value)


def rank_in_float32(rank: int, size: int) -> list[dict[str, float]]:
    return [
        burst_ranks.compare(
            kind, rank, size, seed=7, shares="uneven", steps=20, dtype=torch.float32
        )
        for kind in ("vgg11", "transformer")
    ]


def test_in_single_precision_too(ranks: Any) -> None:
    for found in ranks(rank_in_float32, 3, timeout_s=120, group_s=60):
        for differences in found:
            assert differences["loss"] < 1e-5
            assert differences["grad"] < 1e-5, differences
