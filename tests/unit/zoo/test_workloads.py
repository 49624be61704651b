"""Times by roofline, and the papers' testbeds."""

from __future__ import annotations

import pytest

from stretto import zoo
from stretto.cost import all_reduce_s, cluster_at
from stretto.cost.fit import check_capacity
from stretto.errors import Infeasible, SpecError
from stretto.planners.base import LinearCost
from stretto.planners.fusion import FusionProblem
from stretto.planners.mg_wfbp import greedy_ends
from stretto.schema import Cluster, Workload

ASC = LinearCost(startup_s=1.4e-3, s_per_byte=1.7e-9)


def sequential_s(workload, ends, cost):
    """Step time of buckets sent one after another."""
    end_s, start = 0.0, 0
    for end in ends:
        size = sum(t.bytes for t in workload.tensors[start:end])
        end_s = max(end_s, workload.tensors[end - 1].ready_s) + cost.of(size)
        start = end
    return workload.forward_s + max(end_s, workload.backward_s)


# What an independent generator of the same tables gave: a bucket a tensor, the greedy
# merges, the best sequential fusion.
@pytest.mark.parametrize(
    ("name", "wfbp_s", "greedy_s", "groups", "fusion_s"),
    [
        ("resnet152", 1.154, 0.507, 4, 0.506),
        ("densenet201", 1.055, 0.230, 3, 0.220),
        ("inception-v4", 0.982, 0.366, 3, 0.358),
        ("bert-base", 1.179, 0.908, 4, 0.901),
    ],
)
def test_the_four_models_of_asc_wfbp(name, wfbp_s, greedy_s, groups, fusion_s):
    workload = zoo.workload(name)
    every = range(1, len(workload.tensors) + 1)
    assert sequential_s(workload, every, ASC) == pytest.approx(wfbp_s, rel=0.005)
    ends = greedy_ends(workload, ASC)
    assert len(ends) == groups
    assert sequential_s(workload, ends, ASC) == pytest.approx(greedy_s, rel=0.012)
    best_s = workload.forward_s + FusionProblem(workload=workload, cost=ASC).finish_s()
    assert best_s == pytest.approx(fusion_s, rel=0.005)


def test_distinct_ready_times():
    """A convolution and the normalization after it end at times of their own."""
    times = {t.ready_s for t in zoo.workload("resnet152").tensors}
    assert len(times) == 311


@pytest.mark.parametrize("name", zoo.MODELS)
def test_workloads_are_sound(name, tmp_path):
    made = zoo.workload(name)
    graph = zoo.model(name)
    assert made.total_bytes == 4 * graph.elements
    assert len(made.tensors) == len(graph.parameters)
    first = made.tensors[-1]
    assert first.name == graph.parameters[0].name
    assert first.ready_s <= made.backward_s
    assert first.needed_s < 0.05 * made.forward_s
    needed = [t.needed_s for t in made.tensors]
    assert needed == sorted(needed, reverse=True)
    made.save(tmp_path / "w.json")
    assert Workload.load(tmp_path / "w.json") == made


def test_published_times_and_given_ones():
    made = zoo.workload("resnet152")
    assert (made.batch_per_rank, made.device) == (32, "RTX 2080 Ti")
    assert (made.forward_s, made.backward_s) == (0.091, 0.182)
    given = zoo.workload("resnet152", batch=8, forward_s=0.1, backward_s=0.3)
    assert (given.forward_s, given.backward_s) == (0.1, 0.3)
    assert given.batch_per_rank == 8
    assert zoo.workload("resnet152", batch=64).forward_s == pytest.approx(
        2 * 0.091, rel=0.02
    )
    assert zoo.workload("resnet50").device == "RTX 2080 Ti"
    assert zoo.workload("resnet50", device="v100").forward_s == pytest.approx(
        64 / 370 / 3
    )


def test_a_faster_device_is_faster():
    times = [
        zoo.workload("wide-resnet101-2", device=d, batch=32).backward_s
        for d in ("2080ti", "v100", "a100")
    ]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_s": 0.1}, "both of forward_s and backward_s"),
        ({"batch": 0}, "batch must be >= 1, got 0"),
        ({"device": "abacus"}, "device must be one of 2080ti"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        zoo.workload("resnet50", **options)


@pytest.mark.parametrize("name", zoo.CLUSTERS)
def test_clusters_are_sound(name, tmp_path):
    made = zoo.cluster(name)
    made.save(tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == made
    assert made.provenance["source"]
    if name != "asc":
        check_capacity(made)


def test_the_published_gamma_is_more_than_the_link_carries():
    with pytest.raises(Infeasible, match="2 all-reduces at once"):
        check_capacity(zoo.cluster("asc"))


def test_the_papers_figures():
    asc = zoo.cluster("asc")
    assert (asc.ranks, asc.allreduce.startup_s, asc.allreduce.s_per_byte) == (
        32,
        1.4e-3,
        1.7e-9,
    )
    assert asc.concurrency.gamma == (1.0, 1.5)
    libra = zoo.cluster("libra")
    slower = 1 / (1 - libra.contention.compute.alpha2 * 2048)
    assert slower == pytest.approx(1.38, abs=1e-3)
    aiacc = zoo.cluster("aiacc", 32)
    assert aiacc.ranks == 256
    assert aiacc.inter_host.stream_bytes_per_s * 8 == pytest.approx(9e9)
    assert zoo.cluster("deeppool").ranks == 8
    assert zoo.cluster("mg-wfbp-ib-8").allreduce.s_per_byte == 3.06e-10
    assert "2.02 times" not in str(zoo.cluster("mg-wfbp-ib-8").provenance)
    assert "times the nominal" in zoo.cluster("mg-wfbp-10gbe-16").provenance["note"]


def test_wrong_clusters_are_refused():
    with pytest.raises(SpecError, match="cluster must be one of asc"):
        zoo.cluster("moon")
    with pytest.raises(SpecError, match=r"known at 1 host\(s\) only, got 4"):
        zoo.cluster("deeppool", 4)


@pytest.mark.parametrize(
    ("model", "batch", "one_gpu", "four_gpus", "tolerance"),
    # Samples per second of HKBU-HPML/ddl-benchmarks, results of 2020-05-29: BSP-A2A
    # (no overlap) on one host of 4 RTX 2080 Ti, and on one of them.
    [
        ("bert-large", 8, 49.0, 53.04, 0.03),
        ("bert-base", 64, 212.8, 555.52, 0.04),
        ("resnet50", 64, 253.1, 925.02, 0.05),
    ],
)
def test_asc_within_a_host_is_as_the_laboratory_measured(
    model, batch, one_gpu, four_gpus, tolerance
) -> None:

    size_bytes = 4 * zoo.model(model).elements
    host = cluster_at(zoo.cluster("asc"), 4)
    step_s = batch / one_gpu + all_reduce_s(size_bytes, host)
    assert 4 * batch / step_s == pytest.approx(four_gpus, rel=tolerance)
