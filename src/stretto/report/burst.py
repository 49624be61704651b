"""Pages about burst plans: four methods of scaling, and plans beside backgrounds."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from stretto.report.curves import Chart, charts_svg
from stretto.report.html import framed, section, table
from stretto.schema import codec
from stretto.units import counted, format_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stretto.schema.burst import LayerProfile
    from stretto.schema.efficiency import SampleEfficiency


def save_scaling(
    path: str | Path,
    *,
    profile: LayerProfile,
    curve: SampleEfficiency,
    rows: Sequence[Mapping[str, Any]],
    network: str,
) -> None:
    """Write the page atomically.

    ``rows`` have ``gpus`` and ``ways``: for each method's name ``None`` or a mapping
    with ``batch``, ``iteration_s`` and ``speedup``.

    Raises:
        SpecError: the file cannot be written.
    """
    codec.write_atomically(path, render_scaling(profile, curve, rows, network).encode())


def render_scaling(
    profile: LayerProfile,
    curve: SampleEfficiency,
    rows: Sequence[Mapping[str, Any]],
    network: str,
) -> str:
    """Return the page as HTML text."""
    title = f"{profile.name} on more GPUs"
    names = list(rows[0]["ways"])
    drawing = charts_svg(_charts(rows, names), title, standalone=False)
    cells = [
        (
            [str(row["gpus"]), *(_cell(row["ways"][name]) for name in names)],
            "",
            False,
        )
        for row in rows
    ]
    body = (
        f'<h1>{escape(title)}</h1><p class="why">Speed-up of the time until the target '
        "is reached, relative to one GPU and the first batch. Times are the model's, "
        f"from the profile on {escape(profile.device)}; network: {escape(network)}; "
        f"samples to the target: {escape(curve.name)}.</p>"
    )
    body += section(
        "Scaling",
        "Weak: the batch grows with the GPUs. Strong: the batch stays the same. "
        "Batch-optimal: the batch that reaches the target soonest. Burst: "
        "batch-optimal, with each layer on as many GPUs as shorten the step.",
        drawing,
    )
    body += section(
        "Figures",
        "Speed-up, batch, time per step.",
        table(["GPUs", *names], cells),
    )
    return framed(title, body)


def _charts(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Chart]:
    gpus = [row["gpus"] for row in rows]
    speedups = {name: _column(rows, name, "speedup") for name in names}
    ends = {name: _end(values, "x") for name, values in speedups.items()}
    each = {
        name: [
            value / count
            for value, count in zip(_column(rows, name, "batch"), gpus, strict=True)
        ]
        for name in names
    }
    return [
        Chart(
            title="Speed-up",
            axis="GPUs",
            unit="x",
            x=gpus,
            columns=speedups,
            ends=ends,
            wide=True,
        ),
        Chart(
            title="Samples per step for each number of GPUs",
            axis="GPUs",
            unit="",
            x=gpus,
            columns=each,
            wide=True,
        ),
    ]


def _column(rows: Sequence[Mapping[str, Any]], name: str, key: str) -> list[float]:
    points = [row["ways"][name] for row in rows]
    return [math.nan if point is None else float(point[key]) for point in points]


def _end(values: Sequence[float], unit: str) -> str:
    return f"{values[-1]:.1f}{unit}" if math.isfinite(values[-1]) else ""


def _cell(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "–"
    step = format_s(point["iteration_s"])
    return f"{point['speedup']:.2f}x, {point['batch']}, {step}"


def save_collocation(
    path: str | Path, *, found: Mapping[str, Any], network: str
) -> None:
    """Write the page about a front of plans with background jobs atomically.

    ``found`` has ``profile``, ``gpus``, ``batch``, ``alone_s``, ``pairs`` (each with
    ``background``, ``measured`` and the rows of its ``front``) and the rows of
    ``partitions``.

    Raises:
        SpecError: the file cannot be written.
    """
    codec.write_atomically(path, render_collocation(found, network).encode())


def render_collocation(found: Mapping[str, Any], network: str) -> str:
    """Return the page as HTML text."""
    title = f"{found['profile']} with background jobs"
    names = _curve_names([pair["measured"] for pair in found["pairs"]])
    fronts = {
        name: pair["front"] for name, pair in zip(names, found["pairs"], strict=True)
    }
    drawing = charts_svg(
        [_front_chart({**fronts, "static partition": found["partitions"]})],
        title,
        standalone=False,
    )
    body = (
        f'<h1>{escape(title)}</h1><p class="why">Predicted steps of {found["batch"]} '
        f"samples on {counted(found['gpus'], 'GPU')}; network: {escape(network)}. "
        "Rates are over those of each job alone; the foreground's step alone is "
        f"{format_s(found['alone_s'])}.</p>"
    )
    body += section(
        "Foreground and background",
        "Each point is a burst plan: a lower amplification limit makes the foreground "
        "slower and leaves more idle time. In a static partition the foreground is "
        "data parallel on some GPUs and each other GPU runs a background alone.",
        drawing,
    )
    for pair in found["pairs"]:
        heads, cells = front_cells(pair["front"])
        body += section(
            escape(pair["background"]),
            escape(measured_text(pair["measured"])),
            table(heads, [(row, "", False) for row in cells]),
        )
    heads, cells = front_cells(found["partitions"])
    body += section(
        "Static partition", "", table(heads, [(row, "", False) for row in cells])
    )
    return framed(title, body)


def front_cells(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of a table of a front's plans, or of partitions."""
    heads = ["step", "foreground", "background", "total"]
    cells = [
        [
            format_s(row["iteration_s"]),
            *(f"{row[f'{job}_rate']:.2f}" for job in ("foreground", "background")),
            f"{row['total']:.2f}",
        ]
        for row in rows
    ]
    if "gpus" in rows[0]:
        names = [counted(row["gpus"], "GPU") for row in rows]
        return (
            ["foreground on", *heads],
            [[name, *row] for name, row in zip(names, cells, strict=True)],
        )
    limits = [_limit(row["amplification_limit"]) for row in rows]
    alone = [format_s(row["alone_s"]) for row in rows]
    return (
        ["limit", "alone", *heads],
        [
            list(row)
            for row in zip(limits, alone, *zip(*cells, strict=True), strict=True)
        ],
    )


def _limit(limit: float | None) -> str:
    return "none" if limit is None else f"{limit:g}"


def measured_text(pair: Mapping[str, Any]) -> str:
    """Return what was measured of a pair, a row of a collocation file, in a line."""
    compared = counted(pair["pairs"], "pair")
    return (
        f"measured in {compared} of blocks: loss {pair['loss_ratio']:.1%} (quartiles "
        f"{100 * pair['loss_spread_ratio']:.1f} points apart), share "
        f"{pair['share_ratio']:.2f} (quartiles {pair['share_spread_ratio']:.2f} apart) "
        f"where {pair['usable_ratio']:.2f} of the step was usable; tasks of "
        f"{format_s(pair['task_s'])}, policy {pair['policy']}, depth {pair['depth']}"
    )


def _curve_names(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return short names: the background's, and in what else the pairs differ."""
    parts = [
        (
            pair["background"],
            f"beside {pair['foreground']}",
            f"on {pair['device']}",
            pair["policy"],
            f"depth {pair['depth']}",
        )
        for pair in pairs
    ]
    differing = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    return [
        ", ".join(
            part
            for i, (part, differs) in enumerate(zip(row, differing, strict=True))
            if differs or i == 0
        )
        for row in parts
    ]


def _front_chart(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Chart:
    rates = sorted({row["background_rate"] for rows in curves.values() for row in rows})
    columns = {}
    for name, rows in curves.items():
        steps = {row["background_rate"]: 1e3 * row["iteration_s"] for row in rows}
        columns[name] = [steps.get(rate, math.nan) for rate in rates]
    return Chart(
        title="Foreground's step",
        axis="background's rate over its rate alone",
        unit="ms",
        x=rates,
        columns=columns,
        wide=True,
        linear=True,
    )
