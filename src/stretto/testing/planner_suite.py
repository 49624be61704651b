"""The suite that every planner must pass.

@pytest.mark.parametrize("check", planner_checks(MyPlanner), ids=str)
def test_contract(check):
    check()
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from stretto.errors import Infeasible
from stretto.planners._orders import alternates
from stretto.schema import codec
from stretto.sim.step import simulate_step
from stretto.testing.checks import Check
from stretto.testing.instances import build_cluster, build_workload, random_instance

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.planners import AbstractPlanner
    from stretto.schema import Cluster, Plan, Workload

SEEDS = range(8)

CORNERS: dict[str, tuple[list[int], list[float], list[str] | None]] = {
    "one tensor": ([4096], [0.01], None),
    "all ready at once": ([4000, 8_000_000, 40, 400_000], [0.02] * 4, None),
    "ready at the start": ([4000, 4000], [0.0, 0.0], None),
    "no bytes at all": ([0, 0, 0], [0.0, 0.01, 0.02], None),
    "empty between full": (
        [0, 4_000_000, 0, 0, 4000],
        [0, 0.01, 0.01, 0.02, 0.03],
        None,
    ),
    "types alternate": (
        [4000, 8000, 4000, 400_000],
        [0.0, 0.01, 0.02, 0.03],
        ["float32", "float16", "float32", "bfloat16"],
    ),
}
"""Sizes in bytes, ready times in seconds, and types of a workload's gradients."""

MANY_TENSORS = 40
"""Gradients of the workloads whose times are scaled, over 20 to 200 ms of backward."""

EXPONENTS = (-10, -1, 2, 10)
"""Powers of 2 that multiply all times: products and quotients stay exact."""


def planner_checks(
    make: Callable[[], AbstractPlanner],
    *,
    max_tensors: int | None = None,
    slower: Callable[[float], AbstractPlanner] | None = None,
) -> list[Check]:
    """Return the checks of the planner that ``make`` returns.

    Args:
        make: Returns a new planner, for instance its class.
        max_tensors: Number of gradients of random workloads; by default 1 to 6.
        slower: Returns the planner whose own times, such as a cycle, are multiplied by
            a factor; by default the planner has none.
    """
    scaled = slower or (lambda _: make())
    checks = {
        f"random instance {seed}": partial(_keeps_contract, make, seed, max_tensors)
        for seed in SEEDS
    }
    checks |= {corner: partial(_keeps_corner, make, corner) for corner in CORNERS}
    checks["one rank sends nothing"] = partial(_sends_nothing_alone, make)
    checks["a type without an average is refused"] = partial(_refuses_integers, make)
    checks |= {
        f"times multiplied by 2**{exponent}": partial(
            _scales, make, scaled, 2.0**exponent, max_tensors or MANY_TENSORS
        )
        for exponent in EXPONENTS
    }
    checks["a plan survives its file"] = partial(_survives_file, make)
    return [Check(name, run) for name, run in checks.items()]


def check_plan(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    """Verify a planner's plan against its workload and cluster.

    Every tensor is in one bucket, each bucket has one type, and the prediction is the
    simulator's. Tensors are in ready order unless types alternate.

    Raises:
        AssertionError: the plan breaks the contract.
    """
    names = [name for bucket in plan.buckets for name in bucket.tensors]
    expected = [tensor.name for tensor in workload.tensors]
    if alternates(workload):
        names, expected = sorted(names), sorted(expected)
    assert names == expected, f"buckets hold {names}, the workload {expected}"
    dtypes = {tensor.name: tensor.dtype for tensor in workload.tensors}
    for bucket in plan.buckets:
        held = {dtypes[name] for name in bucket.tensors}
        assert held == {bucket.wire_dtype}, f"a bucket of {held} is {bucket.wire_dtype}"
        assert bucket.lane < plan.lanes, f"lane {bucket.lane} of {plan.lanes}"
    plan.check_matches(workload)
    assert plan.ranks == cluster.ranks, f"{plan.ranks} ranks, not {cluster.ranks}"
    assert plan.predicted is not None, "the plan has no prediction: use `finish`"
    step = simulate_step(workload, cluster, plan)
    assert plan.predicted.iteration_s == step.iteration_s, "not the simulator's time"
    assert plan.predicted.gap >= -1e-9, f"below its bound by {-plan.predicted.gap:g}"
    assert plan.predicted.iteration_s >= workload.forward_s + workload.backward_s


def _keeps_contract(
    make: Callable[[], AbstractPlanner], seed: int, max_tensors: int | None
) -> None:
    workload, cluster = random_instance(seed, tensors=max_tensors)
    before = copy.deepcopy((workload, cluster))
    planner = make()
    plan = planner.plan(workload, cluster)
    assert plan.planner == planner.name, f"{plan.planner!r}, not {planner.name!r}"
    check_plan(plan, workload, cluster)
    assert make().plan(workload, cluster) == plan, "a second plan differs"
    assert (workload, cluster) == before, "the planner changed its input"


def _keeps_corner(make: Callable[[], AbstractPlanner], corner: str) -> None:
    sizes, ready_s, dtypes = CORNERS[corner]
    workload = build_workload(sizes, ready_s, dtypes=dtypes, forward_s=0.01)
    cluster = build_cluster()
    check_plan(make().plan(workload, cluster), workload, cluster)


def _sends_nothing_alone(make: Callable[[], AbstractPlanner]) -> None:
    workload = build_workload([4_000_000, 400], [0.01, 0.02], forward_s=0.01)
    cluster = build_cluster(hosts=1)
    plan = make().plan(workload, cluster)
    check_plan(plan, workload, cluster)
    assert plan.predicted is not None
    assert math.isclose(plan.predicted.iteration_s, 0.03, rel_tol=1e-6)
    assert plan.predicted.exposed_communication_s == 0.0


def _refuses_integers(make: Callable[[], AbstractPlanner]) -> None:
    workload = build_workload([4, 8], [0.0, 0.1], dtypes=["float32", "int64"])
    try:
        make().plan(workload, build_cluster())
    except Infeasible as error:
        text = str(error)
        assert "t1" in text, f"names no tensor: {text}"
        assert "int64" in text, f"names no type: {text}"
    else:
        raise AssertionError("a gradient of type int64 was planned")


def _scales(
    make: Callable[[], AbstractPlanner],
    slower: Callable[[float], AbstractPlanner],
    factor: float,
    tensors: int,
) -> None:
    for seed in SEEDS[:3]:
        _scales_with(seed, make(), slower(factor), factor, tensors)


def _scales_with(
    seed: int,
    planner: AbstractPlanner,
    slower: AbstractPlanner,
    factor: float,
    tensors: int,
) -> None:
    workload, cluster = random_instance(seed, tensors=tensors)
    slow_workload = replace(
        workload,
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
        tensors=tuple(replace(t, ready_s=t.ready_s * factor) for t in workload.tensors),
    )
    link = cluster.inter_host
    cap = link.stream_bytes_per_s
    slow_cluster = replace(
        cluster,
        inter_host=replace(
            link,
            latency_s=link.latency_s * factor,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
            stream_bytes_per_s=cap / factor if cap else None,
        ),
    )
    plan = planner.plan(workload, cluster)
    scaled = slower.plan(slow_workload, slow_cluster)
    assert scaled.buckets == plan.buckets, (
        f"buckets end after {_ends(scaled)} where all times are multiplied by "
        f"{factor:g}, otherwise after {_ends(plan)}: compare times with times of the "
        "workload or the cluster, not with a number of seconds"
    )
    assert plan.predicted is not None
    assert scaled.predicted is not None
    expected_s = plan.predicted.iteration_s * factor
    assert math.isclose(scaled.predicted.iteration_s, expected_s, rel_tol=1e-6), (
        f"{scaled.predicted.iteration_s:g} s, expected {expected_s:g} s"
    )


def _ends(plan: Plan) -> list[str]:
    return [bucket.tensors[-1] for bucket in plan.buckets]


def _survives_file(make: Callable[[], AbstractPlanner]) -> None:
    workload, cluster = random_instance(1, tensors=4)
    plan = make().plan(workload, cluster)
    assert codec.decode(codec.encode(plan), type(plan)) == plan
