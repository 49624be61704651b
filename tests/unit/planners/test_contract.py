"""What every planner promises."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from stretto import planners
from stretto.errors import Infeasible, SpecError
from stretto.planners._orders import alternates
from stretto.schema import codec
from stretto.sim.step import simulate_step

NAMES = (*planners.NAMES, "exhaustive")


def check(plan, workload, cluster) -> None:
    """Every tensor once, one type per bucket, a true prediction; in ready order unless
    types alternate.
    """
    names = [name for bucket in plan.buckets for name in bucket.tensors]
    expected = [t.name for t in workload.tensors]
    if alternates(workload):
        names, expected = sorted(names), sorted(expected)
    assert names == expected
    dtypes = {t.name: t.dtype for t in workload.tensors}
    for bucket in plan.buckets:
        assert {dtypes[name] for name in bucket.tensors} == {bucket.wire_dtype}
        assert bucket.lane < plan.lanes
    plan.check_matches(workload)
    assert plan.ranks == cluster.ranks
    step = simulate_step(workload, cluster, plan)
    assert plan.predicted.iteration_s == step.iteration_s
    assert plan.predicted.gap >= -1e-9
    assert plan.predicted.iteration_s >= workload.forward_s + workload.backward_s


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(8))
def test_contract_holds_on_random_instances(name, seed, make_instance) -> None:
    workload, cluster = make_instance(seed, tensors=4 if name == "exhaustive" else None)
    before = copy.deepcopy((workload, cluster))
    plan = planners.get(name).plan(workload, cluster)
    assert plan.planner == name
    check(plan, workload, cluster)
    assert planners.get(name).plan(workload, cluster) == plan
    assert (workload, cluster) == before


CORNERS = {
    "one tensor": ([4096], [0.01], None),
    "all ready at once": ([4000, 8_000_000, 40, 400_000], [0.02] * 4, None),
    "ready at the start": ([4000, 4000], [0.0, 0.0], None),
    "no bytes at all": ([0, 0, 0], [0.0, 0.01, 0.02], None),
    "empty between full": ([0, 4_000_000, 0, 0, 4000], [0, 0.01, 0.01, 0.02, 0.03], 0),
    "types alternate": (
        [4000, 8000, 4000, 400_000],
        [0.0, 0.01, 0.02, 0.03],
        ["float32", "float16", "float32", "bfloat16"],
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("corner", CORNERS)
def test_contract_holds_at_the_corners(
    name, corner, make_workload, make_cluster
) -> None:
    sizes, ready, dtypes = CORNERS[corner]
    workload = make_workload(sizes, ready, dtypes=dtypes or None, forward_s=0.01)
    check(planners.get(name).plan(workload, make_cluster()), workload, make_cluster())


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_sends_nothing(name, make_workload, make_cluster) -> None:
    workload = make_workload([4_000_000, 400], [0.01, 0.02], forward_s=0.01)
    cluster = make_cluster(hosts=1)
    plan = planners.get(name).plan(workload, cluster)
    check(plan, workload, cluster)
    assert plan.predicted.iteration_s == pytest.approx(0.03)
    assert plan.predicted.exposed_communication_s == 0.0


def test_joint_leaves_one_rank_to_ddp(make_instance, make_cluster) -> None:
    workload, _ = make_instance(3, tensors=6)
    cluster = make_cluster(hosts=1)
    ddp = planners.get("ddp").plan(workload, cluster)
    joint = planners.get("joint").plan(workload, cluster)
    assert joint.buckets == ddp.buckets
    assert joint.lanes == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_has_no_average_is_refused(
    name, make_workload, make_cluster
) -> None:
    workload = make_workload([4, 8], [0.0, 0.1], dtypes=["float32", "int64"])
    with pytest.raises(Infeasible, match=r"t1.*int64"):
        planners.get(name).plan(workload, make_cluster())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_scaling_all_times_scales_the_plan_s_time(
    name, factor, make_instance, make_cluster
) -> None:
    workload, cluster = make_instance(5, tensors=5)
    slower = replace(
        workload,
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
        tensors=tuple(replace(t, ready_s=t.ready_s * factor) for t in workload.tensors),
    )
    link = cluster.inter_host
    cap = link.stream_bytes_per_s
    slower_cluster = replace(
        cluster,
        inter_host=replace(
            link,
            latency_s=link.latency_s * factor,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
            stream_bytes_per_s=cap / factor if cap else None,
        ),
    )
    options = {"cycle_s": 0.005 * factor} if name == "horovod" else {}
    plan = planners.get(name).plan(workload, cluster)
    scaled = planners.get(name, **options).plan(slower, slower_cluster)
    assert scaled.predicted.iteration_s == pytest.approx(
        plan.predicted.iteration_s * factor, rel=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_plans_survive_their_file(name, make_instance) -> None:
    workload, cluster = make_instance(1, tensors=4)
    plan = planners.get(name).plan(workload, cluster)
    assert codec.decode(codec.encode(plan), type(plan)) == plan


def test_unknown_names_and_options_are_refused_with_what_there_is() -> None:
    with pytest.raises(SpecError, match=r"joint.*'best'"):
        planners.get("best")
    with pytest.raises(SpecError, match=r"wfbp has no option 'cap_bytes'; it has none"):
        planners.get("wfbp", cap_bytes=3)
    with pytest.raises(SpecError, match=r"ddp: cap_bytes must be > 0, got 0"):
        planners.get("ddp", cap_bytes=0)


def test_every_listed_planner_can_be_got_and_exhaustive_is_not_listed() -> None:
    assert [planners.get(name).name for name in planners.NAMES] == list(planners.NAMES)
    assert "exhaustive" not in planners.NAMES
    assert planners.options_of("ddp") == ("cap_bytes", "first_cap_bytes")
