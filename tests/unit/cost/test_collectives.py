from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cost import (
    all_reduce_s,
    collective_cost,
    ring_all_reduce_s,
    startup_steps,
    wire_factor,
)
from stretto.errors import SpecError
from stretto.schema import AllReduceFit, Cluster, Link
from stretto.schema.plan import ALGORITHMS
from stretto.testing import strategies as own


def exchanged(ranks: int) -> tuple[float, int]:
    """Share of the message that a rank sends, and rounds, by doing halving-doubling."""
    sent, rounds, part, distance = 0.0, 0, 1.0, 1
    while distance < ranks:
        part /= 2
        sent += part
        rounds += 1
        distance *= 2
    return 2 * sent, 2 * rounds


def walked(ranks: int) -> tuple[float, int]:
    """Share of the message that a rank sends, and rounds, by walking a ring twice."""
    sent, rounds = 0.0, 0
    for _ in ("reduce-scatter", "all-gather"):
        for _ in range(ranks - 1):
            sent += 1 / ranks
            rounds += 1
    return sent, rounds


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 32])
def test_ring_counts_what_a_walk_around_it_counts(ranks):
    sent, rounds = walked(ranks)
    assert wire_factor("ring", ranks) == pytest.approx(sent, rel=1e-12)
    assert startup_steps("ring", ranks) == rounds


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_halving_doubling_counts_what_its_rounds_count(ranks):
    sent, rounds = exchanged(ranks)
    assert wire_factor("halving_doubling", ranks) == pytest.approx(sent, rel=1e-12)
    assert startup_steps("halving_doubling", ranks) == rounds


def test_halving_doubling_pays_for_ranks_beyond_a_power_of_two():
    assert wire_factor("halving_doubling", 6) == wire_factor("halving_doubling", 4) + 2
    assert (
        startup_steps("halving_doubling", 6) == startup_steps("halving_doubling", 4) + 2
    )


@pytest.mark.parametrize(("ranks", "steps"), [(2, 2), (3, 4), (8, 6), (2048, 22)])
def test_tree_grows_with_the_logarithm(ranks, steps):
    assert startup_steps("tree", ranks) == steps
    assert wire_factor("tree", ranks) == 2


def test_hierarchical_is_a_ring_over_hosts_between_them():
    assert wire_factor("hierarchical", 32, ranks_per_host=4) == wire_factor("ring", 8)
    assert startup_steps("hierarchical", 32, ranks_per_host=4) == 2 * 3 + 2 * 7
    assert wire_factor("hierarchical", 8) == wire_factor("ring", 8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_sends_nothing(algorithm):
    assert wire_factor(algorithm, 1) == 0
    assert startup_steps(algorithm, 1) == 0


@pytest.mark.parametrize("call", [wire_factor, startup_steps])
def test_bad_arguments_are_named(call):
    with pytest.raises(SpecError, match="'star'"):
        call("star", 4)
    with pytest.raises(SpecError, match=r"multiple of ranks_per_host \(4\), got 6"):
        call("ring", 6, ranks_per_host=4)


@given(
    st.sampled_from(ALGORITHMS[:3]),
    st.integers(1, 4000),
)
def test_no_all_reduce_sends_less_than_reduction_needs(algorithm, ranks):
    # Each rank must take in the others' share of its part and give it back.
    assert wire_factor(algorithm, ranks) >= 2 * (ranks - 1) / ranks


def test_latency_decides_ring_against_doubling_at_2048_ranks():
    # algorithms.md 6.3: 40.9 ms against 0.22 ms with 10 us per step.
    assert startup_steps("ring", 2048) * 1e-5 == pytest.approx(40.9e-3, rel=2e-3)
    assert startup_steps("halving_doubling", 2048) * 1e-5 == pytest.approx(0.22e-3)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 64))
def test_merging_two_messages_never_costs_more(one, other, ranks):
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9, stream_bytes_per_s=3e8)
    apart = ring_all_reduce_s(one, ranks, link) + ring_all_reduce_s(other, ranks, link)
    assert ring_all_reduce_s(one + other, ranks, link) <= apart * (1 + 1e-12)


def cluster(**changes):
    values = {
        "name": "c",
        "hosts": 4,
        "ranks_per_host": 1,
        "inter_host": Link(latency_s=2e-5, bandwidth_bytes_per_s=1e9),
        "intra_host": Link(latency_s=5e-6, bandwidth_bytes_per_s=1e10),
    }
    return Cluster(**(values | changes))


def test_link_figures_give_the_ring_formula():
    c = cluster(ranks_per_host=2)
    expected = ring_all_reduce_s(10**7, 8, c.inter_host)
    assert all_reduce_s(10**7, c) == pytest.approx(expected, rel=1e-12)


def test_one_host_uses_the_link_within_it():
    c = cluster(hosts=1, ranks_per_host=8)
    expected = ring_all_reduce_s(10**7, 8, c.intra_host)
    assert all_reduce_s(10**7, c) == pytest.approx(expected, rel=1e-12)
    assert all_reduce_s(10**7, c, "hierarchical") == pytest.approx(expected, rel=1e-12)


def test_a_fit_says_the_time_at_its_own_number_of_ranks():
    fit = AllReduceFit(startup_s=1.4e-3, s_per_byte=1.7e-9, ranks=4)
    took = all_reduce_s(10**7, cluster(allreduce=fit))
    assert took == pytest.approx(1.4e-3 + 1.7e-2, rel=1e-12)


def test_a_fit_is_rescaled_by_steps_and_wire_factor():
    fit = AllReduceFit(startup_s=6e-3, s_per_byte=1.5e-9, ranks=4)  # 6 steps, 1.5
    took = all_reduce_s(10**7, cluster(hosts=8, allreduce=fit))
    assert took == pytest.approx(14e-3 + 1.75e-2, rel=1e-12)
    tree = all_reduce_s(10**7, cluster(hosts=8, allreduce=fit), "tree")
    assert tree == pytest.approx(6e-3 + 2e-2, rel=1e-12)


def test_a_fit_faster_than_the_link_gives_way_to_it():
    fit = AllReduceFit(startup_s=0.0, s_per_byte=1e-12, ranks=4)
    assert all_reduce_s(10**9, cluster(allreduce=fit)) == pytest.approx(1.5, rel=1e-12)


def test_hierarchical_adds_rings_within_the_hosts():
    c = cluster(ranks_per_host=4)
    inner = ring_all_reduce_s(10**7, 4, c.intra_host)
    outer = ring_all_reduce_s(10**7, 4, c.inter_host)
    assert all_reduce_s(10**7, c, "hierarchical") == pytest.approx(
        inner + outer, rel=1e-12
    )


@given(own.clusters(contended=False), st.sampled_from(ALGORITHMS))
def test_costs_are_finite_and_grow_with_the_ranks(c, algorithm):
    more = replace(c, hosts=2 * c.hosts)
    small, large = collective_cost(c, algorithm), collective_cost(more, algorithm)
    assert math.isfinite(large.startup_s)
    if c.hosts > 1 and algorithm != "halving_doubling":
        assert small.startup_s <= large.startup_s
        assert small.wire_factor <= large.wire_factor


@given(st.integers(2, 5000), st.integers(1, 16))
def test_with_one_rank_a_host_two_levels_are_a_ring(hosts, ranks_per_host):
    for algorithm in ("hierarchical", "two_level_rails"):
        assert wire_factor(algorithm, hosts) == wire_factor("ring", hosts)
        assert startup_steps(algorithm, hosts) == startup_steps("ring", hosts)
    # Rails divide what one host's link carries by their number, and nothing else.
    ranks = hosts * ranks_per_host
    shared = wire_factor("hierarchical", ranks, ranks_per_host=ranks_per_host)
    rails = wire_factor("two_level_rails", ranks, ranks_per_host=ranks_per_host)
    assert rails * ranks_per_host == pytest.approx(shared, rel=1e-12)
    assert startup_steps(
        "two_level_rails", ranks, ranks_per_host=ranks_per_host
    ) == startup_steps("hierarchical", ranks, ranks_per_host=ranks_per_host)


@given(st.integers(2, 100_000))
def test_a_switch_halves_what_a_tree_sends_and_waits_as_long(ranks):
    assert wire_factor("in_network", ranks) == wire_factor("tree", ranks) / 2
    assert startup_steps("in_network", ranks) == startup_steps("tree", ranks)


@given(st.integers(1, 12))
def test_doubling_never_beats_the_ring_on_bytes_nor_loses_on_latency(exponent):
    # algorithms.md 6.3: "never on bandwidth, always on latency".
    ranks = 2**exponent
    assert wire_factor("halving_doubling", ranks) == wire_factor("ring", ranks)
    assert startup_steps("halving_doubling", ranks) <= startup_steps("ring", ranks)
    assert wire_factor("halving_doubling", ranks + 1) >= wire_factor("ring", ranks + 1)


def folded(ranks):
    """Bytes on the busiest link and rounds, by doing it message by message.

    Each round every rank sends at most one message; a round lasts as long as its
    longest. Ranks beyond the power of two hand over first and get the result last.
    """
    power = 2
    while power * 2 <= ranks:
        power *= 2
    rounds = [1.0] if ranks > power else []
    part = 1.0
    for _ in range(power.bit_length() - 1):
        part /= 2
        rounds.append(part)
    for _ in range(power.bit_length() - 1):
        rounds.append(part)
        part *= 2
    if ranks > power:
        rounds.append(1.0)
    return sum(rounds), len(rounds)


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 8, 9, 31, 33, 100])
def test_halving_doubling_counts_what_its_messages_count_for_any_ranks(ranks):
    sent, rounds = folded(ranks)
    assert wire_factor("halving_doubling", ranks) == pytest.approx(sent, rel=1e-12)
    assert startup_steps("halving_doubling", ranks) == rounds


def test_rails_take_their_share_of_the_message_between_hosts():
    c = cluster(ranks_per_host=4)
    inner = ring_all_reduce_s(10**7, 4, c.intra_host)
    outer = ring_all_reduce_s(10**7 // 4, 4, c.inter_host)
    assert all_reduce_s(10**7, c, "two_level_rails") == pytest.approx(
        inner + outer, rel=1e-12
    )


@given(
    own.clusters(contended=False),
    st.sampled_from(ALGORITHMS),
    st.integers(0, 10**9),
)
def test_scattering_and_gathering_are_an_all_reduce(c, algorithm, size_bytes):
    halves = [
        all_reduce_s(size_bytes, c, algorithm, part=part)
        for part in ("reduce_scatter", "all_gather")
    ]
    assert sum(halves) == pytest.approx(all_reduce_s(size_bytes, c, algorithm))
    assert halves[0] == halves[1]


def test_a_ring_scatters_in_one_walk():
    link = cluster().inter_host
    expected = 3 * link.latency_s + 3 / 4 * 10**7 / link.bandwidth_bytes_per_s
    took = all_reduce_s(10**7, cluster(), part="reduce_scatter")
    assert took == pytest.approx(expected, rel=1e-12)


def test_an_unknown_part_is_named():
    with pytest.raises(SpecError, match=r"all_gather, got 'gather'"):
        collective_cost(cluster(), part="gather")


@given(
    own.clusters(contended=False),
    st.sampled_from(ALGORITHMS),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_time_grows_with_bytes_and_latency(c, algorithm, one, other):
    low, high = sorted((one, other))
    took = all_reduce_s(low, c, algorithm)
    assert took <= all_reduce_s(high, c, algorithm)
    late = replace(
        c,
        allreduce=None
        if c.allreduce is None
        else replace(c.allreduce, startup_s=c.allreduce.startup_s + 1e-3),
        inter_host=replace(c.inter_host, latency_s=c.inter_host.latency_s + 1e-3),
        intra_host=replace(c.intra_host, latency_s=c.intra_host.latency_s + 1e-3),
    )
    assert took <= all_reduce_s(low, late, algorithm)
