"""Attempts to meet, of which some fail on some ranks only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from stretto.errors import CommTimeout
from stretto.horovod.attempts import begin_attempt
from stretto.runtime.ranks import Ranks

pytestmark = pytest.mark.timeout(60)


def place(store: Any, rank: int, size: int, timeout_s: float = 30.0) -> Ranks:
    return Ranks(
        rank=rank,
        size=size,
        names=tuple(range(size)),
        store=store,
        timeout_s=timeout_s,
    )


def met(store: Any, size: int) -> list[int]:
    """The number of the attempt that each rank makes."""
    with ThreadPoolExecutor(size) as pool:
        ranks = [place(store, rank, size) for rank in range(size)]
        return list(pool.map(lambda r: begin_attempt(r, store, "meet"), ranks))


def test_ranks_count_their_attempts_equally() -> None:
    store = dist.HashStore()
    assert [met(store, 3) for _ in range(3)] == [[1] * 3, [2] * 3, [3] * 3]


@pytest.mark.parametrize("alone", [0, 1])
def test_ranks_meet_after_one_of_them_has_failed_alone(alone: int) -> None:
    store = dist.HashStore()
    missing = "rank 1 did not arrive" if alone == 0 else "rank 0 did not meet, too"
    for _ in range(2):
        with pytest.raises(CommTimeout, match=missing):
            begin_attempt(place(store, alone, 2, timeout_s=0.01), store, "meet")
    first, second = met(store, 2)
    assert first == second


def test_a_meeting_leaves_the_keys_of_one_attempt() -> None:
    store = dist.HashStore()
    met(store, 2)
    before = store.num_keys()
    for _ in range(3):
        met(store, 2)
    assert store.num_keys() == before
