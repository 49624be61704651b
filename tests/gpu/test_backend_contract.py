"""The contract of backends on NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stretto.testing.backends import CASES, run_case


def rank_of_a_case(rank: int, size: int, case: str) -> str:
    run_case(case, backend="nccl", device="cuda")
    torch.cuda.synchronize()
    return "done"


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name].on_streams])
def test_nccl_keeps_the_contract(gpu_ranks: Any, case: str) -> None:
    size = CASES[case].ranks
    assert gpu_ranks(rank_of_a_case, size, case) == ["done"] * size
