from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cost import FlowRates, flow_rates, gamma_at
from stretto.schema import AllReduceFit, Cluster, Concurrency, Link
from stretto.testing import strategies as own
from support.instances import one_link


def test_a_capped_stream_gives_the_gammas_of_aiacc():
    # algorithms.md 6.3: gamma_k = max(1, k kappa), for kappa = 0.3.
    rates = FlowRates(alone_bytes_per_s=0.3e9, link_bytes_per_s=1e9)
    gammas = [0.3e9 / rates.per_flow_bytes_per_s(k) for k in range(1, 9)]
    assert gammas == pytest.approx([1, 1, 1, 1.2, 1.5, 1.8, 2.1, 2.4], rel=1e-12)


def test_beyond_the_list_the_sum_stays():
    gamma = (1.0, 1.1, 1.5)
    sums = [k / gamma_at(gamma, k) for k in range(3, 20)]
    assert sums == pytest.approx([2.0] * len(sums), rel=1e-12)
    assert gamma_at(gamma, 2) == 1.1


def test_published_gamma_of_two_flows_is_held_to_the_link():
    # ASC-WFBP: b = 1.7e-9 and gamma 1.5 at 32 ranks ask for 1.33 links of 10 Gbit/s.
    cluster = Cluster(
        name="asc",
        hosts=8,
        ranks_per_host=4,
        inter_host=Link(latency_s=2e-5, bandwidth_bytes_per_s=1.18e9),
        intra_host=Link(latency_s=5e-6, bandwidth_bytes_per_s=1.2e10),
        allreduce=AllReduceFit(startup_s=1.4e-3, s_per_byte=1.7e-9, ranks=32),
        concurrency=Concurrency(gamma=(1.0, 1.5)),
    )
    rates = flow_rates(cluster)
    alone = 1.9375 / 1.7e-9
    assert rates.per_flow_bytes_per_s(1) == pytest.approx(alone, rel=1e-12)
    assert 2 * alone / 1.5 > 1.18e9
    assert rates.per_flow_bytes_per_s(2) == pytest.approx(1.18e9 / 2, rel=1e-12)


def test_a_fit_replaces_the_stream_cap():
    link = Link(latency_s=0, bandwidth_bytes_per_s=1e9, stream_bytes_per_s=1e8)
    fit = AllReduceFit(startup_s=0, s_per_byte=1 / 3e8, ranks=2)
    cluster = one_link(link)
    assert flow_rates(cluster).per_flow_bytes_per_s(1) == 1e8
    fitted = one_link(link, allreduce=fit)
    assert flow_rates(fitted).per_flow_bytes_per_s(1) == pytest.approx(3e8, rel=1e-12)


@given(own.clusters(), st.integers(1, 40))
def test_more_flows_never_speed_one_up_and_never_exceed_the_link(cluster, num):
    rates = flow_rates(cluster)
    now, more = rates.per_flow_bytes_per_s(num), rates.per_flow_bytes_per_s(num + 1)
    assert more <= now * (1 + 1e-12)
    assert num * now <= rates.link_bytes_per_s * (1 + 1e-12)


@given(own.clusters(), st.floats(0.01, 2.0))
def test_the_best_total_is_the_most_that_any_number_reaches(cluster, share):
    rates = flow_rates(cluster)
    cap = rates.alone_bytes_per_s * share
    # This many flows fill the link at the rate of one alone; the list of gamma ends.
    enough = math.ceil(rates.link_bytes_per_s / rates.alone_bytes_per_s) + 50
    for flow_cap in (None, cap):
        totals = [
            k * min(rates.per_flow_bytes_per_s(k), flow_cap or float("inf"))
            for k in range(1, enough)
        ]
        best = rates.best_total_bytes_per_s(flow_cap)
        assert max(totals) <= best * (1 + 1e-12)
        assert best <= rates.link_bytes_per_s
        if flow_cap is None:
            assert max(totals) >= best * (1 - 1e-12)
