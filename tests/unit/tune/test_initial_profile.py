"""What a short probe measured, made possible."""

from __future__ import annotations

import random

import pytest

from stretto.cost.fit import fit_cluster
from stretto.errors import Infeasible
from stretto.schema import CollectiveSample
from stretto.tune.initial_profile import determines_rate, more_lanes_help, plausible

MB = 1e6


def sample(size_bytes: int, lanes: int, duration_s: float) -> CollectiveSample:
    return CollectiveSample(
        size_bytes=size_bytes,
        lanes=lanes,
        ranks=4,
        duration_s=duration_s,
        spread_s=0.0,
        repetitions=3,
    )


def test_samples_without_contradictions_stay_as_they_are() -> None:
    samples = [sample(2**14, 1, 0.002), sample(2**18, 1, 0.01), sample(2**18, 4, 0.03)]
    assert plausible(samples) == samples


def test_more_is_never_faster() -> None:
    samples = [sample(2**14, 1, 0.002), sample(2**20, 1, 0.0015)]
    samples += [sample(2**14, 2, 0.001), sample(2**20, 2, 0.0011)]
    with pytest.raises(Infeasible):
        fit_cluster(samples, name="noise", hosts=4)
    times = {(s.lanes, s.size_bytes): s.duration_s for s in plausible(samples)}
    assert times[1, 2**14] == 0.002
    assert 0.002 < times[1, 2**20] < 0.0021
    assert times[2, 2**14] > times[1, 2**14]
    assert times[2, 2**20] == max(times.values())
    fit_cluster(plausible(samples), name="noise", hosts=4)


LINK, TOTAL = 125.0, 20 * 2**20


def bulk(flow: float, lanes: int, noise: float = 1.0) -> CollectiveSample:
    """Gradients of 20 MiB over lanes of the given MB/s on a link of 125 MB/s."""
    rate = min(flow, LINK / lanes) * MB
    return sample(TOTAL // lanes, lanes, noise * (0.002 + 1.5 * TOTAL / lanes / rate))


@pytest.mark.parametrize(
    ("flow", "help_"),
    [(125.0, False), (60.0, False), (37.5, False), (25.0, True), (10.0, True)],
)
def test_more_lanes_are_asked_for_only_where_the_link_is_not_full(
    flow: float, help_: bool
) -> None:
    assert more_lanes_help([bulk(flow, lanes) for lanes in (2, 4)]) is help_


def test_gradients_show_a_rate_where_they_are_large_or_take_long() -> None:
    assert determines_rate(sample(2**20, 4, 0.03))
    assert determines_rate(sample(2**18, 4, 0.1))  # 1 MiB on 100 Mbit/s
    assert not determines_rate(sample(2**18, 4, 0.01))


def test_without_half_as_many_lanes_to_compare_with_none_are_asked_for() -> None:
    assert not more_lanes_help([])
    assert not more_lanes_help([bulk(10.0, 4)])


@pytest.mark.parametrize("flow", [125.0, 60.0, 37.5, 25.0])
def test_large_messages_of_few_lanes_and_small_ones_give_the_network(
    flow: float,
) -> None:
    """Measure as the initial profile does: small messages pass a shaper unshaped."""
    rng = random.Random(0)
    samples = [bulk(flow, lanes, rng.uniform(0.99, 1.03)) for lanes in (2, 4)]
    if more_lanes_help(samples):
        samples.append(bulk(flow, 8, rng.uniform(0.99, 1.03)))
    for size in (2**14, 2**16):
        samples.append(sample(size, 1, 0.002 + 1.5 * size / 400e6))
    for size in (2**18, 2**20):
        samples.append(sample(size, 1, 0.002 + 1.5 * size / (flow * MB)))
    cluster = fit_cluster(plausible(samples), name="seen", hosts=4)
    wire = cluster.bottleneck
    found = wire.stream_bytes_per_s or wire.bandwidth_bytes_per_s
    assert wire.bandwidth_bytes_per_s == pytest.approx(LINK * MB, rel=0.06)
    assert found == pytest.approx(flow * MB, rel=0.08)
