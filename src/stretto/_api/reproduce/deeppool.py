"""DeepPool: burst parallelism (MLSys 2022)."""

from __future__ import annotations

import math

from stretto import zoo
from stretto._api.reproduce.result import Correction, Figure, Left, Reproduction

_PARAMS_M = {"vgg16": 132, "wide-resnet101-2": 127, "inception-v3": 24}


def deeppool() -> Reproduction:
    """What of DeepPool follows from its model."""
    return Reproduction(
        paper="deeppool",
        title="DeepPool (MLSys 2022), 8 A100, NVSwitch",
        assumed=(
            "266 GB/s and 40 us a transfer, as the authors' planner counts",
            *(str(x) for x in zoo.cluster("deeppool").provenance["assumed"]),
        ),
        figures=(*_table_1(),),
        corrections=_corrections(),
        left=_left(),
    )


def _table_1() -> list[Figure]:
    notes = {"vgg16": "missed: 132.86 M is VGG-11; VGG-16 has 138.36 M"}
    return [
        Figure(
            table="Table 1",
            name=f"{name}: M parameters",
            ours=zoo.model(name).elements / 1e6,
            published=params_m,
            tolerance=0.01,
            note=notes.get(name, ""),
        )
        for name, params_m in _PARAMS_M.items()
    ]


def _left() -> tuple[Left, ...]:
    return (
        Left(item="Fig. 1-3", reason="needs the batch sizes at which models converge"),
        Left(
            item="Fig. 9, 10 with a second job beside (BP + Col), Fig. 11, 12",
            reason="collocation on the hardware",
        ),
        Left(item="1.2 to 2.3x cluster throughput", reason="collocation, as above"),
    )


def _corrections() -> tuple[Correction, ...]:
    params_m = zoo.model("vgg11").elements / 1e6
    return (
        _order_of_widths(),
        Correction(
            where="Algorithm 1, amplification of layer i - 1",
            defect="depends on which predecessor produced T[i-1][h]; only the "
            "fastest is kept, so the parts of an optimum need not be optimal",
            reading="a limit on each edge: (comm + comp + sync) g / comp(i, 1); then a "
            "shortest path is exact",
        ),
        Correction(
            where="Algorithm 1, last layer",
            defect="its amplification is never tested; T[0], Amp(0, h), comm(0, h) are "
            "undefined",
            reading="test when an edge is relaxed; the first layer is free",
        ),
        Correction(
            where="Algorithm 1, bestAmp = min(...)",
            defect="drifts away from the chosen predecessor's",
            reading="drop it",
        ),
        Correction(
            where="Table 1",
            defect="VGG-16 has 132 M parameters",
            reading="138.36 M",
            shown=f"VGG-11 has {params_m:.2f} M",
            holds=round(params_m) == 133,
        ),
        Correction(
            where="Fig. 1 (1 Tb/s), Fig. 2 (4.8 Tb/s), Table 2 (600 GB/s)",
            defect="three bandwidths for one machine",
            reading="the planner's own: 266 GB/s and 40 us, twice for both ways",
        ),
    )


def _order_of_widths() -> Correction:
    """The tier test of the printed algorithm on two widths."""
    limit, choices = 2.0, ((1, 5.0, 10.0), (2, 1.2, 12.0))
    best_amp, best_s, taken = math.inf, math.inf, 0
    for width, amplification, step_s in choices:
        if amplification <= max(best_amp, limit) and step_s < best_s:
            best_amp, best_s, taken = amplification, step_s, width
    feasible = [c for c in choices if c[1] <= limit]
    right = min(feasible, key=lambda c: c[2])[0]
    return Correction(
        where="Algorithm 1, Amp <= max(bestAmp, AmpLimit)",
        defect="bestAmp begins infinite: the first width is always accepted, then a "
        "feasible but slower one refused",
        reading="the fastest of the feasible; if none, the least amplification",
        shown=f"limit 2; h = 1: amp 5, 10 s; h = 2: amp 1.2, 12 s: printed takes "
        f"h = {taken}, right is h = {right}",
        holds=taken == 1 and right == 2,
    )
