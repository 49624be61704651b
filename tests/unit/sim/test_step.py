from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cost import all_reduce_s
from stretto.errors import PlanMismatch, SpecError
from stretto.schema import (
    AllReduceFit,
    Bucket,
    ComputeContention,
    Concurrency,
    Contention,
    Link,
    Plan,
    RateCurve,
    Timeline,
)
from stretto.schema.plan import ALGORITHMS
from stretto.sim import StepModel, simulate_step
from stretto.testing import strategies as own
from support.instances import one_link, workload_of


def cluster(**changes):
    """Two ranks, so a byte of the message is a byte on the wire: 1 s + 0.5 s/B."""
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e3)
    fit = AllReduceFit(startup_s=1.0, s_per_byte=0.5, ranks=2)
    return one_link(link, **({"allreduce": fit} | changes))


def plan(work, on, groups, *, lanes=1, overlap="backward", **bucket):
    """A plan of (tensor indices, lane)."""
    bucket = {"wire_dtype": "float32"} | bucket
    return Plan(
        planner="p",
        workload_digest=work.digest,
        ranks=on.ranks,
        overlap=overlap,
        lanes=lanes,
        buckets=tuple(
            Bucket(tensors=tuple(f"t{i}" for i in held), lane=lane, **bucket)
            for held, lane in groups
        ),
    )


# The counterexample to ASC-WFBP's theorem (algorithms.md 2.1): a = b = 1, gamma 1.5,
# sizes 8.5, 6 and 1, ready at 0, 0 and 10; sizes doubled here and b halved.
ASC = workload_of([(17, 0.0), (12, 0.0), (2, 10.0)])


@pytest.mark.parametrize(
    ("groups", "lanes", "expected_s"),
    [
        ([((0,), 0), ((1, 2), 0)], 1, 18.0),  # merged
        ([((0,), 0), ((1,), 1), ((2,), 0)], 2, 14.5),  # at once, then in turn
        ([((0,), 0), ((1,), 1), ((2,), 1)], 2, 13.0),  # at once twice
    ],
)
def test_known_ends_of_simultaneous_all_reduces(groups, lanes, expected_s):
    on = cluster(concurrency=Concurrency(gamma=(1.0, 1.5)))
    result = simulate_step(ASC, on, plan(ASC, on, groups, lanes=lanes))
    assert result.iteration_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(("lanes", "expected_s"), [(1, 18.0), (2, 13.25)])
def test_a_start_up_grows_with_the_plan_s_lanes(lanes, expected_s):
    """Two all-reduces of 8 s: one after the other, or at once, each 1.5 times as slow
    and started a quarter of a second later.
    """
    work = workload_of([(16, 0.0), (16, 0.0)])
    on = cluster(concurrency=Concurrency(gamma=(1.0, 1.5), startup_per_lane_s=0.25))
    groups = [((0,), 0), ((1,), 1 % lanes)]
    result = simulate_step(work, on, plan(work, on, groups, lanes=lanes))
    assert result.iteration_s == pytest.approx(expected_s, rel=1e-12)


def test_without_overlap_everything_comes_after_backward():
    work = workload_of([(10, 0.0), (6, 1.0)], forward_s=2.0, backward_s=3.0)
    on = cluster()
    result = simulate_step(work, on, plan(work, on, [((0, 1), 0)], overlap="none"))
    assert result.iteration_s == pytest.approx(2 + 3 + 1 + 8, rel=1e-12)
    assert result.backward_s == pytest.approx(12, rel=1e-12)
    assert result.exposed_communication_s == pytest.approx(9, rel=1e-12)


def test_hidden_communication_costs_nothing():
    work = workload_of([(2, 0.0)], forward_s=1.0, backward_s=5.0)
    on = cluster()
    result = simulate_step(work, on, plan(work, on, [((0,), 0)]))
    assert result.iteration_s == 6.0
    assert result.exposed_communication_s == 0.0


def test_slices_run_on_neighboring_lanes():
    work = workload_of([(10, 0.0)], backward_s=0.0)
    on = cluster()
    result = simulate_step(work, on, plan(work, on, [((0,), 1)], lanes=3, slices=4))
    sends = [s for s in result.timeline.spans if s.args["kind"] == "send"]
    # 10 elements in 4: 3, 3, 2, 2, the fourth behind the first on lane 1.
    assert [(s.track, s.args["bytes"]) for s in sends] == [
        ("lane1", 3),
        ("lane2", 3),
        ("lane0", 2),
        ("lane1", 2),
    ]
    assert sends[0].name == "bucket 0 slice 1/4"
    assert result.iteration_s == pytest.approx(2.5 + 2.0, rel=1e-12)


def test_a_bucket_waits_for_those_ahead_of_it_in_the_plan():
    work = workload_of([(2, 0.0), (2, 4.0)])
    on = cluster()
    result = simulate_step(work, on, plan(work, on, [((1,), 0), ((0,), 1)], lanes=2))
    sends = [s for s in result.timeline.spans if s.args["kind"] == "send"]
    assert [s.start_s for s in sends] == [4.0, 4.0]


def test_one_rank_sends_nothing():
    work = workload_of([(10**6, 0.5)], forward_s=1.0, backward_s=2.0)
    on = cluster(hosts=1)
    result = simulate_step(work, on, plan(work, on, [((0,), 0)]))
    assert result.iteration_s == 3.0
    assert result.timeline.tracks == ("compute",)
    assert StepModel(work, on).iteration_s([1], 1, [0], [1]) == 3.0


def test_a_narrower_type_on_the_wire_sends_fewer_bytes():
    work = workload_of([(40, 0.0)], dtype="float32")
    on = cluster()
    result = simulate_step(work, on, plan(work, on, [((0,), 0)], wire_dtype="float16"))
    assert result.iteration_s == pytest.approx(1 + 10, rel=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_bucket_takes_what_the_formula_of_its_algorithm_says(algorithm):
    link = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6, stream_bytes_per_s=4e5)
    on = cluster(hosts=3, ranks_per_host=2, inter_host=link, allreduce=None)
    work = workload_of([(10**5, 0.0)])
    one = plan(work, on, [((0,), 0)], algorithm=algorithm)
    assert simulate_step(work, on, one).iteration_s == pytest.approx(
        all_reduce_s(10**5, on, algorithm), rel=1e-12
    )


def contended(**changes):
    def constant(rate):
        return RateCurve(gamma1=rate, gamma2=0.0, gamma3=0.0, gamma4=0.0)

    values = {
        "compute": ComputeContention(alpha1=1.0, alpha2=0.1),
        "overlapped": constant(1.0),
        "exclusive": constant(2.0),
        "resources": (4, 5),
    }
    return Contention(**(values | changes))


def test_a_hidden_collective_delays_the_step_by_what_it_takes_from_compute():
    # LIBRA Eq. 8-11: (p + a)(1 - sigma) with sigma = 1 - 0.1 * 4, p = 6, a = 1.
    work = workload_of([(6, 0.0)], backward_s=50.0)
    on = cluster(contention=contended())
    result = simulate_step(work, on, plan(work, on, [((0,), 0)]))
    assert result.iteration_s == pytest.approx(50 + 7 * 0.4, rel=1e-12)


@pytest.mark.parametrize(
    ("gamma2", "rate"),
    [
        (1.5, 0.8),  # 2 / 1.5 each by gamma: the device's 0.8 binds
        (4.0, 0.5),  # 2 / 4 each: the network binds, the device is fast enough
    ],
)
def test_beside_computation_the_slowest_of_device_gamma_and_link_binds(gamma2, rate):
    constant = RateCurve(gamma1=0.8, gamma2=0.0, gamma3=0.0, gamma4=0.0)
    on = cluster(
        concurrency=Concurrency(gamma=(1.0, gamma2)),
        contention=contended(overlapped=constant),
    )
    work = workload_of([(4, 0.0), (4, 0.0)], backward_s=100.0)
    result = simulate_step(work, on, plan(work, on, [((0,), 0), ((1,), 1)], lanes=2))
    sends = [s for s in result.timeline.spans if s.args["kind"] == "send"]
    assert [s.end_s for s in sends] == pytest.approx([1 + 4 / rate] * 2, rel=1e-12)


def test_what_is_left_after_compute_goes_at_the_exclusive_rate():
    # 3 s of work at 0.6 are 5 s: 1 of start-up, 4 at 1 B/s; 6 of 10 bytes at 2 B/s.
    work = workload_of([(10, 0.0)], backward_s=3.0)
    on = cluster(contention=contended())
    result = simulate_step(work, on, plan(work, on, [((0,), 0)]))
    assert result.iteration_s == pytest.approx(5 + 3, rel=1e-12)
    assert result.exposed_communication_s == pytest.approx(3, rel=1e-12)


def test_a_bucket_may_take_another_of_the_clusters_resources():
    work = workload_of([(6, 0.0)], backward_s=50.0)
    on = cluster(contention=contended())
    result = simulate_step(work, on, plan(work, on, [((0,), 0)], resource=5))
    assert result.iteration_s == pytest.approx(50 + 7 * 0.5, rel=1e-12)


def test_a_resource_that_the_cluster_lacks_is_named():
    work = workload_of([(6, 0.0)])
    on = cluster(contention=contended())
    with pytest.raises(SpecError, match=r"levels \(4, 5\), got 7") as caught:
        simulate_step(work, on, plan(work, on, [((0,), 0)], resource=7))
    assert caught.value.place == ".buckets[0].resource"


def test_without_contention_a_resource_changes_nothing():
    work = workload_of([(6, 0.0)])
    on = cluster()
    results = [
        simulate_step(work, on, plan(work, on, [((0,), 0)], resource=r)).iteration_s
        for r in (None, 7)
    ]
    assert results[0] == results[1]


def test_a_plan_for_other_ranks_or_another_model_is_refused():
    work, on = workload_of([(6, 0.0)]), cluster()
    with pytest.raises(PlanMismatch, match="needs 2 ranks, but cluster 'c' has 3"):
        simulate_step(work, cluster(hosts=3), plan(work, on, [((0,), 0)]))
    other = workload_of([(7, 0.0)])
    with pytest.raises(PlanMismatch, match="was made for a workload"):
        simulate_step(other, on, plan(work, on, [((0,), 0)]))


def test_the_model_refuses_buckets_that_leave_out_tensors():
    model = StepModel(workload_of([(6, 0.0), (6, 1.0)]), cluster())
    with pytest.raises(SpecError, match=r"number of tensors \(2\), got \[1\]"):
        model.iteration_s([1], 1, [0], [1])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_model_for_searches_equals_the_simulator(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters())
    choice = data.draw(own.choices(work))
    expected = simulate_step(work, on, choice.plan(work, on)).iteration_s
    model = StepModel(work, on)
    for _ in range(2):  # asking leaves no trace
        found = model.iteration_s(
            choice.ends, choice.lanes, choice.bucket_lanes, choice.slices
        )
        assert found == pytest.approx(expected, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_one_lane_follows_the_fusion_recursion(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(min_hosts=2, contended=False))
    choice = data.draw(own.choices(work, max_lanes=1, max_slices=1))
    end = 0.0
    for first, last in pairwise((0, *choice.ends)):
        size = sum(t.bytes for t in work.tensors[first:last])
        if size:
            ready_s = work.forward_s + work.tensors[last - 1].ready_s
            end = max(end, ready_s) + all_reduce_s(size, on)
    expected = max(end, work.forward_s + work.backward_s)
    result = simulate_step(work, on, choice.plan(work, on))
    assert result.iteration_s == pytest.approx(expected, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_timeline_agrees_with_the_times(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(min_hosts=2))
    one = data.draw(own.plans(work, on))
    result = simulate_step(work, on, one)
    spans = result.timeline.spans
    by_kind = {
        kind: [s for s in spans if s.args["kind"] == kind]
        for kind in ("forward", "backward", "wait", "send")
    }
    assert sum(len(found) for found in by_kind.values()) == len(spans)
    assert result.timeline.end_s == pytest.approx(result.iteration_s, rel=1e-12)
    compute_end_s = max((s.end_s for s in spans if s.track == "compute"), default=0)
    assert result.exposed_communication_s == pytest.approx(
        result.iteration_s - compute_end_s, abs=1e-12
    )
    assert result.backward_s == pytest.approx(
        result.iteration_s - work.forward_s, abs=1e-12
    )
    sends = by_kind["send"]
    assert sum(s.args["bytes"] for s in sends) == work.total_bytes
    starts = {(s.track, s.args["bucket"], s.args["slice"]): s.start_s for s in sends}
    for wait in by_kind["wait"]:
        key = (wait.track, wait.args["bucket"], wait.args["slice"])
        assert wait.end_s == starts[key] > wait.start_s
    for lane in range(one.lanes):
        mine = [s for s in sends if s.track == f"lane{lane}"]
        for before, after in pairwise(mine):
            assert before.end_s <= after.start_s
    first_ready_s = work.forward_s + (
        work.backward_s if one.overlap == "none" else work.tensors[0].ready_s
    )
    assert all(s.start_s >= first_ready_s * (1 - 1e-12) for s in sends)


def test_a_timeline_survives_its_file(tmp_path):
    on = cluster()
    timeline = simulate_step(ASC, on, plan(ASC, on, [((0, 1, 2), 0)])).timeline
    timeline.save(tmp_path / "t.json")
    assert Timeline.load(tmp_path / "t.json").tracks == timeline.tracks


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_one_lane_is_monotone_in_bytes_start_up_and_ranks(data):
    # On several lanes it is not: a later flow may move out of another's way.
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(min_hosts=2, contended=False))
    choice = data.draw(own.choices(work, max_lanes=1))

    def took(changed_work=work, changed_on=on):
        one = choice.plan(changed_work, changed_on)
        return simulate_step(changed_work, changed_on, one).iteration_s

    base = took() * (1 - 1e-12)
    larger = data.draw(st.integers(0, len(work.tensors) - 1))
    tensors = list(work.tensors)
    tensors[larger] = replace(tensors[larger], bytes=tensors[larger].bytes + 4096)
    assert took(replace(work, tensors=tuple(tensors))) >= base
    assert took(changed_on=replace(on, hosts=on.hosts + 1)) >= base
    if on.allreduce is not None:
        slow = replace(on.allreduce, startup_s=on.allreduce.startup_s + 1e-3)
        assert took(changed_on=replace(on, allreduce=slow)) >= base
    else:
        late = replace(on.inter_host, latency_s=on.inter_host.latency_s + 1e-4)
        assert took(changed_on=replace(on, inter_host=late)) >= base


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_time_has_no_scale(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(fitted=True, contended=False))
    choice = data.draw(own.choices(work))
    fit, wire = on.allreduce, on.inter_host
    slow = replace(
        on,
        allreduce=replace(
            fit, startup_s=4 * fit.startup_s, s_per_byte=4 * fit.s_per_byte
        ),
        inter_host=replace(wire, bandwidth_bytes_per_s=wire.bandwidth_bytes_per_s / 4),
        intra_host=replace(
            on.intra_host,
            bandwidth_bytes_per_s=on.intra_host.bandwidth_bytes_per_s / 4,
        ),
    )
    if on.concurrency is not None:
        per_lane_s = 4 * on.concurrency.startup_per_lane_s
        longer = replace(on.concurrency, startup_per_lane_s=per_lane_s)
        slow = replace(slow, concurrency=longer)
    late = replace(
        work,
        forward_s=4 * work.forward_s,
        backward_s=4 * work.backward_s,
        tensors=tuple(replace(t, ready_s=4 * t.ready_s) for t in work.tensors),
    )
    base = simulate_step(work, on, choice.plan(work, on)).iteration_s
    scaled = simulate_step(late, slow, choice.plan(late, slow)).iteration_s
    assert scaled == pytest.approx(4 * base, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_tensor_of_no_bytes_changes_nothing(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters())
    choice = data.draw(own.choices(work))
    last = work.tensors[-1]
    empty = replace(last, name="empty", bytes=0)
    more = replace(work, tensors=(*work.tensors, empty))
    grown = replace(choice, ends=(*choice.ends[:-1], choice.ends[-1] + 1))
    base = simulate_step(work, on, choice.plan(work, on)).iteration_s
    assert simulate_step(more, on, grown.plan(more, on)).iteration_s == base
