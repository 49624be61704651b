"""The loops over lanes agree with each other where more than one applies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.schema import ComputeContention
from stretto.sim.lanes import (
    mixed_lanes_beside_work,
    multi_lane,
    multi_lane_beside_work,
    run_lanes,
    single_lane,
    single_lane_beside_work,
)
from stretto.sim.network import Network
from stretto.testing import strategies as own


@st.composite
def queues(draw, *, levels=1, max_queues=4):
    """One to four queues of one to five flows, ready in their order."""
    found = []
    for _ in range(draw(st.integers(1, max_queues))):
        count = draw(st.integers(1, 5))
        ready_s = sorted(draw(st.floats(0.0, 0.2)) for _ in range(count))
        flows = [
            (
                at_s,
                draw(st.sampled_from([0.0, 1e-4, 0.01])),
                draw(st.floats(1.0, 1e7)),
                draw(st.integers(0, levels - 1)),
            )
            for at_s in ready_s
        ]
        found.append((flows, draw(st.integers(1, 3))))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data(), st.floats(0.0, 0.3))
def test_one_queue_beside_work_in_closed_form_as_from_event_to_event(data, work_s):
    network = Network(data.draw(own.clusters(contended=True)))
    drawn = data.draw(queues(levels=len(network.loads), max_queues=1))
    stages, events = [], []
    one = single_lane_beside_work(drawn[0], network, work_s, stages)
    two = mixed_lanes_beside_work(drawn, network, work_s, [events])
    assert one == pytest.approx(two, rel=1e-9, abs=1e-12)
    assert stages == pytest.approx(events, rel=1e-9, abs=1e-12)
    assert len(stages) == len(drawn[0][0])


@settings(max_examples=150, deadline=None)
@given(st.data(), st.floats(0.0, 0.3))
def test_lanes_of_one_level_as_lanes_of_any(data, work_s):
    network = Network(data.draw(own.clusters(contended=True)))
    level = data.draw(st.integers(0, len(network.loads) - 1))
    drawn = [
        ([(*flow[:3], level) for flow in flows], number)
        for flows, number in data.draw(queues())
    ]
    lanes = sum(number for _, number in drawn)
    ends, any_ends = [[] for _ in drawn], [[] for _ in drawn]
    one = multi_lane_beside_work(drawn, network.at(level, lanes), work_s, ends)
    two = mixed_lanes_beside_work(drawn, network, work_s, any_ends)
    assert one == pytest.approx(two, rel=1e-9, abs=1e-12)
    for found, expected in zip(ends, any_ends, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.floats(0.2, 0.3))
def test_computation_that_nothing_slows_is_undisturbed(data, work_s):
    """Flows as fast beside computation as after it, which they do not slow."""
    cluster = data.draw(own.clusters(contended=True))
    contention = replace(
        cluster.contention,
        compute=ComputeContention(alpha1=1.0, alpha2=0.0),
        exclusive=cluster.contention.overlapped,
        resources=cluster.contention.resources[:1],
    )
    network = Network(replace(cluster, contention=contention))
    drawn = data.draw(queues())
    lanes = sum(number for _, number in drawn)
    figures = network.at(0, lanes)
    beside, ends = [[] for _ in drawn], [[] for _ in drawn]
    end_s, computed_s = multi_lane_beside_work(drawn, figures, work_s, beside)
    assert computed_s == pytest.approx(work_s, rel=1e-9)
    found_s = multi_lane(drawn, figures.rates, ends)
    assert max(found_s, work_s) == pytest.approx(end_s, rel=1e-9)
    for one, two in zip(beside, ends, strict=True):
        assert one == pytest.approx(two, rel=1e-9, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_one_queue_alone_as_among_several(data):
    network = Network(data.draw(own.clusters(contended=False)))
    (queue,) = data.draw(queues(max_queues=1))
    rates = network.at(0, queue[1]).rates
    assert single_lane(queue, rates) == pytest.approx(
        multi_lane([queue], rates), rel=1e-9
    )


@pytest.mark.parametrize("contended", [False, True])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_without_flows_only_computation_runs(contended, data):
    network = Network(data.draw(own.clusters(contended=contended)))
    found = run_lanes([], network, 0.25, lanes=4, level=0)
    assert found == (0.25, 0.25)
