"""Bars as SVG text: gaps to the bound, and what each dimension contributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.report.svg import CHAR, WIDTH, svg_tag, tag, text_tag, tick_label, ticks
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROW, _BAR = 32.0, 18.0

_FULL_RATIO = 0.5
"""If the shortest step is below this share of the longest, the axis begins at 0."""


def gaps_svg(gaps: Mapping[str, float]) -> str:
    """Draw how far each method is above the lower bound, as bars; mark the smallest."""
    left = _left(gaps)
    right = WIDTH - 90.0
    reach = max(gaps.values(), default=0.0) * 100 or 1.0
    bottom = 4 + _ROW * len(gaps)

    def x(percent: float) -> float:
        return left + (right - left) * percent / reach

    out = []
    for value in ticks(reach, 6):
        at = x(value)
        out.append(tag("line", x1=at, x2=at, y1=0, y2=bottom, class_="grid"))
        label = f"{value:g} %"
        out.append(
            text_tag(at, bottom + 17, label, class_="tick", text_anchor="middle")
        )
    smallest = min(gaps.values(), default=0.0)
    for i, (name, gap) in enumerate(gaps.items()):
        y = 4 + _ROW * i + (_ROW - _BAR) / 2
        best = " best" if gap <= smallest else ""
        style = "best-text" if best else ""
        # Rounding of the bound may leave a perfect plan just below it.
        width = max(x(max(gap, 0.0) * 100) - left, 1.5)
        out.append(_row_name(name, left, y, style))
        out.append(
            tag(
                "rect", x=left, y=y, width=width, height=_BAR, rx=2, class_=f"bar{best}"
            )
        )
        style = f"figure {style}".strip()
        out.append(text_tag(left + width + 8, y + 14, _percent(gap), class_=style))
    return svg_tag(out, bottom + 26, "Gap of each method to the lower bound")


def contributions_svg(rows: Sequence[tuple[str, float]]) -> str:
    """Draw the step as one dimension after another is opened: a descending staircase.

    The first bar is the step with the first dimension alone, the last the step with all
    dimensions. Each bar between them spans what its dimension saves.
    """
    names = [name if i == 0 else f"+ {name}" for i, (name, _) in enumerate(rows)]
    left = _left([*names, "all"])
    right = WIDTH - 170.0
    high_s = max((step_s for _, step_s in rows), default=0.0) or 1.0
    low_s = min((step_s for _, step_s in rows), default=0.0)
    begin_s = axis_begin_s(rows)
    bottom = 4 + _ROW * (len(rows) + 1)

    def x(value_s: float) -> float:
        return left + (right - left) * (value_s - begin_s) / ((high_s - begin_s) or 1.0)

    out = []
    for value_s in ticks(high_s - begin_s, 6):
        at = x(begin_s + value_s)
        out.append(tag("line", x1=at, x2=at, y1=0, y2=bottom, class_="grid"))
        label = tick_label(round(begin_s + value_s, 12), high_s)
        out.append(
            text_tag(at, bottom + 17, label, class_="tick", text_anchor="middle")
        )
    before_s = rows[0][1] if rows else 0.0
    for i, (name, step_s) in enumerate([*rows, ("all", low_s)]):
        y = 4 + _ROW * i + (_ROW - _BAR) / 2
        whole = i in (0, len(rows))
        start = left if whole else x(step_s)
        width = max((x(step_s) if whole else x(before_s)) - start, 1.5)
        style = "bar best" if i == len(rows) else "bar" if whole else "bar saved"
        words = "best-text" if i == len(rows) else ""
        shown = names[i] if i < len(rows) else name
        out.append(_row_name(shown, left, y, words))
        out.append(
            tag("rect", x=start, y=y, width=width, height=_BAR, rx=2, class_=style)
        )
        if i < len(rows):
            # Down to the next bar, from the end of this one.
            at, end = x(step_s), y + _ROW
            out.append(tag("line", x1=at, x2=at, y1=y, y2=end, class_="step"))
        figure = f"figure {words}".strip()
        out.append(text_tag(right + 14, y + 14, format_s(step_s), class_=figure))
        if not whole:
            saved = 1 - step_s / before_s if before_s else 0.0
            text = f"−{saved:.1%}" if saved >= 5e-4 else "nothing"
            out.append(
                text_tag(WIDTH - 8, y + 14, text, class_="small", text_anchor="end")
            )
        before_s = step_s
    return svg_tag(out, bottom + 26, "What each dimension of a plan contributes")


def axis_begin_s(rows: Sequence[tuple[str, float]]) -> float:
    """Return where `contributions_svg`'s axis begins: 0, or a round number."""
    low_s = min((step_s for _, step_s in rows), default=0.0)
    high_s = max((step_s for _, step_s in rows), default=0.0)
    if low_s <= _FULL_RATIO * high_s:
        return 0.0
    step_s = ticks(max(high_s - low_s, 0.05 * high_s), 4)[1]
    return max(0.0, (low_s // step_s - 1) * step_s)


def _row_name(name: str, left: float, y: float, style: str) -> str:
    return text_tag(
        left - 12, y + 14, name, class_=f"name {style}".strip(), text_anchor="end"
    )


def _left(names: Sequence[str] | Mapping[str, float]) -> float:
    longest = max((len(name) for name in names), default=4)
    return min(26 + longest * 15 * CHAR, 260.0)


def _percent(ratio: float) -> str:
    return f"{max(ratio, 0.0):.1%}"
