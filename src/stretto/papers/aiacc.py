"""AIACC-Training: many streams over links that one stream cannot fill."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stretto import zoo
from stretto.papers.result import (
    Correction,
    Figure,
    Omission,
    Reproduction,
    Series,
)
from stretto.papers.shared import planned_s
from stretto.zoo.clusters import (
    AIACC_LINK_BYTES_PER_S,
    AIACC_STREAM_SHARE,
    aiacc,
)

if TYPE_CHECKING:
    from stretto.schema import Workload

_HOSTS = (1, 2, 4, 8, 16, 32)


def aiacc_training() -> Reproduction:
    """Compute AIACC-Training's efficiencies from one stream's share of a link."""
    resnet = zoo.workload("resnet50", device="v100")
    vgg = zoo.workload("vgg16", device="v100")
    return Reproduction(
        paper="aiacc",
        title="AIACC-Training, n hosts of 8 V100, 30 Gb/s TCP",
        assumed=(
            *(str(x) for x in zoo.cluster("aiacc").provenance["assumed"]),
            "ResNet-50: 370 images/s on a V100 at batch 64; VGG-16: 236 images/s",
            "one stream: a ring, fused exactly; many: AIACC's units, up to 24 streams",
        ),
        figures=(
            *_table_1(),
            *_efficiencies(resnet, vgg),
            *_gamma(),
            *_score(),
        ),
        series=(_scaling(resnet), _scaling(vgg)),
        corrections=_corrections(),
        left=(
            Omission(
                item="Fig. 9, 10 (1.68x and 2.68x over Horovod and DDP, 256 GPUs)",
                reason=(
                    "depends on the test's batch sizes and hosts, which are unpublished"
                ),
            ),
            Omission(
                item="Fig. 11, 12 (3.3x, TensorFlow and MXNet)", reason="hardware"
            ),
            Omission(
                item="Fig. 13-15 (hybrid, small batches, GPT2-XL)", reason="hardware"
            ),
            Omission(
                item="section VI, search with an ensemble of techniques",
                reason="tunes a running job; its score is above. Planner aiacc "
                "searches the same units and streams on the simulator",
            ),
        ),
    )


def _table_1() -> list[Figure]:
    published = {
        "vgg16": (138.3, 31, 2),
        "resnet50": (25.6, 4, 1),
        "resnet101": (29.4, 8, 1),
        "transformer": (66.5, 145, 2),
        "bert-large": (302.2, 232, 2),
    }
    notes = {
        "resnet101": "printed 29.4 M, ResNet-101 has 44.55 M",
        "bert-large": (
            "the paper's figure covers the 24 encoder layers only; BERT-Large with its "
            "heads has 336.2 M"
        ),
        "transformer": (
            "the architecture is unpublished and was chosen to match this figure"
        ),
    }
    figures = []
    for name, (params_m, giga, factor) in published.items():
        graph = zoo.model(name, 384 if name == "bert-large" else None)
        figures.append(
            Figure(
                table="Table I",
                name=f"{name}: M parameters",
                ours=graph.elements / 1e6,
                reference=params_m,
                source="published",
                identity=name == "transformer",
                tolerance=0.005,
                note=notes.get(name, ""),
            )
        )
        unit = "2 GMAC" if factor == 2 else "GMAC"
        heads = ""
        macs = graph.macs
        if name == "bert-large":
            heads = "encoder only, 384 tokens"
            macs = sum(x.macs for x in graph.layers if ".encoder." in x.name)
        figures.append(
            Figure(
                table="Table I",
                name=f"{name}: G operations, as {unit}",
                ours=factor * macs / 1e9,
                reference=giga,
                source="published",
                identity=name == "transformer",
                tolerance=0.07,
                note=heads or notes.get(name, "") * (name == "transformer"),
            )
        )
    encoder = sum(
        p.elements for p in zoo.model("bert-large").parameters if ".encoder." in p.name
    )
    figures.append(
        Figure(
            table="Table I",
            name="bert-large: M parameters of the encoder layers",
            ours=encoder / 1e6,
            reference=302.2,
            source="published",
            tolerance=0.001,
        )
    )
    return figures


def efficiency(workload: Workload, hosts: int, planner: str, **options: int) -> float:
    """Return the throughput of all ranks over as many single ones: $T_1 / T_N$."""
    step_s = planned_s(planner, workload, aiacc(hosts=hosts), **options)
    if step_s is None:
        raise AssertionError(f"planner {planner} is missing")
    return (workload.forward_s + workload.backward_s) / step_s


def _halved(workload: Workload) -> Workload:
    """Return the workload with its gradients sent as float16."""
    return replace(
        workload,
        tensors=tuple(
            replace(t, bytes=t.bytes // 2, dtype="float16") for t in workload.tensors
        ),
    )


def _efficiencies(resnet: Workload, vgg: Workload) -> list[Figure]:
    one, many = efficiency(resnet, 4, "fusion"), efficiency(resnet, 4, "aiacc")
    vgg_one, vgg_many = efficiency(vgg, 4, "fusion"), efficiency(vgg, 4, "aiacc")
    return [
        Figure(
            table="section III (text on Fig. 2)",
            name="resnet50, 32 GPUs, Horovod: one stream at 30 %",
            ours=one,
            reference=0.75,
            source="published",
            tolerance=0.04 / 0.75,
        ),
        Figure(
            table="section III",
            name="resnet50, 32 GPUs, AIACC: many streams at 95 %",
            ours=many,
            reference=0.96,
            source="published",
            at_least=True,
            tolerance=0.0,
            note="published as over .96",
        ),
        Figure(
            table="section III",
            name="resnet50, 32 GPUs: AIACC over Horovod",
            ours=many / one,
            reference=1.3,
            source="published",
            tolerance=0.06,
        ),
        Figure(
            table="section III (text on Fig. 2)",
            name="vgg16, 32 GPUs, Horovod: one stream, float32",
            ours=vgg_one,
            reference=0.40,
            source="published",
            tolerance=0.2,
            note=".40 is between float32 and float16 on the wire",
        ),
        Figure(
            table="section III (text on Fig. 2)",
            name="vgg16, 32 GPUs, Horovod: one stream, float16 on the wire",
            ours=efficiency(_halved(vgg), 4, "fusion"),
            reference=0.40,
            source="published",
            tolerance=0.2,
        ),
        Figure(
            table="section III",
            name="vgg16, 32 GPUs, AIACC: many streams, float32",
            ours=vgg_many,
            reference=0.72,
            source="derived",
            tolerance=0.05 / 0.72,
            note="1.8 times .40, both published",
        ),
        Figure(
            table="section III",
            name="vgg16, 32 GPUs: AIACC over Horovod",
            ours=vgg_many / vgg_one,
            reference=1.8,
            source="published",
            tolerance=0.06,
            note="one stream at 30 % carries VGG-16's float32 gradients at .26, not at "
            "the .40 published for Horovod, so the ratio is too large",
        ),
        Figure(
            table="section VIII-A",
            name="resnet50, 256 GPUs, AIACC",
            ours=efficiency(resnet, 32, "aiacc"),
            reference=0.95,
            source="published",
            at_least=True,
            tolerance=0.0,
            note="published as over 95 %",
        ),
    ]


def _gamma() -> list[Figure]:
    r"""Return the slow-down of k streams: $\gamma_k = \max(1, k \kappa)$."""
    return [
        Figure(
            table="section III",
            name=f"slow-down of each of {k} streams",
            ours=max(1.0, k * AIACC_STREAM_SHARE),
            note="the fourth stream is the first that finds the link full",
        )
        for k in (1, 3, 4, 8)
    ]


def score(auc: float, window: int, used: int, exploration: float = 0.2) -> float:
    r"""Return a search technique's score in AIACC-Training's bandit (section VI).

    $AUC_t + C \sqrt{2 \log_2 |H| / H_t}$; infinite for a technique that was never used.
    """
    if used == 0:
        return math.inf
    return auc + exploration * math.sqrt(2 * math.log2(window) / used)


def _score() -> list[Figure]:
    return [
        Figure(
            table="section VI",
            name=f"score, AUC {auc:g}, used {used} of {window} times",
            ours=score(auc, window, used),
            note="an unused technique is tried first" if not used else "",
        )
        for auc, window, used in ((0.5, 64, 32), (0.5, 64, 3), (0.8, 64, 29))
    ]


def _scaling(workload: Workload) -> Series:
    return Series(
        title=f"{workload.name}: efficiency over GPUs",
        axis="GPUs",
        x=tuple(8 * hosts for hosts in _HOSTS),
        columns={
            "one stream": tuple(efficiency(workload, n, "fusion") for n in _HOSTS),
            "AIACC": tuple(efficiency(workload, n, "aiacc") for n in _HOSTS),
            "joint": tuple(efficiency(workload, n, "joint") for n in _HOSTS),
        },
        note="up to 8 GPUs within a host",
    )


def _corrections() -> tuple[Correction, ...]:
    true_m = zoo.model("resnet101").elements / 1e6
    share = AIACC_STREAM_SHARE * AIACC_LINK_BYTES_PER_S * 8 / 1e9
    return (
        Correction(
            where="Table I",
            defect="ResNet-101 29.4 M; BERT-Large 302.2 M; operations are MACs for "
            "ResNets, twice that for VGG and BERT",
            reading="recompute: stretto zoo list",
            shown=f"ResNet-101 has {true_m:.2f} M",
            holds=abs(true_m - 29.4) > 10,
        ),
        Correction(
            where="footnote 3",
            defect="the efficiency T_N / N_T is misprinted",
            reading="throughput_N / (N throughput_1)",
        ),
        Correction(
            where="section VIII",
            defect="3.3x and 1.68x over Horovod at 256 GPUs",
            reading="3.3x is TensorFlow and MXNet, 1.68x PyTorch",
        ),
        Correction(
            where="section VI, score",
            defect="logarithm without a base; H_t = 0 undefined",
            reading="base 2; infinite when unused",
            shown=f"unused: {score(0.0, 64, 0)}",
            holds=math.isinf(score(0.0, 64, 0)),
        ),
        Correction(
            where="Algorithm 1, line 7",
            defect="leaves the loop when no stream is free: units are lost",
            reading="wait for a stream",
        ),
        Correction(
            where="30 % of a link, or 10 Gb/s",
            defect="a share of the link",
            reading="a rate: one stream reaches 9 to 10 Gb/s of 10GbE, 15 to 21 of 100",
            shown=f"30 % of 30 Gb/s is {share:.0f} Gb/s",
            holds=9 <= share <= 10,
        ),
    )
