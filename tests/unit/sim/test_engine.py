from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.sim.engine import Flow, SharedLink, run
from stretto.sim.fair import max_min_rates

WIDE = 1e30


def flow(**values):
    defaults = {
        "lane": 0,
        "ready_work_s": 0.0,
        "startup_s": 0.0,
        "wire_bytes": 1.0,
        "cap_bytes_per_s": WIDE,
        "idle_cap_bytes_per_s": WIDE,
    }
    return Flow(**(defaults | values))


def link(capacity=1.0, limits=()):
    return SharedLink(capacity_bytes_per_s=capacity, limits_bytes_per_s=tuple(limits))


@st.composite
def some_flows(draw, *, max_flows=8, lanes=4, startups=True, capped=True, loads=False):
    flows = []
    for i in range(draw(st.integers(1, max_flows))):
        cap = draw(st.sampled_from([0.3, 1.0, WIDE])) if capped else WIDE
        flows.append(
            flow(
                lane=i if lanes is None else draw(st.integers(0, lanes - 1)),
                ready_work_s=draw(st.floats(0, 10)),
                startup_s=draw(st.floats(0, 3)) if startups else 0.0,
                wire_bytes=draw(st.floats(0.01, 10)),
                cap_bytes_per_s=cap,
                idle_cap_bytes_per_s=2 * cap,
                load=draw(st.floats(0, 0.5)) if loads else 0.0,
            )
        )
    return flows


def slowed(load):
    return max(0.1, 1 - load)


def stepped(flows, links, *, work_s, work_rate, step_s):
    """The same model by small steps of time: slow, near, and written apart."""
    left = [f.wire_bytes for f in flows]
    until_start = [f.startup_s for f in flows]
    end = [None] * len(flows)
    work, work_end, now = 0.0, None, 0.0
    while work_end is None or None in end:
        running = []
        for lane in {f.lane for f in flows}:
            mine = [i for i, f in enumerate(flows) if f.lane == lane and end[i] is None]
            if mine and (
                work_end is not None or flows[mine[0]].ready_work_s <= work + 1e-12
            ):
                running.append(mine[0])
        sending = sorted(i for i in running if until_start[i] <= 0)
        count = len(sending)
        rates = max_min_rates(
            [
                min(
                    flows[i].cap_bytes_per_s
                    if work_end is None
                    else flows[i].idle_cap_bytes_per_s,
                    links[0].flow_limit_bytes_per_s(count),
                )
                for i in sending
            ],
            [(0,)] * count,
            [links[0].capacity_bytes_per_s],
        )
        now += step_s
        for i, rate in zip(sending, rates, strict=True):
            left[i] -= rate * step_s
            if left[i] <= 0:
                end[i] = now
        for i in running:
            until_start[i] -= step_s
        if work_end is None:
            load = sum(flows[i].load for i in running)
            work += step_s * (work_rate(load) if running else 1.0)
            if work >= work_s:
                work_end = now
    return work_end, end


def test_one_flow_takes_its_start_up_and_its_bytes():
    outcome = run(
        [flow(ready_work_s=2.0, startup_s=0.5, wire_bytes=3.0, cap_bytes_per_s=0.25)],
        [link()],
        work_s=100.0,
    )
    assert outcome.ready_s == (2.0,)
    assert outcome.start_s == (2.0,)
    assert outcome.end_s[0] == pytest.approx(2.0 + 0.5 + 12.0, rel=1e-12)
    assert outcome.work_end_s == 100.0


def test_no_flows_leave_the_work_alone():
    outcome = run([], [link()], work_s=3.0)
    assert outcome.makespan_s == outcome.work_end_s == 3.0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), min_size=1, max_size=30),
    st.floats(0, 2),
    st.floats(0.1, 10),
)
def test_flows_of_one_lane_follow_the_recursion(pairs, startup_s, capacity):
    flows = [
        flow(ready_work_s=ready, startup_s=startup_s, wire_bytes=size)
        for ready, size in pairs
    ]
    end, expected = 0.0, []
    for ready, size in pairs:
        end = max(end, ready) + startup_s + size / capacity
        expected.append(end)
    outcome = run(flows, [link(capacity)], work_s=20.0)
    assert outcome.end_s == pytest.approx(expected, rel=1e-12)


@given(st.integers(1, 12), st.floats(0.05, 2.0), st.floats(0, 3))
def test_equal_flows_share_equally_under_their_cap(num, cap, startup_s):
    flows = [
        flow(lane=i, startup_s=startup_s, cap_bytes_per_s=cap, wire_bytes=2.0)
        for i in range(num)
    ]
    outcome = run(flows, [link()], work_s=1000.0)
    expected = startup_s + 2.0 / min(cap, 1 / num)
    assert outcome.end_s == pytest.approx([expected] * num, rel=1e-12)


def test_limits_hold_by_the_number_of_flows_and_their_sum_stays_beyond():
    shared = link(10.0, [1.0, 0.8])
    for num, rate in ((1, 1.0), (2, 0.8), (4, 0.4)):
        outcome = run([flow(lane=i) for i in range(num)], [shared], work_s=100.0)
        assert outcome.end_s == pytest.approx([1 / rate] * num, rel=1e-12)


def test_a_cap_changes_when_work_ends():
    one = flow(cap_bytes_per_s=0.25, idle_cap_bytes_per_s=0.5)
    assert run([one], [link()], work_s=2.0).end_s[0] == pytest.approx(3.0, rel=1e-12)


def test_work_slows_while_a_flow_is_under_way_start_up_included():
    one = flow(ready_work_s=1.0, startup_s=1.0, wire_bytes=1.0, load=0.5)
    outcome = run([one], [link()], work_s=10.0, work_rate=slowed)
    # Two seconds under way at half speed cost one.
    assert outcome.end_s[0] == pytest.approx(3.0, rel=1e-12)
    assert outcome.work_end_s == pytest.approx(11.0, rel=1e-12)


def test_slowed_work_delays_what_waits_for_it():
    flows = [
        flow(lane=0, wire_bytes=2.0, load=0.5, cap_bytes_per_s=1.0),
        flow(lane=1, ready_work_s=2.0, load=0.5),
    ]
    outcome = run(flows, [link(10.0)], work_s=5.0, work_rate=slowed)
    assert outcome.ready_s[1] == pytest.approx(3.0, rel=1e-12)


@settings(max_examples=60)
@given(some_flows(capped=False))
def test_a_link_without_caps_is_full_whenever_a_flow_sends(flows):
    outcome = run(flows, [link()], work_s=20.0)
    sending = sorted(
        (start + f.startup_s, end)
        for f, start, end in zip(flows, outcome.start_s, outcome.end_s, strict=True)
    )
    busy, until = 0.0, 0.0
    for begin, end in sending:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    assert busy == pytest.approx(sum(f.wire_bytes for f in flows), rel=1e-9)


@settings(max_examples=60)
@given(some_flows(loads=True))
def test_no_stretch_of_time_carries_more_than_the_link(flows):
    outcome = run(flows, [link()], work_s=8.0, work_rate=slowed)
    sends = [
        (start + f.startup_s, end, f.wire_bytes)
        for f, start, end in zip(flows, outcome.start_s, outcome.end_s, strict=True)
    ]
    for begin, _, _ in sends:
        for _, end, _ in sends:
            inside = sum(size for b, e, size in sends if b >= begin and e <= end)
            assert inside <= max(0.0, end - begin) * (1 + 1e-9) + 1e-9


@settings(max_examples=60)
@given(some_flows(loads=True))
def test_lanes_keep_their_order_and_times_never_go_back(flows):
    outcome = run(flows, [link()], work_s=8.0, work_rate=slowed)
    for i, f in enumerate(flows):
        assert outcome.ready_s[i] >= min(f.ready_work_s, 8.0) * (1 - 1e-12)
        assert outcome.ready_s[i] <= outcome.start_s[i]
        assert outcome.start_s[i] + f.startup_s <= outcome.end_s[i]
    for lane in {f.lane for f in flows}:
        mine = [i for i, f in enumerate(flows) if f.lane == lane]
        for before, after in pairwise(mine):
            assert outcome.end_s[before] <= outcome.start_s[after]
    assert outcome.work_end_s >= 8.0 * (1 - 1e-12)


@settings(max_examples=60)
@given(some_flows(startups=False))
def test_doubling_every_rate_halves_every_time(flows):
    flows = [replace(f, ready_work_s=0.0) for f in flows]
    faster = [
        replace(
            f,
            cap_bytes_per_s=2 * f.cap_bytes_per_s,
            idle_cap_bytes_per_s=2 * f.idle_cap_bytes_per_s,
        )
        for f in flows
    ]
    once = run(flows, [link(1.0, [1.0, 0.6])], work_s=0.0)
    twice = run(faster, [link(2.0, [2.0, 1.2])], work_s=0.0)
    assert [2 * end for end in twice.end_s] == pytest.approx(once.end_s, rel=1e-12)


@settings(max_examples=60)
@given(some_flows(lanes=None), st.floats(0, 10), st.floats(0.01, 10))
def test_a_flow_on_a_lane_of_its_own_never_lets_another_end_earlier(flows, ready, size):
    shared = [link(1.0, [1.0, 0.6, 0.3])]
    before = run(flows, shared, work_s=8.0)
    added = flow(lane=len(flows), ready_work_s=ready, wire_bytes=size)
    after = run([*flows, added], shared, work_s=8.0)
    for earlier, later in zip(before.end_s, after.end_s, strict=False):
        assert later >= earlier * (1 - 1e-12)


@settings(max_examples=60)
@given(some_flows(loads=True), st.permutations(range(4)))
def test_names_of_lanes_do_not_matter(flows, names):
    renamed = [replace(f, lane=names[f.lane]) for f in flows]
    args = {"work_s": 8.0, "work_rate": slowed}
    assert run(flows, [link()], **args) == run(renamed, [link()], **args)


@settings(max_examples=40)
@given(some_flows(loads=True, capped=False), st.floats(0.2, 1.0))
def test_equal_flows_are_shared_as_any_others(flows, cap):
    # A cap that differs beyond every rate in reach takes the general way.
    constant = [
        replace(f, cap_bytes_per_s=cap, idle_cap_bytes_per_s=cap) for f in flows
    ]
    other = flow(lane=99, ready_work_s=8.0, cap_bytes_per_s=cap / 2, wire_bytes=0.0)
    args = {"work_s": 8.0, "work_rate": slowed}
    shared = [link(1.0, [1.0, 0.9, 0.3])]
    one, two = run(constant, shared, **args), run([*constant, other], shared, **args)
    assert two.end_s[:-1] == pytest.approx(one.end_s, rel=1e-12)


@settings(max_examples=12, deadline=None)
@given(some_flows(max_flows=5, lanes=3, loads=True))
def test_small_steps_of_time_come_to_the_same(flows):
    links = [link(1.0, [1.0, 0.7])]
    exact = run(flows, links, work_s=8.0, work_rate=slowed)
    step_s = 0.01
    work_end_s, end_s = stepped(
        flows, links, work_s=8.0, work_rate=slowed, step_s=step_s
    )
    # Each of the few events is seen up to a step late, and late events move others.
    slack_s = 5 * step_s * len(flows)
    assert work_end_s == pytest.approx(exact.work_end_s, abs=slack_s)
    assert end_s == pytest.approx(exact.end_s, abs=slack_s)


def test_max_min_of_one_link_gives_the_rest_to_the_uncapped():
    assert max_min_rates([0.1, WIDE, WIDE], [(0,)] * 3, [1.0]) == [0.1, 0.45, 0.45]


def test_max_min_fills_several_links():
    # Bertsekas and Gallager's kind of case: the long flow is held by the tight link.
    rates = max_min_rates([WIDE] * 3, [(0, 1), (0,), (1,)], [1.0, 4.0])
    assert rates == pytest.approx([0.5, 0.5, 3.5], rel=1e-12)


@given(st.data(), st.integers(1, 3), st.integers(1, 6))
def test_max_min_leaves_no_flow_that_could_have_more(data, num_links, num_flows):
    capacities = data.draw(
        st.lists(st.floats(0.1, 5), min_size=num_links, max_size=num_links)
    )
    caps = data.draw(
        st.lists(st.floats(0.05, 9), min_size=num_flows, max_size=num_flows)
    )
    links = st.sets(st.integers(0, num_links - 1), min_size=1).map(sorted)
    crossed = [data.draw(links) for _ in range(num_flows)]
    rates = max_min_rates(caps, crossed, capacities)
    used = [
        sum(rate for rate, on in zip(rates, crossed, strict=True) if i in on)
        for i in range(num_links)
    ]
    for total, capacity in zip(used, capacities, strict=True):
        assert total <= capacity * (1 + 1e-9)
    for rate, cap, on in zip(rates, caps, crossed, strict=True):
        assert rate <= cap
        # Either at its cap, or on a full link where no flow has more.
        held = rate >= cap * (1 - 1e-9) or any(
            used[i] >= capacities[i] * (1 - 1e-9)
            and all(
                other <= rate * (1 + 1e-9)
                for other, theirs in zip(rates, crossed, strict=True)
                if i in theirs
            )
            for i in on
        )
        assert held


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("startup_s", -1.0),
        ("wire_bytes", float("inf")),
        ("ready_work_s", float("nan")),
        ("cap_bytes_per_s", 0.0),
        ("links", ()),
    ],
)
def test_a_flow_out_of_range_is_refused(field, value):
    with pytest.raises(SpecError):
        flow(**{field: value})


def test_a_link_without_capacity_is_refused():
    with pytest.raises(SpecError, match="got 0"):
        link(0)


@given(
    st.lists(
        st.tuples(st.floats(0.05, 9), st.sets(st.integers(0, 2)), st.integers(1, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_max_min_counts_equal_flows_as_if_they_were_listed(kinds):
    capacities = [1.0, 2.0, 5.0]
    crossed = [sorted(links) for _, links, _ in kinds]
    numbers = [number for _, _, number in kinds]
    caps = [cap for cap, _, _ in kinds]
    counted = max_min_rates(caps, crossed, capacities, numbers=numbers)
    each = [i for i, number in enumerate(numbers) for _ in range(number)]
    listed = max_min_rates(
        [caps[i] for i in each], [crossed[i] for i in each], capacities
    )
    assert listed == pytest.approx([counted[i] for i in each], rel=1e-9)
    # A flow that crosses no link has its cap.
    assert all(
        rate == cap
        for rate, cap, links in zip(counted, caps, crossed, strict=True)
        if not links
    )
