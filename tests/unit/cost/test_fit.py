from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cost import all_reduce_s, collective_cost, flow_rates
from stretto.cost.fit import check_capacity, fit_cluster, predict_s
from stretto.errors import Infeasible, NoisyProfile, SpecError
from stretto.schema import (
    AllReduceFit,
    Cluster,
    CollectiveSample,
    Concurrency,
    ContentionSample,
    Link,
)
from support.instances import one_link

SIZES = tuple(2**e for e in range(10, 25, 2))
LANES = (1, 2, 4, 8)
RANKS = 4
RHO = 1.5


def truth_s(size_bytes, lanes, *, startup_s, flow, link):
    """Independent of the fit: every lane gets its share, never more than the cap."""
    rate = min(flow, link / lanes)
    return startup_s + RHO * size_bytes / rate


def sampled(*, noise=0.0, seed=0, sizes=SIZES, lanes=LANES, ranks=RANKS, **truth):
    rng = random.Random(seed)
    return [
        CollectiveSample(
            size_bytes=size,
            lanes=k,
            ranks=ranks,
            duration_s=truth_s(size, k, **truth) * (1 + rng.uniform(-noise, noise)),
            spread_s=0.0,
            repetitions=5,
        )
        for size in sizes
        for k in lanes
    ]


def fitted(samples, **options):
    return fit_cluster(samples, name="test", hosts=RANKS, **options)


def flow_of(cluster):
    return RHO / cluster.allreduce.s_per_byte


LAB = {"startup_s": 8e-4, "flow": 36e6, "link": 117e6}

truths = st.fixed_dictionaries(
    {
        "startup_s": st.floats(1e-4, 3e-3),
        "flow": st.floats(2e7, 1e9),
        "link": st.floats(1.3, 6.0),
    }
)


@settings(max_examples=25, deadline=None)
@given(truths, st.integers(0, 2**32))
def test_a_fit_recovers_what_made_the_samples(truth, seed):
    truth = {**truth, "link": truth["link"] * truth["flow"]}
    cluster = fitted(sampled(noise=0.02, seed=seed, **truth))
    assert flow_of(cluster) == pytest.approx(truth["flow"], rel=0.04)
    wire = cluster.bottleneck.bandwidth_bytes_per_s
    assert wire == pytest.approx(truth["link"], rel=0.06)
    assert cluster.provenance["fit"]["link_reached"]
    check_capacity(cluster)
    for k in LANES:
        got = predict_s(2**22, k, cluster.allreduce, cluster.concurrency)
        assert got == pytest.approx(truth_s(2**22, k, **truth), rel=0.06)


@settings(max_examples=10, deadline=None)
@given(st.floats(1e-4, 5e-3))
def test_exact_samples_give_exact_coefficients(startup_s):
    truth = LAB | {"startup_s": startup_s}
    cluster = fitted(sampled(**truth))
    assert cluster.allreduce.startup_s == pytest.approx(startup_s, rel=0.01)
    assert flow_of(cluster) == pytest.approx(truth["flow"], rel=0.002)
    wire = cluster.bottleneck.bandwidth_bytes_per_s
    assert wire == pytest.approx(truth["link"], rel=0.002)
    gamma = cluster.concurrency.gamma
    expected = [max(1.0, k * truth["flow"] / truth["link"]) for k in range(1, 9)]
    assert gamma == pytest.approx(expected, rel=0.01)


def test_start_ups_that_wait_for_each_other_are_distinguished_from_a_slow_link():
    """Each further lane starts 2 ms later; what is large hides it."""

    def later(sample: CollectiveSample) -> CollectiveSample:
        alone_s = truth_s(sample.size_bytes, 1, **LAB)
        last_s = alone_s + 2e-3 * (sample.lanes - 1)
        return replace(sample, duration_s=max(sample.duration_s, last_s))

    cluster = fitted([later(s) for s in sampled(noise=0.02, **LAB)])
    beyond = cluster.concurrency
    assert beyond.startup_per_lane_s == pytest.approx(2e-3, rel=0.06)
    assert flow_of(cluster) == pytest.approx(LAB["flow"], rel=0.03)
    wire = cluster.bottleneck.bandwidth_bytes_per_s
    assert wire == pytest.approx(LAB["link"], rel=0.03)
    assert cluster.allreduce.startup_s == pytest.approx(LAB["startup_s"], rel=0.3)
    for lanes in LANES:
        expected = LAB["startup_s"] + 2e-3 * (lanes - 1)
        cost = collective_cost(cluster, lanes=lanes)
        assert cost.startup_s == pytest.approx(expected, rel=0.1)
    assert fitted(sampled(**LAB)).concurrency.startup_per_lane_s < 1e-5


def test_the_cost_formulas_give_the_fitted_times_back():
    cluster = fitted(sampled(**LAB))
    assert all_reduce_s(2**22, cluster) == pytest.approx(
        truth_s(2**22, 1, **LAB), rel=0.01
    )
    for k in range(1, 9):
        expected = min(LAB["flow"], LAB["link"] / k)
        rate = flow_rates(cluster).per_flow_bytes_per_s(k)
        assert rate == pytest.approx(expected, rel=0.01)


def test_lanes_between_the_measured_ones_are_not_slowed_below_the_link():
    # Three flows fit (3 x 36 < 117) though four do not.
    cluster = fitted(sampled(**LAB))
    assert cluster.concurrency.gamma[2] == pytest.approx(1.0, abs=0.01)


def test_flows_that_reach_the_link_are_not_capped():
    cluster = fitted(sampled(startup_s=1e-3, flow=1.2e8, link=1.2e8))
    assert cluster.bottleneck.stream_bytes_per_s is None
    assert cluster.concurrency.gamma == pytest.approx(range(1, 9), rel=0.01)


def test_a_link_that_was_never_saturated_is_said_so():
    cluster = fitted(sampled(startup_s=1e-3, flow=1e7, link=1e9))
    assert not cluster.provenance["fit"]["link_reached"]
    # The most that was seen, not a guess beyond it.
    wire = cluster.bottleneck.bandwidth_bytes_per_s
    assert wire == pytest.approx(8e7, rel=0.02)


def test_one_wild_sample_does_not_move_the_fit():
    samples = sampled(**LAB)
    wild = next(s for s in samples if (s.lanes, s.size_bytes) == (2, 2**22))
    others = [s for s in samples if s is not wild]
    outlier = CollectiveSample(
        size_bytes=2**22,
        lanes=2,
        ranks=RANKS,
        duration_s=3 * wild.duration_s,
        spread_s=1.0,
        repetitions=5,
    )
    cluster = fitted([*others, outlier])
    assert flow_of(cluster) == pytest.approx(LAB["flow"], rel=0.03)
    assert cluster.bottleneck.bandwidth_bytes_per_s == pytest.approx(
        LAB["link"], rel=0.03
    )


def test_the_file_keeps_every_sample_with_its_prediction(tmp_path):
    samples = sampled(noise=0.05, **LAB)
    cluster = fitted(samples, provenance={"note": "kept"})
    cluster.save(tmp_path / "cluster.json")
    again = Cluster.load(tmp_path / "cluster.json")
    assert again.provenance["note"] == "kept"
    rows = again.provenance["fit"]["residuals"]
    assert len(rows) == len(samples)
    for row in rows:
        assert row["predicted_s"] == pytest.approx(
            row["measured_s"] * (1 + row["error"])
        )


def contention(lanes, *, compute, collective):
    return ContentionSample(
        size_bytes=2**20,
        lanes=lanes,
        ranks=RANKS,
        compute_alone_s=0.2,
        compute_overlapped_s=0.2 * compute,
        duration_alone_s=0.05,
        duration_overlapped_s=0.05 * collective,
        repetitions=3,
    )


def test_no_contention_samples_give_no_contention():
    assert fitted(sampled(**LAB)).contention is None


@given(st.floats(0.0, 0.2))
@settings(max_examples=15, deadline=None)
def test_lost_compute_per_lane_is_recovered(alpha2):
    beside = [
        contention(k, compute=1 / (1 - alpha2 * k), collective=1.0) for k in (1, 2, 4)
    ]
    found = fitted(sampled(**LAB), contention_samples=beside).contention
    assert found.compute.alpha1 == 1.0
    assert found.compute.alpha2 == pytest.approx(alpha2, abs=1e-6)
    assert found.resources == (1,)
    assert found.overlapped.gamma1 == pytest.approx(found.exclusive.gamma1, rel=0.02)
    assert found.exclusive.gamma1 == pytest.approx(LAB["flow"], rel=0.01)


def test_collectives_slowed_by_computation_get_a_lower_rate_beside_it():
    beside = [contention(1, compute=1.0, collective=2.0)]
    found = fitted(sampled(**LAB), contention_samples=beside).contention
    assert found.overlapped.gamma1 == pytest.approx(LAB["flow"] / 2, rel=0.05)


def test_lanes_that_the_link_can_not_feed_do_not_count_for_contention():
    few = [contention(k, compute=1 / (1 - 0.05 * k), collective=1.0) for k in (1, 2, 4)]
    more = [*few, contention(8, compute=1.0, collective=9.0)]
    truth = sampled(**LAB)
    assert (
        fitted(truth, contention_samples=more).contention
        == fitted(truth, contention_samples=few).contention
    )


def test_faster_beside_computation_is_noise_not_a_gain():
    beside = [contention(k, compute=0.9, collective=0.8) for k in (1, 2, 4)]
    found = fitted(sampled(**LAB), contention_samples=beside).contention
    assert found.compute.alpha2 == 0.0
    assert found.overlapped.gamma1 <= found.exclusive.gamma1


def published(gamma2):
    fit = AllReduceFit(startup_s=1e-3, s_per_byte=RHO / 1e8, ranks=RANKS)
    wire = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e8)
    gamma = Concurrency(gamma=(1.0, gamma2))
    return one_link(
        wire, name="published", hosts=RANKS, allreduce=fit, concurrency=gamma
    )


def test_coefficients_above_the_link_are_refused_with_what_they_need():
    with pytest.raises(Infeasible, match=r"2 all-reduces at once .* at least 2"):
        check_capacity(published(1.5))
    check_capacity(published(2.0))


def test_more_at_once_faster_than_one_alone_is_refused():
    samples = [
        s if s.lanes == 1 else sampled(**(LAB | {"flow": 117e6}))[i]
        for i, s in enumerate(sampled(**LAB))
    ]
    with pytest.raises(Infeasible, match="more at once cannot be faster"):
        fitted([s for s in samples if s.lanes <= 2])


def test_times_that_do_not_grow_with_the_size_are_refused():
    flat = [
        CollectiveSample(
            size_bytes=size,
            lanes=1,
            ranks=RANKS,
            duration_s=0.01,
            spread_s=0.0,
            repetitions=1,
        )
        for size in SIZES
    ]
    with pytest.raises(Infeasible, match="do not grow"):
        fitted(flat)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least two sizes on one lane, got 0"),
        (sampled(**LAB, sizes=SIZES[:1]), "at least two sizes on one lane, got 1"),
        (sampled(**LAB, lanes=(2, 4)), "at least two sizes on one lane, got 0"),
        (sampled(**LAB, ranks=8), "must be of 4 ranks"),
    ],
)
def test_samples_that_say_too_little_are_refused(samples, message):
    with pytest.raises(SpecError, match=message):
        fitted(samples)


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_what_no_model_explains_is_refused_or_physically_possible(seed):
    rng = random.Random(seed)
    samples = [
        CollectiveSample(
            size_bytes=s.size_bytes,
            lanes=s.lanes,
            ranks=s.ranks,
            duration_s=s.duration_s * rng.choice((0.1, 1.0, 10.0)),
            spread_s=0.0,
            repetitions=1,
        )
        for s in sampled(**LAB)
    ]
    try:
        cluster = fitted(samples)
    except (Infeasible, NoisyProfile):
        return
    check_capacity(cluster)


def test_the_fit_says_how_sure_it_is():
    calm = fitted(sampled(noise=0.005, **LAB)).provenance["fit"]["uncertainty_ratio"]
    loud = fitted(sampled(noise=0.05, **LAB)).provenance["fit"]["uncertainty_ratio"]
    assert set(calm) == {"startup", "flow", "link"}
    for name in ("flow", "link"):
        assert 0 < calm[name] < loud[name] < 0.1
    # One lane alone never fills this link: nothing decides it.
    alone = fitted(sampled(noise=0.005, lanes=(1,), **LAB)).provenance["fit"]
    assert alone["uncertainty_ratio"]["link"] is None
    assert 0 < alone["uncertainty_ratio"]["flow"] < 0.1


def test_small_messages_that_follow_a_line_of_their_own_are_recognized():
    assert fitted(sampled(**LAB)).provenance["fit"]["piecewise"] is None
    samples = [
        replace(s, duration_s=s.duration_s / 4) if s.size_bytes < 2**15 else s
        for s in sampled(sizes=tuple(2**e for e in range(10, 25)), **LAB)
    ]
    found = fitted(samples).provenance["fit"]["piecewise"]
    assert found["mean_error"] < 0.01
    assert [s["from_bytes"] for s in found["segments"]] == [0, 2**15]
    assert found["segments"][1]["startup_s"] == pytest.approx(8e-4, rel=1e-6)


def test_a_flow_faster_than_the_link_is_not_taken_for_the_link():
    """Times on 100 Mbit/s: what one flow could do beyond that, no sample says."""
    measured_ms = {
        (16384, 1): 6.0,
        (131072, 1): 12.2,
        (1048576, 1): 124.4,
        (16384, 2): 5.0,
        (131072, 2): 30.7,
        (16384, 4): 9.0,
        (131072, 4): 65.8,
        (1048576, 4): 504.5,
        (16384, 8): 18.4,
    }
    samples = [
        CollectiveSample(
            size_bytes=size,
            lanes=lanes,
            ranks=4,
            duration_s=ms / 1000,
            spread_s=0.0,
            repetitions=4,
        )
        for (size, lanes), ms in measured_ms.items()
    ]
    cluster = fit_cluster(samples, name="slow", hosts=4)
    assert cluster.bottleneck.bandwidth_bytes_per_s == pytest.approx(12.5e6, rel=0.03)
    assert cluster.bottleneck.stream_bytes_per_s is None
    assert all_reduce_s(4 * 2**20, cluster) == pytest.approx(0.503, rel=0.05)
