"""Curves over numbers of ranks, or over rates, as SVG text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.report.svg import (
    CHAR,
    DARK,
    LIGHT,
    SERIES,
    SVG_STYLE,
    css_variables,
    svg_tag,
    tag,
    text_tag,
    ticks,
)

WIDTH = 880.0
_LEFT, _RIGHT = 64.0, WIDTH - 250.0
_HEIGHT = 250.0
"""Size of one chart's plotting area."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Several curves over one axis, of powers of two or linear from 0."""

    title: str

    axis: str

    unit: str

    x: Sequence[float]

    columns: Mapping[str, Sequence[float]]

    ends: Mapping[str, str] = field(default_factory=dict)
    """A label's text about the curve's last value, by the curve's name."""

    wide: bool = False
    """The axis of values is logarithmic if they span more than a factor of ten."""

    linear: bool = False
    """The other axis is linear from 0, not one of powers of two."""


def charts_svg(charts: Sequence[Chart], label: str, *, standalone: bool = True) -> str:
    """Draw the charts below each other.

    With ``standalone`` the drawing includes its colors, for light and dark, and can be
    a separate file; otherwise the page around it defines them.
    """
    pad = 24.0 if standalone else 0.0
    drawn: list[str] = []
    for i, chart in enumerate(charts):
        drawn += _chart(chart, pad + i * (_HEIGHT + 100.0))
    height = len(charts) * (_HEIGHT + 100.0) + pad - 14.0
    if not standalone:
        return svg_tag(drawn, height, label)
    style = (
        f"svg{{{css_variables(LIGHT)}}}{SVG_STYLE}"
        ".curve{fill:none;stroke-width:2}.drawing .curve-name{font-size:12.5px}"
        f"{_hues(dark=False)}"
        "@media(prefers-color-scheme:dark)"
        f"{{svg{{{css_variables(DARK)}}}{_hues(dark=True)}}}"
    )
    ground = tag("rect", width="100%", height="100%", rx=10, class_="ground")
    return svg_tag([tag("style", style), ground, *drawn], height, label)


def _hues(*, dark: bool) -> str:
    rules = []
    for i, (on_light, on_dark, dashes) in enumerate(SERIES):
        color = on_dark if dark else on_light
        line = f"stroke:{color};stroke-dasharray:{dashes or 'none'}"
        rules.append(f".c{i}{{{line}}}.drawing .n{i}{{fill:{color}}}")
    return "".join(rules)


def _chart(chart: Chart, top: float) -> list[str]:
    values = [v for row in chart.columns.values() for v in row if math.isfinite(v)]
    # From just below the lowest, because the differences between curves matter.
    high, low = max(values, default=1.0), 0.9 * min(values, default=0.0)
    room = 1.05 * (high - low) or 1.0
    logarithmic = chart.wide and 0 < 10 * low < high
    marks = _decade_ticks(low, high) if logarithmic else _ticks_between(low, high, room)
    x = _across(chart)
    begin, bottom = top + 26.0, top + 26.0 + _HEIGHT

    def y(value: float) -> float:
        share = (value - low) / room
        if logarithmic:
            share = math.log(value / low) / math.log(1.05 * high / low)
        return bottom - (bottom - begin) * share

    out = [text_tag(20.0, top + 12, chart.title, class_="name")]
    for value in marks:
        at = y(value)
        text = f"{value:g} {chart.unit}".strip()
        out.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=at, y2=at, class_="grid"))
        out.append(text_tag(_LEFT - 8, at + 4, text, class_="tick", text_anchor="end"))
    free = math.inf
    for value in ticks(chart.x[-1], 8)[::-1] if chart.linear else chart.x[::-1]:
        half = len(_number(value)) * 11.5 * CHAR / 2
        if x(value) + half + 6 > free:
            continue
        free = x(value) - half
        out.append(
            text_tag(
                x(value),
                bottom + 18,
                _number(value),
                class_="tick",
                text_anchor="middle",
            )
        )
    middle = (_LEFT + _RIGHT) / 2
    out.append(
        text_tag(middle, bottom + 38, chart.axis, class_="small", text_anchor="middle")
    )
    ends: list[float] = []
    for i, row in enumerate(chart.columns.values()):
        points = [
            (x(at), y(value))
            for at, value in zip(chart.x, row, strict=True)
            if math.isfinite(value)
        ]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        if points:
            out.append(tag("path", d=path, class_=f"curve c{i % len(SERIES)}"))
        out += [
            tag("circle", cx=px, cy=py, r=2.6, class_=f"n{i % len(SERIES)}")
            for px, py in points
        ]
        ends.append(points[-1][1] + 4 if points else bottom)
    placed = _placed(ends, 16.0, bottom + 4)
    for i, (name, at) in enumerate(zip(chart.columns, placed, strict=True)):
        style = f"curve-name n{i % len(SERIES)}"
        label = f"{name} {chart.ends[name]}" if name in chart.ends else name
        out.append(text_tag(_RIGHT + 10, at, label, class_=style))
    return out


def _number(value: float) -> str:
    return f"{value}" if isinstance(value, int) else f"{value:g}"


def _across(chart: Chart) -> Callable[[float], float]:
    """Return the position of values of the horizontal axis."""
    first, last = 0.0, float(chart.x[-1])
    if not chart.linear:
        first, last = math.log2(chart.x[0]), math.log2(chart.x[-1])

    def position(value: float) -> float:
        at = value if chart.linear else math.log2(value)
        return _LEFT + (_RIGHT - _LEFT) * (at - first) / ((last - first) or 1.0)

    return position


def _ticks_between(low: float, high: float, room: float) -> list[float]:
    step = ticks(room, 6)[1]
    return [i * step for i in range(math.ceil(low / step), int(high / step) + 1)]


def _decade_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten; over many powers, the powers alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    values = [k * 10.0**power for power in range(first, last + 1) for k in factors]
    return [value for value in values if low <= value <= high]


def _placed(wanted: Sequence[float], gap: float, lowest: float) -> list[float]:
    """Return positions at the wanted ones, or near them if crowded.

    They keep their order and are ``gap`` apart. None is below ``lowest`` (down is up in
    numbers); a position that is not crowded does not move.
    """
    placed = list(wanted)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for before, after in itertools.pairwise(order):
        placed[after] = max(placed[after], placed[before] + gap)
    for i in reversed(order):
        placed[i] = min(placed[i], lowest)
        lowest = placed[i] - gap
    return placed
