"""The joint search against every other planner and against brute force."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest

from stretto import planners
from stretto.errors import SpecError
from stretto.planners._joint.search import DraftSearch
from stretto.planners._joint.space import DIMS
from stretto.planners.joint import NEAR_RATIO
from stretto.schema import Link
from stretto.sim.step import simulate_step

OTHERS = [name for name in planners.NAMES if name not in ("joint", "dear")]
"""The planners that `joint` is never slower than; halves are no dimension of it."""


@pytest.fixture(scope="module")
def demo_like(make_workload, make_cluster):
    """40 MB in 100 tensors over a link that one flow fills to a third."""
    sizes = [1_200_000 if i % 3 == 0 else 4_000 for i in range(100)]
    ready = [0.001 * (i + 1) for i in range(100)]
    return make_workload(sizes, ready, forward_s=0.05), make_cluster()


@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.parametrize("seed", range(0, 30, 3))
def test_joint_is_never_slower_than_any_other_planner(
    seed, contended, make_instance
) -> None:
    workload, cluster = make_instance(seed, tensors=3 + seed % 28, contended=contended)
    joint = planners.get("joint").plan(workload, cluster).predicted.iteration_s
    every = planners.get("joint", dims="all", robust=False).plan(workload, cluster)
    for name in OTHERS:
        other = planners.get(name).plan(workload, cluster)
        other_s = other.predicted.iteration_s
        assert every.predicted.iteration_s <= other_s * (1 + 1e-9), name
        if all(bucket.resource is None for bucket in other.buckets):
            assert joint <= other_s * (1 + 1e-9), name


def test_joint_chooses_by_default_what_the_runtime_executes(make_instance) -> None:
    for seed in range(5):
        workload, cluster = make_instance(seed, tensors=9, contended=True)
        plan = planners.get("joint").plan(workload, cluster)
        assert plan.overlap in ("none", "backward")
        assert {bucket.resource for bucket in plan.buckets} == {None}
        assert {bucket.algorithm for bucket in plan.buckets} == {"ring"}


CLOSED = {
    "lanes": lambda plan: plan.lanes == 1,
    "slices": lambda plan: max(bucket.slices for bucket in plan.buckets) == 1,
    "resource": lambda plan: {b.resource for b in plan.buckets} == {None},
    "algorithm": lambda plan: {b.algorithm for b in plan.buckets} == {"ring"},
    "forward": lambda plan: plan.overlap != "forward",
    "fusion": lambda plan: True,  # looked at beside DDP's below
}


@pytest.mark.parametrize("closed", DIMS)
def test_a_closed_dimension_stays_closed(closed, make_instance) -> None:
    dims = [name for name in DIMS if name != closed]
    for seed in range(4):
        workload, cluster = make_instance(seed, tensors=9, contended=True)
        plan = planners.get("joint", dims=dims).plan(workload, cluster)
        assert CLOSED[closed](plan)
        if closed == "fusion":
            ddp = planners.get("ddp").plan(workload, cluster)
            assert [b.tensors for b in plan.buckets] == [b.tensors for b in ddp.buckets]


def test_each_dimension_more_is_no_slower(make_instance) -> None:
    for seed in range(8):
        workload, cluster = make_instance(seed, tensors=6, contended=True)
        times = [
            planners.get("joint", dims=DIMS[:k], robust=False)
            .plan(workload, cluster)
            .predicted.iteration_s
            for k in range(1, len(DIMS) + 1)
        ]
        for fewer, more in itertools.pairwise(times):
            assert more <= fewer * (1 + 1e-3)
        assert times[-1] <= times[0]


def test_joint_is_near_the_best_of_all_dimensions(make_instance) -> None:
    for seed in range(12):
        workload, cluster = make_instance(seed, tensors=2, contended=True)
        options = {"max_lanes": 2, "dims": "all"}
        joint = planners.get("joint", robust=False, **options).plan(workload, cluster)
        best = planners.get("exhaustive", **options).plan(workload, cluster)
        excess = joint.predicted.iteration_s / best.predicted.iteration_s - 1
        assert -1e-9 < excess < 1e-6


def test_annealing_finds_what_climbing_does_not(make_instance, monkeypatch) -> None:
    instances = [make_instance(seed, tensors=30, contended=True) for seed in range(12)]
    dims = ("fusion", "lanes", "slices", "resource", "algorithm")
    joint = planners.get("joint", dims=dims, max_lanes=4, robust=False)

    def times_s() -> list[float]:
        return [joint.plan(*one).predicted.iteration_s for one in instances]

    with_annealing = times_s()
    monkeypatch.setattr(DraftSearch, "anneal", lambda _: None)
    without = times_s()
    assert all(
        a <= b * (1 + 1e-6) for a, b in zip(with_annealing, without, strict=True)
    )
    assert min(a / b for a, b in zip(with_annealing, without, strict=True)) < 1 - 1e-4


def test_joint_takes_few_steps_where_there_are_many_ranks(make_workload, make_cluster):
    """A ring over 2000 ranks starts 4000 times; halving and doubling 22 times."""
    workload = make_workload([4000] * 40, [0.001 * (i + 1) for i in range(40)])
    cluster = make_cluster(hosts=2048, latency_s=1e-5)
    plan = planners.get("joint", dims="all").plan(workload, cluster)
    assert {bucket.algorithm for bucket in plan.buckets} == {"halving_doubling"}


def test_algorithms_are_those_that_are_given(make_workload, make_cluster) -> None:
    """Two levels win for large buckets, rings where latency within hosts decides."""
    sizes, times_s = [4_000, 8_000_000] * 3, [0.02 * (i + 1) for i in range(6)]
    workload = make_workload(sizes, times_s)
    links = {
        "inter_host": Link(latency_s=1e-5, bandwidth_bytes_per_s=1e8),
        "intra_host": Link(latency_s=2e-3, bandwidth_bytes_per_s=1e9),
    }
    cluster = replace(make_cluster(hosts=2), ranks_per_host=2, **links)
    plans = {
        name: planners.get("joint", robust=False, algorithms=given).plan(
            workload, cluster
        )
        for name, given in {"both": "ring,hierarchical", "rings": "ring"}.items()
    }
    used = {name: {b.algorithm for b in plan.buckets} for name, plan in plans.items()}
    assert used["both"] <= {"ring", "hierarchical"}
    assert "hierarchical" in used["both"]
    assert used["rings"] == {"ring"}
    seconds = {name: plan.predicted.iteration_s for name, plan in plans.items()}
    assert seconds["both"] < 0.9 * seconds["rings"]
    options = {"max_lanes": 1, "algorithms": ("ring", "hierarchical")}
    best = planners.get("exhaustive", **options).plan(workload, cluster)
    joint = planners.get("joint", robust=False, **options).plan(workload, cluster)
    ratio = joint.predicted.iteration_s / best.predicted.iteration_s
    assert ratio == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("ring,rail", "algorithms must be some of ring, .*, got 'rail'"),
        ("hierarchical", "algorithms must include ring, got hierarchical"),
    ],
)
def test_unknown_algorithms_are_refused(given: str, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        planners.get("joint", algorithms=given)


def test_unknown_dimensions_are_refused() -> None:
    with pytest.raises(SpecError, match="dims must be all or some of fusion, lanes"):
        planners.get("joint", dims="fusion,color")


def test_a_time_limit_ends_the_climbing(demo_like) -> None:
    plan = planners.get("joint", time_limit_s=1e-6).plan(*demo_like)
    free = planners.get("joint").plan(*demo_like)
    single = planners.get("single").plan(*demo_like)
    assert plan.predicted.iteration_s < single.predicted.iteration_s
    assert free.predicted.iteration_s <= plan.predicted.iteration_s * (1 + NEAR_RATIO)


def test_the_same_input_gives_the_same_plan(demo_like) -> None:
    plans = [planners.get("joint", dims="all").plan(*demo_like) for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("contended", [False, True])
def test_joint_is_near_the_best_of_all(contended, make_instance) -> None:
    """Over 300 instances each: benchmarks/joint_quality.py; here, for time, over 24."""
    excess = []
    for seed in range(24):
        workload, cluster = make_instance(
            seed, tensors=2 + seed % 3, contended=contended
        )
        joint = planners.get("joint", max_lanes=3).plan(workload, cluster)
        best = planners.get("exhaustive", max_lanes=3).plan(workload, cluster)
        excess.append(joint.predicted.iteration_s / best.predicted.iteration_s - 1)
    assert min(excess) > -1e-9
    assert max(excess) < 0.04
    assert statistics.mean(excess) < 0.003


def test_joint_fills_a_link_that_one_flow_does_not(demo_like) -> None:
    workload, cluster = demo_like
    plan = planners.get("joint").plan(workload, cluster)
    ddp = planners.get("ddp").plan(workload, cluster)
    assert plan.lanes >= 4
    assert plan.predicted.iteration_s < ddp.predicted.iteration_s / 2
    assert plan.predicted.gap < 0.05


def test_joint_slices_nothing_where_one_flow_fills_the_link(
    demo_like, make_cluster
) -> None:
    workload, _ = demo_like
    cluster = make_cluster(flow_bytes_per_s=None, latency_s=0.0)
    plan = planners.get("joint").plan(workload, cluster)
    assert [b.slices for b in plan.buckets] == [1] * len(plan.buckets)
    assert len(plan.buckets) <= 6


def test_joint_sends_little_where_nothing_can_be_gained(
    make_workload, make_cluster
) -> None:
    """A network so fast that one collective at the end costs nothing to speak of."""
    workload = make_workload([4000] * 30, [0.01 * (i + 1) for i in range(30)])
    cluster = make_cluster(link_bytes_per_s=1e12, flow_bytes_per_s=None, latency_s=1e-7)
    plan = planners.get("joint").plan(workload, cluster)
    assert plan.lanes == 1
    assert len(plan.buckets) <= 2


@pytest.mark.parametrize("max_lanes", [1, 2, 3, 8])
def test_joint_keeps_its_limit_of_lanes(max_lanes, demo_like) -> None:
    plan = planners.get("joint", max_lanes=max_lanes).plan(*demo_like)
    assert plan.lanes <= max_lanes


def test_joint_does_well_when_backward_is_slower_than_measured(demo_like) -> None:
    """Beside communication it often is; a plan fit to the last gap would idle then."""
    workload, cluster = demo_like
    slower = replace(
        workload,
        backward_s=workload.backward_s * 1.4,
        tensors=tuple(replace(t, ready_s=t.ready_s * 1.4) for t in workload.tensors),
    )
    plan = planners.get("joint").plan(workload, cluster)
    informed = planners.get("joint").plan(slower, cluster).predicted.iteration_s
    assert simulate_step(slower, cluster, plan).iteration_s < 1.02 * informed


def test_more_lanes_never_make_joint_slower_than_its_tie_break(demo_like) -> None:
    times = [
        planners.get("joint", max_lanes=k).plan(*demo_like).predicted.iteration_s
        for k in (1, 2, 4, 8)
    ]
    for fewer, more in itertools.pairwise(times):
        assert more <= fewer * (1 + NEAR_RATIO)


def test_an_empty_tensor_more_changes_nothing(demo_like) -> None:
    workload, cluster = demo_like
    tensors = list(workload.tensors)
    empty = replace(tensors[50], name="empty", bytes=0)
    longer = replace(workload, tensors=(*tensors[:50], empty, *tensors[50:]))
    here = planners.get("joint").plan(workload, cluster).predicted.iteration_s
    there = planners.get("joint").plan(longer, cluster).predicted.iteration_s
    assert there == pytest.approx(here, rel=2 * NEAR_RATIO)


@pytest.mark.parametrize("seed", range(4))
def test_planned_again_it_is_no_slower_than_what_was_known(seed, make_instance) -> None:
    """Nor much slower than a first plan, and the same each time."""
    workload, cluster = make_instance(seed, tensors=24, contended=seed % 2 == 1)
    joint = planners.get("joint")
    before = joint.plan(workload, cluster)
    link = cluster.inter_host
    changed = replace(
        cluster,
        inter_host=replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 2),
    )
    again = joint.replan(workload, changed, [before])
    again_s = again.predicted.iteration_s
    known_s = simulate_step(workload, changed, before).iteration_s
    ddp_s = planners.get("ddp").plan(workload, changed).predicted.iteration_s
    assert again_s <= min(known_s, ddp_s) * (1 + 1e-9)
    assert again_s <= 1.01 * joint.plan(workload, changed).predicted.iteration_s
    assert again == joint.replan(workload, changed, [before])
    # Plans for another order of tensors are no place to begin.
    turned = replace(before, buckets=before.buckets[::-1])
    joint.replan(workload, changed, [turned]).check_matches(workload)


def test_other_planners_plan_again_as_ever(make_instance) -> None:
    workload, cluster = make_instance(3, tensors=9)
    for name in OTHERS:
        planner = planners.get(name)
        plan = planner.plan(workload, cluster)
        assert planner.replan(workload, cluster, [plan]) == plan
