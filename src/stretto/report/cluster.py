"""A page about one trace under several policies, side by side."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from stretto.report.html import framed, section, table
from stretto.report.svg import svg_tag, tag, text_tag, ticks
from stretto.report.tables import plain_table
from stretto.schema import codec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LEFT, _RIGHT, _ROW, _BAR = 150.0, 700.0, 34.0, 18.0
_HEADS = [
    "policy",
    "mean",
    "median",
    "95 %",
    "wait",
    "ended",
    "background",
    "ended",
    "preempted",
]
_USES = ("foreground", "background_alone")


def policies_table(found: Mapping[str, Any]) -> str:
    """Return the policies as a table for a terminal."""
    return plain_table(_HEADS, [_cells(row) for row in found["policies"]])


def save_policies(path: str | Path, found: Mapping[str, Any]) -> None:
    """Write the page of `cluster.replay.replay`'s result atomically.

    Raises:
        SpecError: the file cannot be written.
    """
    rows = found["policies"]
    title = (
        f"{found['jobs']} jobs of a {found['trace']} trace on {found['gpus']} GPUs, "
        f"{len(rows)} policies"
    )
    means = [(row["policy"], _mean_hours(row)) for row in rows]
    gpus = [(row["policy"], row["background"]["gpus"]) for row in rows]
    fastest = min((hours for _, hours in means if hours), default=0.0)
    cells = [(_cells(row), "", _mean_hours(row) == fastest) for row in rows]
    hours = [
        [row["policy"], *(f"{row['gpu_hours'][use]:,.0f}" for use in _ALL_USES)]
        for row in rows
    ]
    notes = "".join(f"<li>{escape(text)}</li>" for text in found["assumed"])
    body = (
        f"<h1>{escape(title)}</h1>"
        + section(
            "Foreground completion",
            "Mean hours from submission to end.",
            bars_svg(means, "h"),
        )
        + section(
            "Background throughput",
            "GPUs' worth of background work, on average until the last job ended.",
            bars_svg(gpus, "GPUs"),
        )
        + section(
            "Figures",
            "Foregrounds: time from submission to end, wait, and number that ended. "
            "Backgrounds: mean GPUs' worth of work, and number that ended. Preempted: "
            "attempts that were stopped for others.",
            _scroll(table(_HEADS, cells)),
        )
        + section(
            "GPU-hours by use",
            "Blue: foreground; gray: background alone; the rest is unused. Beside: "
            "background work on foregrounds' devices.",
            uses_svg(rows)
            + _scroll(
                table(["policy", *_USE_NAMES], [(row, "", False) for row in hours])
            ),
        )
        + section("Assumed", "", f"<ul>{notes}</ul>")
    )
    codec.write_atomically(path, framed(title, body).encode())


_ALL_USES = ("foreground", "background_alone", "beside", "unused", "all")
_USE_NAMES = ("foreground", "background alone", "beside", "unused", "all")


def _scroll(text: str) -> str:
    return f'<div class="scroll">{text}</div>'


def bars_svg(rows: Sequence[tuple[str, float]], unit: str) -> str:
    """Draw one bar per policy."""
    reach = max((value for _, value in rows), default=0.0) or 1.0
    parts, bottom = _frame(reach, len(rows))
    for i, (name, value) in enumerate(rows):
        y = 4 + _ROW * i + (_ROW - _BAR) / 2
        width = (_RIGHT - _LEFT) * value / reach
        parts.append(text_tag(_LEFT - 10, y + 14, name, text_anchor="end"))
        parts.append(tag("rect", x=_LEFT, y=y, width=width, height=_BAR, class_="bar"))
        label = f"{value:.3g} {unit}"
        parts.append(text_tag(_LEFT + width + 8, y + 14, label, class_="figure"))
    return svg_tag(parts, bottom + 26, f"One bar per policy, in {unit}")


def uses_svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw the parts of the cluster's time, one bar per policy."""
    parts, bottom = _frame(100.0, len(rows))
    for i, row in enumerate(rows):
        y = 4 + _ROW * i + (_ROW - _BAR) / 2
        parts.append(text_tag(_LEFT - 10, y + 14, row["policy"], text_anchor="end"))
        begin, hours = _LEFT, row["gpu_hours"]
        for use, style in zip(_USES, ("bar best", "bar"), strict=True):
            share = hours[use] / hours["all"] if hours["all"] else 0.0
            width = (_RIGHT - _LEFT) * max(0.0, share)
            parts.append(
                tag("rect", x=begin, y=y, width=width, height=_BAR, class_=style)
            )
            begin += width
        used = 1 - hours["unused"] / hours["all"] if hours["all"] else 0.0
        parts.append(
            text_tag(_RIGHT + 8, y + 14, f"{used:.0%} in use", class_="figure")
        )
    return svg_tag(parts, bottom + 26, "Share of the cluster's time in percent")


def _frame(reach: float, rows: int) -> tuple[list[str], float]:
    bottom = 4 + _ROW * rows
    parts = []
    for value in ticks(reach, 5):
        at = _LEFT + (_RIGHT - _LEFT) * value / reach
        parts.append(tag("line", x1=at, x2=at, y1=0.0, y2=bottom, class_="grid"))
        parts.append(
            text_tag(at, bottom + 17, f"{value:g}", class_="tick", text_anchor="middle")
        )
    return parts, bottom


def _mean_hours(row: Mapping[str, Any]) -> float:
    known = row["foreground"]["completion_s"]
    return 0.0 if known is None else float(known["mean"]) / 3600


def _cells(row: Mapping[str, Any]) -> list[str]:
    fore, back = row["foreground"], row["background"]
    times, waits = fore["completion_s"], fore["wait_s"]
    return [
        row["policy"],
        *(_hours(None if times is None else times[k]) for k in _QUANTITIES),
        _hours(None if waits is None else waits["mean"]),
        f"{fore['ended']}/{fore['jobs']}",
        f"{back['gpus']:.1f} GPUs",
        f"{back['ended']}/{back['jobs']}",
        str(row["preemptions"]),
    ]


_QUANTITIES = ("mean", "median", "p95")


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 3600:.2f} h"
