"""A page about a foreground and background jobs on the same hosts."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from stretto.report.html import framed, section, table
from stretto.report.svg import svg_tag, tag, text_tag, ticks
from stretto.report.tables import plain_table
from stretto.schema import codec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LEFT, _RIGHT, _ROW, _BAR = 170.0, 700.0, 36.0, 20.0
_HEADS = ["arrangement", "foreground", "its loss", "background", "total", "range"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One way to place both jobs: rates over those of each job alone."""

    name: str
    description: str
    foreground: float
    background: float | None
    """``None`` if the background's rate alone is unknown, as in the totals."""

    total: float | None
    """The sum of both."""

    min_total: float | None
    max_total: float | None


def arrangements_table(rows: Sequence[Arrangement]) -> str:
    """Return the arrangements as a table for a terminal."""
    return plain_table(_HEADS, [[row.name, *_figures(row)] for row in rows])


def save_background(
    path: str | Path,
    *,
    title: str,
    rows: Sequence[Arrangement],
    notes: Sequence[str],
) -> None:
    """Write the page atomically.

    Raises:
        SpecError: the file cannot be written.
    """
    known = [row.total for row in rows if row.total is not None]
    best = max(known, default=None)
    cells = [
        (
            [row.name, *_figures(row)],
            row.description,
            best is not None and row.total == best,
        )
        for row in rows
    ]
    body = (
        f"<h1>{escape(title)}</h1>"
        + section(
            "Throughput of both jobs",
            "The foreground's rate over its rate alone, and after it the background's.",
            totals_svg(rows),
        )
        + section("Figures", "", table(_HEADS, cells))
        + "".join(f"<p>{escape(note)}</p>" for note in notes)
    )
    codec.write_atomically(path, framed(title, body).encode())


def totals_svg(rows: Sequence[Arrangement]) -> str:
    """Draw both jobs' rates as one bar per arrangement."""
    reach = max(*(row.foreground + (row.background or 0.0) for row in rows), 1.0)
    scale = (_RIGHT - _LEFT) / reach
    bottom = 4 + _ROW * len(rows)
    parts = []
    for value in ticks(reach, 5):
        at = _LEFT + scale * value
        parts.append(tag("line", x1=at, x2=at, y1=0.0, y2=bottom, class_="grid"))
        parts.append(
            text_tag(at, bottom + 17, f"{value:g}", class_="tick", text_anchor="middle")
        )
    for i, row in enumerate(rows):
        y = 4 + _ROW * i + (_ROW - _BAR) / 2
        parts.append(text_tag(_LEFT - 10, y + 15, row.name, text_anchor="end"))
        begin = _LEFT
        for kind, rate in (("best", row.foreground), ("", row.background)):
            if rate:
                parts.append(
                    tag(
                        "rect",
                        x=begin,
                        y=y,
                        width=scale * rate,
                        height=_BAR,
                        class_=f"bar {kind}".strip(),
                    )
                )
                begin += scale * rate
        parts.append(text_tag(begin + 8, y + 15, _number(row.total), class_="figure"))
    return svg_tag(parts, bottom + 26, "Throughput of both jobs by arrangement")


def _figures(row: Arrangement) -> list[str]:
    loss = f"{1.0 - row.foreground:.1%}" if row.foreground else "-"
    reach = f"{_number(row.min_total)} to {_number(row.max_total)}"
    return [
        f"{row.foreground:.2f}",
        loss,
        _number(row.background),
        _number(row.total),
        "-" if row.total is None else reach,
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
