"""A model corrected by trials against the truth they were drawn from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stretto.cost.fit import constant_rate
from stretto.errors import SpecError
from stretto.schema import ComputeContention, Contention
from stretto.sim.step import simulate_step
from stretto.tune.correct import (
    Observation,
    backward_s,
    bucket_ends_s,
    corrected,
)

if TYPE_CHECKING:
    from stretto.schema import Cluster, Workload
    from stretto.tune.space import Space


def observed(
    space: Space, workload: Workload, truth: Cluster, every: int
) -> list[Observation]:
    plans = [space.plan(point, truth) for point in space.points[::every]]
    return [
        Observation(plan=p, step_s=simulate_step(workload, truth, p).iteration_s)
        for p in plans
    ]


def errors(
    space: Space, workload: Workload, model: tuple[Workload, Cluster], truth: Cluster
) -> list[float]:
    found = []
    for point in space.points:
        plan = space.plan(point, truth)
        true_s = simulate_step(workload, truth, plan).iteration_s
        found.append(abs(simulate_step(*model, plan).iteration_s / true_s - 1))
    return found


@pytest.mark.parametrize(("what", "factor"), [("flow", 0.8), ("link", 0.5)])
def test_a_few_trials_mend_a_wrong_rate(
    space: Space, workload: Workload, cluster: Cluster, what: str, factor: float
) -> None:
    wire, fit = cluster.inter_host, cluster.allreduce
    assert fit is not None
    assert wire.stream_bytes_per_s is not None
    if what == "flow":
        truth = replace(
            cluster,
            inter_host=replace(
                wire, stream_bytes_per_s=wire.stream_bytes_per_s * factor
            ),
            allreduce=replace(fit, s_per_byte=fit.s_per_byte / factor),
        )
    else:
        truth = replace(
            cluster,
            inter_host=replace(
                wire, bandwidth_bytes_per_s=wire.bandwidth_bytes_per_s * factor
            ),
        )
    before = errors(space, workload, (workload, cluster), truth)
    found = corrected(
        workload, cluster, observed(space, workload, truth, len(space.points) // 5)
    )
    after = errors(space, workload, (found.workload, found.cluster), truth)
    assert max(before) > 0.1
    assert sorted(after)[len(after) // 2] < 0.02
    assert max(after) < 0.06
    assert found.factors[what] == pytest.approx(factor, rel=0.1)


def test_computation_slowed_beside_communication_is_told_from_a_slower_network(
    space: Space, workload: Workload, cluster: Cluster
) -> None:
    """What the look does not measure: backward is longer the more lanes are busy."""
    wire = cluster.inter_host
    free = constant_rate(wire.bandwidth_bytes_per_s)
    truth = replace(
        cluster,
        contention=Contention(
            compute=ComputeContention(alpha1=1.0, alpha2=0.08),
            overlapped=free,
            exclusive=free,
            resources=(1,),
        ),
    )
    seen = []
    for point in space.points[:: len(space.points) // 3]:
        plan = space.plan(point, truth)
        step = simulate_step(workload, truth, plan)
        seen.append(
            Observation(
                plan=plan,
                step_s=step.iteration_s,
                backward_s=backward_s(step.timeline),
                bucket_ends_s=bucket_ends_s(step.timeline),
            )
        )
    before = errors(space, workload, (workload, cluster), truth)
    found = corrected(workload, cluster, seen)
    after = errors(space, workload, (found.workload, found.cluster), truth)
    assert max(before) > 0.1
    assert sorted(after)[len(after) // 2] < 0.01
    assert found.cluster.contention is not None
    assert found.cluster.contention.compute.alpha2 == pytest.approx(0.08, rel=0.15)
    assert found.factors["link"] == pytest.approx(1.0, abs=0.05)
    assert found.factors["flow"] == pytest.approx(1.0, abs=0.05)


def test_what_agrees_changes_nothing_and_nothing_changes_nothing(
    space: Space, workload: Workload, cluster: Cluster
) -> None:
    for seen in ([], observed(space, workload, cluster, 9)):
        found = corrected(workload, cluster, seen)
        assert found.factors == pytest.approx(dict.fromkeys(found.factors, 1.0))


def test_one_observation_moves_only_a_little_what_it_does_not_speak_of(
    space: Space, workload: Workload, cluster: Cluster
) -> None:
    plan = space.plan(space.points[0], cluster)
    true_s = 1.5 * simulate_step(workload, cluster, plan).iteration_s
    found = corrected(workload, cluster, [Observation(plan=plan, step_s=true_s)])
    predicted_s = simulate_step(found.workload, found.cluster, plan).iteration_s
    assert predicted_s == pytest.approx(true_s, rel=0.08)


def test_a_time_that_is_none_is_refused(
    space: Space, workload: Workload, cluster: Cluster
) -> None:
    plan = space.plan(space.points[0], cluster)
    with pytest.raises(SpecError, match="step_s must be finite and > 0, got 0"):
        corrected(workload, cluster, [Observation(plan=plan, step_s=0.0)])
