"""The contract of backends, on each backend that runs without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.testing.backends import CASES, run_case

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def rank_of_a_case(rank: int, size: int, case: str, backend: str) -> str:
    run_case(case, backend=backend)
    return "done"


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize("case", CASES)
def test_a_backend_keeps_the_contract(ranks: Any, case: str, backend: str) -> None:
    known = CASES[case]
    dies = known.dies is not None
    found = ranks(rank_of_a_case, known.ranks, case, backend, errors=dies, timeout_s=60)
    survivors = [one for rank, one in enumerate(found) if rank != known.dies]
    assert survivors == ["done"] * len(survivors), found
