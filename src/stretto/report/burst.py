"""A page that compares four ways to use more GPUs."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from stretto.report.curves import Chart, charts_svg
from stretto.report.page import _section, _table, framed
from stretto.schema import codec
from stretto.units import format_s

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

    ``rows`` have ``gpus`` and ``ways``: for each way's name ``None`` or a mapping with
    ``batch``, ``iteration_s`` and ``speedup``.

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
    body += _section(
        "Scaling",
        "Weak: the batch grows with the GPUs. Strong: the batch stays the same. "
        "Batch-optimal: the batch that reaches the target soonest. Burst: "
        "batch-optimal, with each layer on as many GPUs as shorten the step.",
        drawing,
    )
    body += _section(
        "Figures",
        "Speed-up, batch, time per step.",
        _table(["GPUs", *names], cells),
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
    ways = [row["ways"][name] for row in rows]
    return [math.nan if way is None else float(way[key]) for way in ways]


def _end(values: Sequence[float], unit: str) -> str:
    return f"{values[-1]:.1f}{unit}" if math.isfinite(values[-1]) else ""


def _cell(way: Mapping[str, Any] | None) -> str:
    if way is None:
        return "–"
    step = format_s(way["iteration_s"])
    return f"{way['speedup']:.2f}x, {way['batch']}, {step}"
