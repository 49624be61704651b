"""LIBRA: communication threads beside computation, with fusion."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stretto import planners, zoo
from stretto.cost import compute_rate, curve_bytes_per_s
from stretto.papers.result import (
    Correction,
    Figure,
    Omission,
    Reproduction,
    Series,
)
from stretto.papers.shared import (
    drafted_s,
    instance,
    missing,
    planned_s,
    unit_cluster,
)
from stretto.planners.base import Draft
from stretto.zoo.clusters import LIBRA_ALPHA2, libra

if TYPE_CHECKING:
    from stretto.schema import Cluster, Workload

_BATCH = {"vgg16": 128, "resnet152": 32, "bert-base": 32, "xception": 32}
_PARAMS_M = {"xception": 22, "resnet152": 60, "vgg16": 138, "bert-base": 110}
# By how many percent the backward of MG-WFBP at 512, 1024, 2048 threads exceeds LIBRA's
# in a study with the constants assumed here.
_STUDY = {
    "vgg16": (1.7, 4.7, 10.2),
    "resnet152": (2.4, 6.1, 12.9),
    "bert-base": (40.0, 16.5, 9.1),
    "xception": (1.8, 3.7, 7.3),
}
_BESIDE = "not in the paper: our study with these constants, backward at N = 8"
_NCCL_THREADS = 2048
_LATENCIES_S = (10e-6, 20e-6, 30e-6)
_GREEDY = f"MG-WFBP greedy, {_NCCL_THREADS} threads"
_FUSED = f"exact fusion, {_NCCL_THREADS} threads"
_SCALES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def libra_paper() -> Reproduction:
    """Compute LIBRA's orderings and ranges under assumed rate curves, and Fig. 9."""
    workloads = {
        name: zoo.workload(name, batch=batch, device="v100")
        for name, batch in _BATCH.items()
    }
    curves = tuple(_scaling(workloads["vgg16"], latency) for latency in _LATENCIES_S)
    return Reproduction(
        paper="libra",
        title="LIBRA, 8 hosts of one V100, 50 Gb/s RDMA",
        assumed=(
            *(str(x) for x in zoo.cluster("libra").provenance["assumed"]),
            "layer times by roofline on a V100; backward two thirds of a step",
        ),
        figures=(
            *_table_1(),
            *_contention(),
            *_ordering(workloads),
            *_at_2048(curves, workloads["vgg16"].forward_s),
        ),
        series=curves,
        corrections=_corrections(),
        left=(
            *missing("libra-m", "libra"),
            Omission(
                item="Fig. 4, 5", reason="measured against their own fit; no constants"
            ),
            Omission(
                item="Fig. 6, 7 to the digit",
                reason="the constants of Eq. 6, the latency and the layer times are "
                "unpublished: only orderings and ranges",
            ),
            Omission(
                item="Fig. 6, ByteScheduler (SE)", reason="its parameters are unknown"
            ),
        ),
    )


def _table_1() -> list[Figure]:
    return [
        Figure(
            table="Table I",
            name=f"{name}: M parameters",
            ours=zoo.model(name).elements / 1e6,
            reference=params_m,
            source="published",
            tolerance=0.04,
            note="printed without decimals",
        )
        for name, params_m in _PARAMS_M.items()
    ]


def _contention() -> list[Figure]:
    contention = zoo.cluster("libra").contention
    if contention is None:
        raise AssertionError("the testbed has no contention")
    slower = 1 / compute_rate(contention.compute, 2048) - 1
    few, many = (curve_bytes_per_s(contention.overlapped, r) for r in (128, 2048))
    return [
        Figure(
            table="Fig. 1a",
            name="computation beside 2048 threads, longer by",
            ours=100 * slower,
            reference=38.0,
            source="published",
            identity=True,
            unit="%",
            tolerance=0.005,
            note=f"alpha2 = {LIBRA_ALPHA2:g} comes from this figure",
        ),
        Figure(
            table="Fig. 1a",
            name="computation beside 4096 threads, times as long",
            ours=1 / compute_rate(contention.compute, 4096),
            note="the value of Eq. 5's line",
        ),
        Figure(
            table="Eq. 6",
            name="communication at 2048 threads against 128, faster by a factor",
            ours=many / few,
            note="assumed curve",
        ),
    ]


def _at(cluster: Cluster, threads: int) -> Cluster:
    """Return the cluster with one level of threads, as without a choice."""
    if cluster.contention is None:
        raise AssertionError("the testbed has no contention")
    return replace(
        cluster, contention=replace(cluster.contention, resources=(threads,))
    )


def _best_static_s(workload: Workload, cluster: Cluster) -> float:
    """Return sequential fusion's best step with the same threads for all buckets."""
    if cluster.contention is None:
        raise AssertionError("the testbed has no contention")
    return min(
        planned_s("fusion", workload, _at(cluster, r)) or math.inf
        for r in cluster.contention.resources
    )


def _best_s(workload: Workload, cluster: Cluster) -> tuple[float, str]:
    """Return LIBRA's step, or without LIBRA exact fusion's with the best threads."""
    ours_s = planned_s("libra", workload, cluster)
    if ours_s is not None:
        return ours_s, "LIBRA"
    return _best_static_s(workload, cluster), "fusion at its best threads"


def _ordering(workloads: dict[str, Workload]) -> list[Figure]:
    cluster = zoo.cluster("libra")
    figures = []
    for name, made in workloads.items():
        best_s, who = _best_s(made, cluster)
        backward_s = best_s - made.forward_s
        greedy = {
            r: planned_s("mg-wfbp", made, _at(cluster, r)) or 0.0
            for r in (512, 1024, 2048)
        }
        for (threads, greedy_s), study in zip(
            greedy.items(), _STUDY[name], strict=True
        ):
            figures.append(
                Figure(
                    table=_BESIDE,
                    name=f"{name}: MG-WFBP at {threads} threads over {who}",
                    ours=100 * ((greedy_s - made.forward_s) / backward_s - 1),
                    reference=study,
                    source="target",
                    unit="%",
                )
            )
        greedy_s = max(greedy[1024], greedy[2048]) - made.forward_s
        figures.append(
            Figure(
                table="Fig. 7",
                name=f"{name}: backward against MG-WFBP, shorter by",
                ours=100 * (1 - backward_s / greedy_s),
                reference=5.6,
                source="published",
                reference_high=13.0,
                unit="%",
                tolerance=0.05,
                note="NCCL at 1024 or 2048 threads, whichever is slower",
            )
        )
        horovod_s = planned_s("horovod", made, _at(cluster, _NCCL_THREADS)) or 0.0
        figures.append(
            Figure(
                table="Fig. 7",
                name=f"{name}: backward against Horovod, shorter by",
                ours=100 * (1 - backward_s / (horovod_s - made.forward_s)),
                reference=10.1,
                source="published",
                reference_high=20.4,
                unit="%",
                tolerance=0.05,
                note="Horovod's defaults: 64 MiB, 5 ms; if it is missed: Horovod's "
                "cost of agreeing each cycle is not modeled",
            )
        )
        free_s = planned_s("fusion", made, replace(cluster, contention=None)) or 0.0
        none = Draft(
            ends=(len(made.tensors),),
            slices=(1,),
            bucket_lanes=(0,),
            overlap="none",
        )
        apart_s = drafted_s(none, made, _at(cluster, _NCCL_THREADS)) - made.forward_s
        figures.append(
            Figure(
                table=_BESIDE,
                name=f"{name}: without overlap at 2048 threads over {who}",
                ours=100 * (apart_s / backward_s - 1),
                reference=21.0,
                reference_high=43.0,
                source="target",
                unit="%",
            )
        )
        figures.append(
            Figure(
                table="Fig. 6",
                name=f"{name}: throughput below contention-free by",
                ours=100 * (1 - free_s / best_s),
                reference=5.5,
                source="published",
                unit="%",
                note="the paper's mean over its models",
            )
        )
    return figures


def _scaling(workload: Workload, latency_s: float) -> Series:
    """Compute Fig. 9: step times over ranks, and the sources of the gain."""
    columns: dict[str, list[float]] = {}
    for ranks in _SCALES:
        cluster = libra(hosts=ranks, latency_s=latency_s)
        for name, step_s in _curves_s(workload, cluster).items():
            columns.setdefault(name, []).append(step_s)
    return Series(
        title=f"Fig. 9: {workload.name}, latency {latency_s * 1e6:g} us, step time",
        axis="ranks",
        x=_SCALES,
        columns={name: tuple(values) for name, values in columns.items()},
        unit="s",
        note="a ring but for the last",
    )


def _curves_s(workload: Workload, cluster: Cluster) -> dict[str, float]:
    """Compute step times at one number of ranks: fusion first, then threads."""
    fixed = _at(cluster, _NCCL_THREADS)
    exact = "libra" if "libra" in planners.NAMES else "fusion"
    found = {
        _GREEDY: planned_s("mg-wfbp", workload, fixed),
        _FUSED: planned_s(exact, workload, fixed),
        "fusion, the best threads": _best_static_s(workload, cluster),
        "libra-m": planned_s("libra-m", workload, cluster),
        "libra": planned_s("libra", workload, cluster),
        "joint, algorithms too": planned_s(
            "joint",
            workload,
            cluster,
            dims=("fusion", "resource", "algorithm"),
            robust=False,
        ),
    }
    return {name: step_s for name, step_s in found.items() if step_s is not None}


def _at_2048(curves: tuple[Series, ...], forward_s: float) -> list[Figure]:
    figures = []
    for curve, latency_s in zip(curves, _LATENCIES_S, strict=True):
        at = f"vgg16, 2048 ranks, {latency_s * 1e6:g} us"
        last = {name: values[-1] for name, values in curve.columns.items()}
        greedy_s, fusion_s = last[_GREEDY], last[_FUSED]
        best = "libra" if "libra" in last else "fusion, the best threads"
        figures += [
            Figure(
                table="Fig. 9",
                name=f"{at}: {best} over MG-WFBP, throughput",
                ours=100 * (greedy_s / last[best] - 1),
                reference=21.0,
                source="published",
                unit="%",
                tolerance=0.2,
                note="the latency is unpublished: at 10 us the greedy rule does not "
                "yet end with one group",
            ),
            Figure(
                table="Fig. 9",
                name=f"{at}: {best} over MG-WFBP, backward",
                ours=100 * ((greedy_s - forward_s) / (last[best] - forward_s) - 1),
                unit="%",
            ),
            Figure(
                table="Fig. 9",
                name=f"{at}: by exact fusion alone, backward",
                ours=100 * ((greedy_s - forward_s) / (fusion_s - forward_s) - 1),
                unit="%",
                note=(
                    "share of the gain that fusion alone brings with the greedy "
                    "rule's own threads"
                ),
            ),
        ]
    return figures


def _corrections() -> tuple[Correction, ...]:
    return (
        _grid(),
        _empty_group(),
        Correction(
            where="Algorithm 1, line 24",
            defect="t_2 > 0",
            reading="t_c > 0, and t_c = 0 exactly when p + a <= g",
        ),
        Correction(
            where="Algorithm 1, lines 4-5",
            defect="T[0][0][z] = z w reads as a communication",
            reading="z chunks computed, nothing sent: stage 0; T[0][l > 0] is infinite",
        ),
        Correction(
            where="section III-B",
            defect="T(i, .) is the time when stage i ends",
            reading="the start of communication i + 1, not the end of i",
        ),
        Correction(
            where="Eq. 9-11",
            defect="the start-up is spread over the message",
            reading="an option (mixed); physically a phase in which nothing is sent",
        ),
        Correction(
            where="Eq. 26",
            defect="adjusts tau_(j+1) in round j",
            reading="tau_j for j = 1 .. K-1, to the next edge; the bound is unchanged",
        ),
        Correction(
            where="abstract",
            defect="6-13 % and 10-20 %",
            reading="5.6-13.0 % and 10.1-20.4 % (body)",
        ),
        Correction(
            where="T(L, Z)",
            defect="counts backward only",
            reading="a step is t_f + T",
        ),
        Correction(
            where="MG-WFBP, the baseline",
            defect="called proved optimal",
            reading="a greedy rule: see stretto reproduce asc-wfbp",
        ),
    )


def _grid() -> Correction:
    chunk = 0.9 / 3
    edge = 3 * chunk
    return Correction(
        where="Algorithm 1, lines 17-21",
        defect="tests id * w < sum in floating point; may leave the grid",
        reading="with a tolerance, clamped to Z",
        shown=f"b = 0.9, Z = 3: 3 w = {edge!r} < 0.9 is {edge < 0.9}",
        holds=edge < 0.9,
    )


def _empty_group() -> Correction:
    workload, cluster = instance((0.1, 0.1), (0.0, 0.1)), unit_cluster((1.0,))
    one_s = drafted_s(Draft.in_turn((2,)), workload, cluster)
    two_s = drafted_s(Draft.in_turn((1, 2)), workload, cluster)
    return Correction(
        where="Algorithm 1, line 9 (l' = l)",
        defect="seems unnecessary",
        reading="keep it: an empty group makes K an upper limit",
        shown=f"two tensors of 0.1, a = 1, K = 2: both groups forced {two_s:.1f}, "
        f"one {one_s:.1f}",
        holds=one_s < two_s,
    )
