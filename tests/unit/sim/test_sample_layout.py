"""Where samples are: every sample on one rank, and only what must move moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cost.burst import samples_on
from stretto.sim.sample_layout import Layouts


@st.composite
def batches(draw):
    world = draw(st.integers(1, 6))
    shares = draw(st.lists(st.integers(0, 9), min_size=world, max_size=world))
    return Layouts(shares)


@st.composite
def ranges(draw, world):
    first = draw(st.integers(0, world - 1))
    return first, draw(st.integers(1, world - first))


def rows_of(rows):
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else list(rows)


@given(batches(), st.data())
def test_every_sample_is_on_one_rank_of_the_layer_and_shares_differ_by_one(
    layouts, data
):
    first, width = data.draw(ranges(len(layouts.shares)))
    held = layouts.samples((first, width))
    assert sorted(np.concatenate(held)) == list(range(layouts.num_samples))
    sizes = [len(numbers) for numbers in held]
    assert max(sizes[first : first + width]) == samples_on(layouts.num_samples, width)
    inside = sizes[first : first + width]
    assert inside == sorted(inside, reverse=True)
    assert max(inside) - min(inside) <= 1
    assert sum(sizes) == sum(inside)


@given(batches(), st.data())
def test_a_transfer_brings_each_sample_to_its_row_and_back(layouts, data):
    world = len(layouts.shares)
    source = data.draw(st.none() | ranges(world))
    target = data.draw(st.none() | ranges(world))
    before, after = layouts.samples(source), layouts.samples(target)
    moves = [layouts.transfer(source, target, rank) for rank in range(world)]
    if all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
        assert moves == [None] * world
        return
    for there in (True, False):
        ways = [move if there else move.back for move in moves]
        origin, goal = (before, after) if there else (after, before)
        # What each sends, by sender and receiver: numbers in the order on the wire.
        wire = {
            (rank, peer): origin[rank][rows_of(rows)]
            for rank, way in enumerate(ways)
            for peer, rows in way.sends
        }
        assert all(sender != receiver for sender, receiver in wire)
        for rank, way in enumerate(ways):
            found = np.full(way.num_after, -1)
            for here, then in way.kept:
                found[rows_of(then)] = origin[rank][rows_of(here)]
            for peer, rows in way.receives:
                found[rows_of(rows)] = wire.pop((peer, rank))
            assert np.array_equal(found, goal[rank])
        assert not wire


@pytest.mark.parametrize(("wide", "narrow"), [(4, 2), (4, 1), (4, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("batch", [32, 13, 7])
def test_a_narrower_layer_keeps_what_its_ranks_have(wide, narrow, batch):
    shares = [len(numbers) for numbers in Layouts([batch, 0, 0, 0]).samples((0, 4))]
    layouts = Layouts(shares)
    before, after = layouts.samples((0, wide)), layouts.samples((0, narrow))
    for rank in range(narrow):
        assert set(before[rank]) <= set(after[rank])
    # Nothing moves where the shares are what a layer on all ranks wants.
    assert layouts.transfer(None, (0, 4), 0) is None
