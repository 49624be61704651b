"""The division of a step's samples among ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.elastic.batches import BatchSize, ShareSampler, order_of, share
from stretto.errors import SpecError


@given(samples=st.integers(0, 100), ranks=st.integers(1, 9))
def test_shares_cover_all_samples_once(samples: int, ranks: int) -> None:
    shares = [share(samples, ranks, rank) for rank in range(ranks)]
    assert [i for row in shares for i in row] == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["512", 512, "global", "rank:0", "all:3", "rank:-1"])
def test_other_batch_sizes_are_refused(text: Any) -> None:
    with pytest.raises(SpecError, match="global:SAMPLES"):
        BatchSize.of(text)


@given(
    samples=st.integers(1, 60),
    size=st.sampled_from(["global:7", "rank:3", "global:1"]),
    ranks=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_weighted_samples_count_once_whatever_ranks_change(
    samples: int, size: str, ranks: list[int]
) -> None:
    batch = BatchSize.of(size)
    order = order_of(samples, epoch=1, seed=2, shuffle=True)
    counted = dict.fromkeys(range(samples), 0.0)
    done = 0
    while done < samples:
        count = ranks[done % len(ranks)]
        step = 0
        for rank in range(count):
            sampler = ShareSampler(order, batch)
            sampler.divide(done, rank=rank, ranks=count, division=0)
            indices = next(iter(sampler))
            (stamp,) = sampler.stamps
            step = stamp.samples
            for index in indices:  # a mean over the rank's samples, then over ranks
                counted[index] += stamp.weight / len(indices) / count * step
        done += step
    assert counted == pytest.approx(dict.fromkeys(range(samples), 1.0))


def test_equal_shares_have_weight_1() -> None:
    sampler = ShareSampler(list(range(8)), BatchSize.of("global:8"))
    sampler.divide(0, rank=1, ranks=4, division=0)
    assert list(sampler) == [[2, 3]]
    assert sampler.stamps[0].weight == 1.0


def test_batches_fetched_before_a_change_have_its_stamp() -> None:
    sampler = ShareSampler(list(range(8)), BatchSize.of("rank:2"))
    sampler.divide(0, rank=0, ranks=2, division=5)
    batches = iter(sampler)
    assert next(batches) == [0, 1]
    sampler.divide(0, rank=0, ranks=1, division=6)
    assert next(batches) == [0, 1]
    assert [stamp.division for stamp in sampler.stamps] == [5, 6]
