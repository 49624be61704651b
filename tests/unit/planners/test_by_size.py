"""All-reduce times that follow no one line, in planning and in simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto import _api, planners
from stretto.cost import all_reduce_s
from stretto.cost.fit import fit_cluster
from stretto.schema import (
    AllReduceFit,
    Cluster,
    CollectiveSample,
    ExtraStartup,
    codec,
)
from stretto.sim import lower_bound, simulate_step
from stretto.sim.replay import prepared
from stretto.sim.step_model import StepModel
from stretto.tune.calibration import PRIOR_RATIO, _rewired

POINTS = ((1 << 10, -1.5e-4), (1 << 14, 4e-4), (1 << 18, 2e-3), (1 << 20, 0.0))


def with_points(cluster: Cluster) -> Cluster:
    fit = AllReduceFit(
        startup_s=2e-4,
        s_per_byte=3e-8,
        ranks=max(2, cluster.ranks),
        extra=tuple(ExtraStartup(bytes=b, extra_s=s) for b, s in POINTS),
    )
    return replace(cluster, allreduce=fit)


@pytest.mark.parametrize("contended", [False, True])
def test_all_models_of_a_step_agree(contended, make_instance) -> None:
    differs = 0
    for seed in range(12):
        workload, cluster = make_instance(seed, tensors=6, contended=contended)
        bare, cluster = cluster, with_points(cluster)
        for name in ("wfbp", "aiacc", "joint"):
            plan = planners.get(name).plan(workload, cluster)
            expected = simulate_step(workload, cluster, plan).iteration_s
            draft = (
                tuple(_ends(plan)),
                plan.lanes,
                tuple(b.lane for b in plan.buckets),
                tuple(b.slices for b in plan.buckets),
            )
            if plan.overlap == "backward":
                stepped = StepModel(workload, cluster).iteration_s(*draft)
                rings = ["ring"] * len(plan.buckets)
                mixed = StepModel(workload, cluster).iteration_s(*draft, (), rings)
                assert stepped == pytest.approx(expected, rel=1e-9)
                assert mixed == pytest.approx(expected, rel=1e-9)
            ready = prepared(workload, cluster, plan)
            replayed = StepModel(workload, cluster).times(ready)
            backward_s = expected - workload.forward_s
            assert replayed.end_s == pytest.approx(backward_s, rel=1e-9)
            line = replace(cluster.allreduce, extra=())
            differs += (
                simulate_step(workload, replace(bare, allreduce=line), plan).iteration_s
                != expected
            )
    assert differs > 8


def test_corrected_start_ups_scale_what_sizes_add(make_instance) -> None:
    workload, cluster = make_instance(1, tensors=6, contended=False)
    cluster = with_points(cluster)
    plan = planners.get("aiacc").plan(workload, cluster)
    model, ready = StepModel(workload, cluster), prepared(workload, cluster, plan)
    neutral = dict.fromkeys(PRIOR_RATIO, 1.0)
    for startup in (0.5, 3.0):
        corrected = _rewired(cluster, neutral | {"startup": startup})
        step_s = simulate_step(workload, corrected, plan).iteration_s
        end_s = model.on(corrected).times(ready).end_s
        assert end_s == pytest.approx(step_s - workload.forward_s, rel=1e-9)


def _ends(plan):
    end = 0
    for bucket in plan.buckets:
        end += len(bucket.tensors)
        yield end


@pytest.mark.parametrize("contended", [False, True])
def test_no_plan_beats_the_bound(contended, make_instance) -> None:
    for seed in range(12):
        workload, cluster = make_instance(seed, tensors=3, contended=contended)
        cluster = with_points(cluster)
        best = planners.get("exhaustive").plan(workload, cluster).predicted
        limit_s = best.iteration_s * (1 + 1e-9)
        for certificate in ("fast", "lp"):
            bound = lower_bound(workload, cluster, certificate=certificate, max_lanes=2)
            assert bound.value_s <= limit_s, seed
        joint = _api.plan(workload, cluster, max_lanes=2, robust=False).predicted
        assert joint.lower_bound_s <= limit_s
        assert joint.iteration_s <= limit_s * 1.01, seed


def test_a_fit_by_size_is_near_what_was_measured() -> None:
    def measured_s(size: int) -> float:
        return 2e-5 + 2e-9 * size if size < 2**20 else 1.5e-3 + 8e-10 * size

    samples = [
        CollectiveSample(
            size_bytes=size,
            lanes=1,
            ranks=4,
            duration_s=measured_s(size),
            spread_s=0.0,
            repetitions=5,
        )
        for size in (2**e for e in range(10, 27))
    ]
    line = fit_cluster(samples, name="line", hosts=4)
    by_size = fit_cluster(samples, name="by size", hosts=4, by_size=True)
    assert not line.allreduce.extra

    def worst(cluster: Cluster) -> float:
        return max(
            abs(all_reduce_s(s.size_bytes, cluster) / s.duration_s - 1) for s in samples
        )

    assert worst(line) > 0.1
    assert worst(by_size) < 0.01
    assert codec.decode(codec.encode(by_size), Cluster) == by_size
