"""ASC-WFBP: Shi et al., INFOCOM 2021."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from stretto import planners, zoo
from stretto.cost.fit import check_capacity
from stretto.errors import Infeasible
from stretto.papers.result import Correction, Figure, Omission, Reproduction
from stretto.papers.shared import (
    drafted_s,
    instance,
    missing,
    planned_s,
    unit_cluster,
)
from stretto.planners.base import Draft, predicted_s
from stretto.zoo.clusters import (
    ASC_LINK_BYTES_PER_S,
    ASC_S_PER_BYTE,
    ASC_STARTUP_S,
)

if TYPE_CHECKING:
    from stretto.schema import Workload

_MODELS = ("resnet152", "densenet201", "inception-v4", "bert-base")
_RANKS = 32
_TENSORS = (467, 604, 449, 206)
_PARAMS_M = (60, 20, 42, 110)
_WFBP_S = (0.956, 0.778, 0.719, 1.010)
_MG_S = (0.710, 0.375, 0.510, 1.062)
_ASC_S = (0.524, 0.314, 0.377, 0.924)
_S1 = (1.82, 2.48, 1.91, 1.09)
_S2 = (1.35, 1.20, 1.35, 1.15)
_S_MAX = (17.5, 32.0, 17.2, 11.5)
_S = (16.7, 22.3, 16.1, 10.6)
# What an exhaustive study of the same model found with the published constants.
_JOINT_S = (0.4022, 0.2203, 0.2845, 0.7129)


def asc_wfbp() -> Reproduction:
    """Compute the tables of ASC-WFBP that follow from its constants and the models."""
    workloads = [zoo.workload(name) for name in _MODELS]
    return Reproduction(
        paper="asc-wfbp",
        title="ASC-WFBP (INFOCOM 2021), 8 hosts of 4 RTX 2080 Ti, 10GbE",
        assumed=(
            "layer times by roofline, scaled to those that Tables IV and V imply",
            "forward is one third of a step",
            "a = 1.4 ms, b = 1.7 ns/B, gamma = 1.5 as published (section III)",
        ),
        figures=(
            *_models(workloads),
            *_table_v(workloads),
            *_table_iv(workloads),
            *_beyond(workloads),
        ),
        corrections=_corrections(),
        left=(
            *missing("asc-wfbp"),
            Omission(item="Fig. 4, Fig. 5", reason="curves measured on the hardware"),
            Omission(
                item="Table IV, columns S1 and S2 from a model",
                reason="no (a, b, gamma) reproduces all twelve cells: the best fit "
                "differs by 12.5 % in the mean",
            ),
            Omission(
                item="Fig. 6 (communication cut by 65 %, 22-74 %)",
                reason="does not follow from the paper's own Table IV, see below",
            ),
        ),
    )


def _models(workloads: list[Workload]) -> list[Figure]:
    figures = []
    for made, tensors, params_m in zip(workloads, _TENSORS, _PARAMS_M, strict=True):
        figures += [
            Figure(
                table="Table III",
                name=f"{made.name}: tensors",
                ours=len(made.tensors),
                reference=tensors,
                source="published",
                tolerance=0.0,
            ),
            Figure(
                table="Table III",
                name=f"{made.name}: M parameters",
                ours=made.total_bytes / 4e6,
                reference=params_m,
                source="published",
                tolerance=0.02,
            ),
        ]
    startup_s = ASC_STARTUP_S * _TENSORS[0]
    sending_s = ASC_S_PER_BYTE * workloads[0].total_bytes
    figures.append(
        Figure(
            table="Eq. 4",
            name="resnet152: all tensors one by one",
            ours=startup_s + sending_s,
            unit="s",
            note="from the published a, b and number of tensors; the paper gives no "
            "such time",
        )
    )
    return figures


def _s_max(compute_s: float, backward_s: float, elements: float) -> float:
    """Return the largest speed-up over one device (Eq. 42, 43)."""
    min_s = 8 * elements / ASC_LINK_BYTES_PER_S
    exposed_s = min_s - min(backward_s, min_s)
    return _RANKS * compute_s / (compute_s + exposed_s)


def _table_v(workloads: list[Workload]) -> list[Figure]:
    figures = [
        Figure(
            table="Eq. 43",
            name="resnet152: least communication, 60 M parameters",
            ours=8 * 60e6 / ASC_LINK_BYTES_PER_S,
            reference=0.407,
            source="published",
            identity=True,
            unit="s",
            note="the paper's own division",
            tolerance=0.001,
        )
    ]
    ratios = []
    for i, made in enumerate(workloads):
        compute_s = made.forward_s + made.backward_s
        elements = 60e6 if made.name == "resnet152" else made.total_bytes / 4
        s_max = _s_max(compute_s, made.backward_s, elements)
        speed = _RANKS * compute_s / _ASC_S[i]
        ratios.append(speed / s_max)
        figures += [
            Figure(
                table="Table V",
                name=f"{made.name}: S max",
                ours=s_max,
                reference=_S_MAX[i],
                source="published",
                identity=made.name != "resnet152",
                tolerance=0.005,
                note=""
                if made.name == "resnet152"
                else "the time on one device is itself derived from Table V",
            ),
            Figure(
                table="Table V",
                name=f"{made.name}: S",
                ours=speed,
                reference=_S[i],
                source="published",
                identity=True,
                tolerance=0.005,
                note="from the measured step of Table IV",
            ),
        ]
    figures.append(
        Figure(
            table="Table V",
            name="mean S / S max",
            ours=100 * fmean(ratios),
            reference=87.7,
            source="published",
            identity=True,
            note="from the paper's own S and S max",
            unit="%",
            tolerance=0.005,
        )
    )
    return figures


def _table_iv(workloads: list[Workload]) -> list[Figure]:
    figures = []
    for i, made in enumerate(workloads):
        name = made.name
        compute_s = made.forward_s + made.backward_s
        figures += [
            Figure(
                table="Table IV",
                name=f"{name}: WFBP, a = 0.9 ms",
                ours=_wfbp_s(made, 0.9e-3),
                reference=_WFBP_S[i],
                source="published",
                unit="s",
                tolerance=0.08,
                note="a was fitted to this column, which needs 0.8 to 1.0 ms",
            ),
            Figure(
                table="Table IV",
                name=f"{name}: WFBP, a = 1.4 ms",
                ours=_wfbp_s(made, ASC_STARTUP_S),
                reference=_WFBP_S[i],
                source="published",
                unit="s",
                tolerance=0.08,
                note="the published a contradicts the paper's own WFBP times",
            ),
            Figure(
                table="Table IV",
                name=f"{name}: MG-WFBP as one all-reduce after backward",
                ours=compute_s + ASC_STARTUP_S + ASC_S_PER_BYTE * made.total_bytes,
                reference=_MG_S[i],
                source="published",
                unit="s",
                tolerance=0.06,
            ),
            Figure(
                table="Table IV",
                name=f"{name}: MG-WFBP's greedy, overlapped",
                ours=_planned_s("mg-wfbp", made, "asc-uncapped"),
                reference=_MG_S[i],
                source="published",
                unit="s",
                tolerance=0.08,
                note="the measured column is a run without overlap",
            ),
        ]
        ours_s = planned_s("asc-wfbp", made, zoo.cluster("asc-uncapped"))
        if ours_s is not None:
            hosts = "the host's work for each of 604 tensors is not modeled"
            figures.append(
                Figure(
                    table="Table IV",
                    name=f"{name}: ASC-WFBP, Algorithm 1 corrected",
                    ours=ours_s,
                    reference=_ASC_S[i],
                    source="published",
                    unit="s",
                    tolerance=0.08,
                    note=hosts if name == "densenet201" else "",
                )
            )
        figures.append(
            Figure(
                table="Table IV",
                name=f"{name}: S1, its own times divided",
                ours=_WFBP_S[i] / _ASC_S[i],
                reference=_S1[i],
                source="published",
                identity=True,
                tolerance=0.004,
            )
        )
        figures.append(
            Figure(
                table="Table IV",
                name=f"{name}: S2, its own times divided",
                ours=_MG_S[i] / _ASC_S[i],
                reference=_S2[i],
                source="published",
                identity=True,
                tolerance=0.004,
                note=".375 / .314 is 1.19, printed 1.20"
                if name == "densenet201"
                else "",
            )
        )
    return figures


def _beyond(workloads: list[Workload]) -> list[Figure]:
    """Compute what the best plans reach under the same constants."""
    figures = []
    for i, made in enumerate(workloads):
        cluster = zoo.cluster("asc-uncapped")
        plan = planners.get("joint").plan(made, cluster)
        gap = plan.predicted.gap if plan.predicted else 0.0
        figures.append(
            Figure(
                table="beyond the paper",
                name=f"{made.name}: joint, gamma as published",
                ours=predicted_s(plan),
                reference=_JOINT_S[i],
                source="target",
                unit="s",
                tolerance=0.0,
                at_most=True,
                note=f"within {max(gap, 0.0):.2%} of the bound; beside it a hill "
                "climb's figure",
            )
        )
        figures.append(
            Figure(
                table="beyond the paper",
                name=f"{made.name}: fusion alone, one flow at a time",
                ours=_planned_s("fusion", made, "asc"),
                reference=_ASC_S[i],
                source="target",
                unit="s",
                tolerance=0.0,
                at_most=True,
                note="target: below the measured ASC-WFBP of Table IV, without "
                "simultaneous flows",
            )
        )
        figures.append(
            Figure(
                table="beyond the paper",
                name=f"{made.name}: joint, all flows within 9.43 Gb/s",
                ours=_planned_s("joint", made, "asc"),
                unit="s",
                note="the effect of simultaneous flows where the link limits them",
            )
        )
    return figures


def _planned_s(name: str, workload: Workload, cluster: str) -> float:
    return predicted_s(planners.get(name).plan(workload, zoo.cluster(cluster)))


def _wfbp_s(workload: Workload, startup_s: float) -> float:
    """Return the time of every tensor sent separately, in sequence, from a and b."""
    end_s = 0.0
    for tensor in workload.tensors:
        sending_s = startup_s + ASC_S_PER_BYTE * tensor.bytes
        end_s = max(end_s, tensor.ready_s) + sending_s
    return workload.forward_s + max(end_s, workload.backward_s)


def _corrections() -> tuple[Correction, ...]:
    return (
        _theorem(),
        _penalty(),
        _first_rule(),
        _capacity(),
        _table_and_figure(),
        _greedy(),
        Correction(
            where="Algorithm 1, line 4",
            defect="the loop stops at l = 2; tau_b[1] is never set but used",
            reading="run to 1",
        ),
        Correction(
            where="Algorithm 1, line 26",
            defect=(
                "a normal layer starts at its ready time regardless of what is being "
                "sent"
            ),
            reading="tau_c = max(ready, end of the previous group) (Definition 1)",
        ),
        Correction(
            where="Algorithm 1, lines 28-32",
            defect="iteration l-1 overwrites what merging wrote; m changes",
            reading="keep groups and work on a copy",
        ),
        Correction(
            where="Eq. 27, Q3",
            defect="tau_c + t_b + t_c + penalty",
            reading="tau_b + t_b + t_c + penalty (Eq. 17, 29)",
        ),
        Correction(
            where="Eq. 13, 17",
            defect="only the later flow is charged for sharing; three may be in flight",
            reading="fluid simulation with two flows at most",
        ),
        Correction(
            where="Eq. 19",
            defect="omits forward, and the case that another flow ends last",
            reading="t_f + the latest end of all groups, at least t_f + t_b",
        ),
    )


def _theorem() -> Correction:
    workload = instance((8.5, 6.0, 1.0), (0.0, 0.0, 10.0))
    cluster = unit_cluster()
    merged_s = drafted_s(Draft.in_turn((1, 3)), workload, cluster)

    def on_lanes(lanes: tuple[int, ...]) -> float:
        draft = Draft(ends=(1, 2, 3), slices=(1, 1, 1), bucket_lanes=lanes, lanes=2)
        return drafted_s(draft, workload, cluster)

    once_s, twice_s = on_lanes((0, 1, 0)), on_lanes((0, 1, 1))
    return Correction(
        where="Theorem 1",
        defect="the rules Q1 to Q4 are claimed to be optimal",
        reading="they are a heuristic; search over the types (planner joint)",
        shown=f"a = b = 1, gamma 1.5, sizes 8.5, 6, 1 ready at 0, 0, 10: "
        f"the rules merge -> {merged_s:.1f}; one simultaneous -> {once_s:.1f}; "
        f"two -> {twice_s:.1f}",
        holds=twice_s < once_s < merged_s,
    )


def _penalty() -> Correction:
    gamma_less_1 = 0.5
    printed_s = gamma_less_1 * ASC_S_PER_BYTE * 100e6
    true_s = gamma_less_1 * ASC_S_PER_BYTE * 1e3
    return Correction(
        where="Eq. 12, 13",
        defect="the bytes sent at the same time are not limited by the later message",
        reading="the smaller of the first's remainder and the second",
        shown=f"100 MB just begun, then 1 KB: printed {1e3 * printed_s:.0f} ms, "
        f"true {1e6 * true_s:.2g} us",
        holds=true_s < 1e-4 * printed_s,
    )


def _first_rule() -> Correction:
    ready, previous, own, end = 0, 3, 5, 7
    right, printed = end <= own + previous, end <= ready + previous
    return Correction(
        where="Algorithm 1, line 8 (Q1)",
        defect="compares with tau_b[l] + t_b[l-1]",
        reading="tau_b[l-1] + t_b[l-1] (Eq. 21)",
        shown="tau_b[l] = 0, t_b[l] = 5, t_b[l-1] = 3, l ends at 7: correct 7 <= 8 "
        f"{right}, printed 7 <= 3 {printed}",
        holds=right and not printed,
    )


def _capacity() -> Correction:
    try:
        check_capacity(zoo.cluster("asc"))
    except Infeasible as error:
        shown, holds = str(error).partition(". ")[0], True
    else:
        shown, holds = "two flows fit", False
    return Correction(
        where="gamma = 1.5 with b = 1.7 ns/B",
        defect="two flows would send more than 10GbE carries",
        reading="gamma is capped by the link: cluster asc; as printed: asc-uncapped",
        shown=shown,
        holds=holds,
    )


def _table_and_figure() -> Correction:
    cuts = []
    for i, name in enumerate(_MODELS):
        known = zoo.anchor(name, "2080ti")
        alone_s = known.forward_s + known.backward_s if known else 0.0
        cuts.append(1 - (_ASC_S[i] - alone_s) / (_MG_S[i] - alone_s))
    text = ", ".join(f"{100 * cut:.0f} %" for cut in cuts)
    return Correction(
        where="Fig. 6",
        defect="ASC-WFBP cuts MG-WFBP's communication by 22 to 74 %",
        reading="Table IV less the time on one device gives other figures",
        shown=text,
        holds=max(cuts) < 0.6,
    )


def _greedy() -> Correction:
    workload, cluster = instance((10, 0.1, 0.1), (0.0, 0.9, 1.8)), unit_cluster()
    greedy_s = planned_s("mg-wfbp", workload, cluster) or 0.0
    exact_s = planned_s("fusion", workload, cluster) or 0.0
    dense = zoo.workload("densenet201")
    worse = _planned_s("mg-wfbp", dense, "asc") / _planned_s("fusion", dense, "asc")
    return Correction(
        where="MG-WFBP, the baseline",
        defect="called optimal; it merges pair by pair, and waiting times add up",
        reading="the exact sequential fusion (planner fusion)",
        shown=f"a = b = 1, sizes 10, .1, .1 ready at 0, .9, 1.8: "
        f"greedy {greedy_s:.1f}, exact {exact_s:.1f}; "
        f"DenseNet-201 on this testbed: {worse - 1:+.1%}",
        holds=greedy_s > exact_s,
    )
