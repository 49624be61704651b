"""Distances of jobs against hand-computed edits and the exact search."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.tune.job_similarity import (
    RateTopology,
    chain_distance,
    job_distance,
    topology_distance,
)

CHAIN = (4096, 2**20, 2**22, 2**18)
SIZES = st.lists(st.integers(1, 2**28), min_size=1, max_size=7)


def replaced(a: int, b: int) -> float:
    import math

    return 2 * min(1.0, abs(math.log2(a / b)) / 8)


def exhaustive(one: tuple[int, ...], two: tuple[int, ...]) -> float:
    """All order-preserving edits."""
    if not one or not two:
        return len(one) + len(two)
    return min(
        1 + exhaustive(one[1:], two),
        1 + exhaustive(one, two[1:]),
        replaced(one[0], two[0]) + exhaustive(one[1:], two[1:]),
    )


@settings(max_examples=40, deadline=None)
@given(one=SIZES, two=SIZES)
def test_chains_are_aligned_as_by_trying_all_edits(
    one: list[int], two: list[int]
) -> None:
    expected = exhaustive(tuple(one), tuple(two)) / (len(one) + len(two))
    assert chain_distance(one, two) == pytest.approx(expected)
    assert chain_distance(two, one) == pytest.approx(expected)


def test_equal_is_zero_and_a_few_layers_more_is_near() -> None:
    assert chain_distance(CHAIN, CHAIN) == 0.0
    deeper = (*CHAIN, *CHAIN[1:], *CHAIN[1:])
    wider = tuple(2 * size for size in CHAIN)
    other = (2**26,) * 3
    assert 0 < chain_distance(CHAIN, wider) < chain_distance(CHAIN, deeper) < 0.7
    assert chain_distance(CHAIN, other) > chain_distance(CHAIN, wider)
    assert chain_distance((), CHAIN) == 1.0


def test_long_chains_take_a_bounded_time_and_stay_equal_to_themselves() -> None:
    long = tuple(2 ** (10 + i % 12) for i in range(20_000))
    assert chain_distance(long, long) == 0.0
    assert 0 < chain_distance(long, CHAIN) <= 1.0


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_small_topologies_have_the_exact_graph_edit_distance(
    data: st.DataObject,
) -> None:
    def topology() -> RateTopology:
        hosts, per_host = data.draw(
            st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (1, 4)])
        )
        return RateTopology(
            hosts=hosts,
            ranks_per_host=per_host,
            inter_bytes_per_s=data.draw(st.sampled_from([1e8, 1e9])),
            intra_bytes_per_s=1e10,
        )

    one, two = topology(), topology()
    graphs = []
    for t in (one, two):
        graph = networkx.Graph()
        graph.add_nodes_from(range(t.ranks))
        for a in range(t.ranks):
            for b in range(a):
                same = a // t.ranks_per_host == b // t.ranks_per_host
                rate = t.intra_bytes_per_s if same else t.inter_bytes_per_s
                graph.add_edge(a, b, rate=rate)
        graphs.append(graph)

    def cost(a: dict[str, float], b: dict[str, float]) -> float:
        import math

        return min(1.0, abs(math.log2(a["rate"] / b["rate"])) / 8)

    exact = networkx.graph_edit_distance(*graphs, edge_subst_cost=cost)
    size = sum(t.ranks + t.ranks * (t.ranks - 1) / 2 for t in (one, two))
    assert topology_distance(one, two) == pytest.approx(exact / size)


def test_large_topologies_are_bounded_and_ordered() -> None:
    def cluster(hosts: int, rate: float = 1e9) -> RateTopology:
        return RateTopology(
            hosts=hosts,
            ranks_per_host=8,
            inter_bytes_per_s=rate,
            intra_bytes_per_s=1e11,
        )

    base = cluster(64)
    assert topology_distance(base, cluster(64)) == 0.0
    near = topology_distance(base, cluster(60))
    far = topology_distance(base, cluster(8))
    slower = topology_distance(base, cluster(64, 0.5e9))
    assert 0 < near < far <= 1.0
    assert 0 < slower < far


def test_a_job_is_as_far_as_the_farther_of_model_and_network() -> None:
    here = RateTopology(hosts=2, ranks_per_host=2)
    there = RateTopology(hosts=4, ranks_per_host=2)
    same_model = job_distance((CHAIN, CHAIN), (here, there))
    assert same_model == topology_distance(here, there) > 0
    same_place = job_distance((CHAIN, CHAIN[:2]), (here, here))
    assert same_place == chain_distance(CHAIN, CHAIN[:2]) > 0
