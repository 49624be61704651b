"""Drawings as SVG text: step times, timelines, losses.

Colors are CSS variables (`LIGHT` and `DARK`), so that a page draws them equally for
light, dark and paper; `step_time_svg` can include them and be a separate file. The hues
are Okabe and Ito's, which color-blind readers can distinguish, darkened or lightened
for contrast.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from stretto.schema import Timeline
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.report.results import MethodResult, RunReport
    from stretto.schema import Span

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2330",
    "soft": "#5b6472",
    "rule": "#dde1e8",
    "bar": "#aab6c6",
    "best": "#0072b2",
    "mark": "#b84a00",
    "bound": "#007a5a",
    "forward": "#56a0d8",
    "backward": "#0072b2",
    "send": "#e69f00",
    "wait": "#b6bcc6",
    "peer": "#d55e00",
    "exposed": "#f0dcb0",
    "outside": "#d3d9e2",
    "other": "#99568c",
    "on-forward": "#06223a",
    "on-backward": "#ffffff",
    "on-send": "#2e2000",
    "on-wait": "#2a2f38",
    "on-peer": "#ffffff",
    "on-exposed": "#3d3000",
    "on-outside": "#2a2f38",
    "on-other": "#ffffff",
}
DARK = {
    "paper": "#151a21",
    "ink": "#e8ecf2",
    "soft": "#9aa5b4",
    "rule": "#2f3844",
    "bar": "#586579",
    "best": "#4aa8e8",
    "mark": "#ff9d5c",
    "bound": "#2fc79a",
    "forward": "#7cc0f0",
    "backward": "#2577b3",
    "send": "#e9ad2b",
    "wait": "#5f6876",
    "peer": "#ff7d33",
    "exposed": "#66562f",
    "outside": "#3b4552",
    "other": "#c98cbd",
    "on-forward": "#06223a",
    "on-backward": "#ffffff",
    "on-send": "#2e2000",
    "on-wait": "#f0f2f6",
    "on-peer": "#2b0f00",
    "on-exposed": "#fdf3dc",
    "on-outside": "#e8ecf2",
    "on-other": "#20101c",
}

SERIES = (
    ("#0072b2", "#4aa8e8", ""),
    ("#b84a00", "#ff9d5c", "7 3"),
    ("#007a5a", "#2fc79a", "2 3"),
    ("#a03e80", "#e08cc6", "9 3 2 3"),
    ("#8a6d00", "#e9c46a", "5 5"),
    ("#4d5666", "#aeb8c6", "1 4"),
)
"""Color on a light and a dark background, and dashes, of each curve of a chart."""

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"

KINDS = ("forward", "backward", "send", "wait", "peer", "exposed", "outside")
"""Kinds of spans with their own color."""

WIDTH = 880
"""Width of a drawing, in its own units."""

CHAR = 0.56
"""Mean width of a character over the font size, used to lay out labels."""


def css_variables(colors: dict[str, str]) -> str:
    """Return CSS declarations of the colors, one variable each."""
    return ";".join(f"--{name}:{value}" for name, value in colors.items())


def tag(name: str, body: str = "", **attributes: object) -> str:
    """Return an element; ``class_`` is the attribute ``class``, ``x_y`` is ``x-y``."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{text}>{body}</{name}>" if body else f"<{name}{text}/>"


def _attribute(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value))


def text_tag(x: float, y: float, body: str, **attributes: object) -> str:
    """Return a text with its baseline at a place."""
    return tag("text", escape(body), x=x, y=y, **attributes)


def ticks(end: float, limit: int = 8) -> list[float]:
    """Return round numbers from 0 to ``end``, about ``limit`` of them."""
    if end <= 0 or not math.isfinite(end):
        return [0.0]
    magnitude = 10.0 ** math.floor(math.log10(end / limit))
    step = next(
        k * magnitude for k in (1, 2, 2.5, 5, 10) if k * magnitude * limit >= end
    )
    return [i * step for i in range(int(end / step * (1 + 1e-9)) + 1)]


def tick_label(value_s: float, end_s: float) -> str:
    """Return a time as the label of an axis up to ``end_s``."""
    if end_s < 1e-3:
        return f"{value_s * 1e6:g} us"
    return f"{value_s * 1e3:g} ms" if end_s < 10 else f"{value_s:g} s"


def step_time_svg(report: RunReport, *, standalone: bool = False) -> str:
    """Draw each method's step time as a bar, with spread, prediction and lower bound.

    With ``standalone`` the drawing includes its colors and background and can be a
    separate file; otherwise the page around it defines them.
    """
    methods = [m for m in report.methods if m.step_s is not None]
    pad = 20 if standalone else 0
    names = [m.name for m in methods]
    left = pad + 26 + max((len(name) for name in names), default=4) * 15 * CHAR
    left = min(left, 260.0)
    right = WIDTH - _FIGURES - 22.0
    row, bar, top = 46, 22, 34 + pad
    height = top + row * len(methods) + 64 + pad
    reach_s = max((_reach_s(m) for m in methods), default=1.0)
    reach_s = max(reach_s, report.bound_s or 0.0) or 1.0

    def x(value_s: float) -> float:
        return left + (right - left) * value_s / reach_s

    out = [_axis(reach_s, x, top - 6, top + row * len(methods))]
    tops = [top + row * i + (row - bar) / 2 for i in range(len(methods))]
    out += [
        _bar(m, x, y, bar, left, best=m is report.fastest)
        for m, y in zip(methods, tops, strict=True)
    ]
    bottom = top + row * len(methods)
    if report.bound_s is not None:
        at = x(report.bound_s)
        out.append(tag("line", x1=at, x2=at, y1=top - 10, y2=bottom, class_="bound"))
        out.append(
            text_tag(
                at,
                top - 16,
                f"lower bound {format_s(report.bound_s)}",
                class_="bound-text",
                text_anchor=_anchor(at, left, WIDTH - pad),
            )
        )
    # Marks after the bound's line, so that it never hides one.
    out += [_marks(m, x, y + bar / 2) for m, y in zip(methods, tops, strict=True)]
    out.append(_step_legend(methods, left, bottom + 46))
    label = "Step time of each method"
    if not standalone:
        return svg_tag(out, height, label)
    style = (
        f"svg{{{css_variables(LIGHT)}}}"
        f"@media(prefers-color-scheme:dark){{svg{{{css_variables(DARK)}}}}}{SVG_STYLE}"
    )
    ground = tag("rect", width="100%", height="100%", rx=10, class_="ground")
    return svg_tag([tag("style", style), ground, *out], height, label)


def svg_tag(parts: Sequence[str], height: float, label: str) -> str:
    """Return a drawing of `WIDTH` with a label for screen readers."""
    return tag(
        "svg",
        "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        width=WIDTH,
        height=f"{height:.0f}",
        role="img",
        aria_label=label,
        class_="drawing",
    )


def _reach_s(method: MethodResult) -> float:
    return max(
        (method.measured_step_s or 0.0) + (method.spread_s or 0.0),
        method.predicted_step_s or 0.0,
    )


def _anchor(at: float, low: float, high: float) -> str:
    if at - low < 90:
        return "start"
    return "end" if high - at < 90 else "middle"


def _axis(
    reach_s: float, x: Callable[[float], float], top: float, bottom: float
) -> str:
    out = []
    for value_s in ticks(reach_s, 6):
        at = x(value_s)
        out.append(tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        label = tick_label(value_s, reach_s)
        out.append(
            text_tag(at, bottom + 17, label, class_="tick", text_anchor="middle")
        )
    return "".join(out)


def _bar(
    method: MethodResult,
    x: Callable[[float], float],
    y: float,
    height: float,
    left: float,
    *,
    best: bool,
) -> str:
    """Draw one method's name, bar and figures; hollow without a measurement."""
    name_class = "name best-text" if best else "name"
    middle = y + height / 2
    hollow = method.measured_step_s is None
    bar_class = "bar hollow" if hollow else "bar best" if best else "bar"
    width = x(method.step_s or 0.0) - left
    return tag(
        "g",
        tag("title", escape(_bar_title(method)))
        + text_tag(
            left - 12, middle + 5, method.name, class_=name_class, text_anchor="end"
        )
        + tag("rect", x=left, y=y, width=width, height=height, rx=2, class_=bar_class)
        + _figures(method, middle, best=best),
    )


def _marks(method: MethodResult, x: Callable[[float], float], middle: float) -> str:
    """Draw whiskers of the measured spread and a diamond at the prediction."""
    out = ""
    if method.measured_step_s is not None and method.spread_s:
        out += _whisker(x, method.measured_step_s, method.spread_s, middle)
    if method.predicted_step_s is not None:
        at, d = x(method.predicted_step_s), 6.5
        points = f"{at:.1f},{middle - d} {at + d:.1f},{middle} "
        points += f"{at:.1f},{middle + d} {at - d:.1f},{middle}"
        out += tag("polygon", points=points, class_="mark")
    return out


def _whisker(
    x: Callable[[float], float], middle_s: float, spread_s: float, y: float
) -> str:
    low, high = x(max(0.0, middle_s - spread_s)), x(middle_s + spread_s)
    path = f"M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 5}v10M{high:.1f} {y - 5}v10"
    return tag("path", d=path, class_="whisker-halo") + tag(
        "path", d=path, class_="whisker"
    )


def _figures(method: MethodResult, middle: float, *, best: bool) -> str:
    x = WIDTH - _FIGURES
    big = "figure best-text" if best else "figure"
    if method.measured_step_s is None:
        return text_tag(x, middle + 5, f"{format_s(method.step_s or 0.0)} predicted")
    out = text_tag(x, middle - 1, format_s(method.measured_step_s), class_=big)
    if method.speedup_over_ddp is not None:
        ratio = f"{method.speedup_over_ddp:.2f}× ddp"
        out += text_tag(WIDTH - 12, middle - 1, ratio, class_=big, text_anchor="end")
    if method.predicted_step_s is not None and method.error_ratio is not None:
        small = f"predicted {format_s(method.predicted_step_s)}"
        out += text_tag(x, middle + 14, small, class_="small")
        out += text_tag(
            WIDTH - 12,
            middle + 14,
            f"{method.error_ratio:+.1%}".replace("-", "−"),
            class_="small",
            text_anchor="end",
        )
    return out


def _bar_title(method: MethodResult) -> str:
    parts = [method.name]
    if method.measured_step_s is not None:
        spread = f" ± {format_s(method.spread_s)}" if method.spread_s else ""
        parts.append(f"measured {format_s(method.measured_step_s)}{spread}")
    if method.predicted_step_s is not None:
        parts.append(f"predicted {format_s(method.predicted_step_s)}")
    return ", ".join(parts)


def _step_legend(methods: Sequence[MethodResult], x: float, y: float) -> str:
    """Draw the legend in one line."""
    out = []
    if any(m.measured_step_s is not None for m in methods):
        out.append(tag("rect", x=x, y=y - 10, width=22, height=11, class_="bar"))
        out.append(text_tag(x + 29, y, "measured median", class_="small"))
        x += 150
    if any(m.spread_s for m in methods):
        path = f"M{x} {y - 4.5}h22M{x} {y - 9}v9M{x + 22} {y - 9}v9"
        out.append(tag("path", d=path, class_="whisker"))
        out.append(
            text_tag(x + 29, y, "spread (half the quartile range)", class_="small")
        )
        x += 236
    if any(m.predicted_step_s is not None for m in methods):
        points = (
            f"{x + 6},{y - 11} {x + 12.5},{y - 4.5} {x + 6},{y + 2} {x - 0.5},{y - 4.5}"
        )
        out.append(tag("polygon", points=points, class_="mark"))
        out.append(text_tag(x + 20, y, "predicted before the run", class_="small"))
    return "".join(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLine:
    """One timeline of a drawing, and the labels left of it."""

    name: str

    note: str

    line: Timeline

    marked: bool = False
    """Return whether name and note are set off."""


def timeline_svg(
    name: str,
    predicted: Timeline | None,
    measured: Timeline | None,
    *,
    shared_end_s: float,
) -> str:
    """Draw computation and lanes of one method's step, predicted above measured.

    All drawings with the same ``shared_end_s`` have the same scale. Positions are in
    percent of an inner drawing. A script may set its width to ``data-fit`` so that the
    step fills it; labels that are only legible then have the class ``fit-only``.
    """
    lines = [
        DrawnLine(name=label, note=format_s(line.end_s), line=line)
        for label, line in (("predicted", predicted), ("measured", measured))
        if line is not None
    ]
    return lines_svg(name, lines, shared_end_s=shared_end_s)


def lines_svg(name: str, lines: Sequence[DrawnLine], *, shared_end_s: float) -> str:
    """Draw several timelines above each other on one time axis, like `timeline_svg`."""
    own_end_s = max((drawn.line.end_s for drawn in lines), default=0.0)
    scale_s = 1.01 * max(shared_end_s, own_end_s) or 1.0
    zoom = scale_s / (1.01 * own_end_s) if own_end_s else 1.0
    left = 160
    inner = WIDTH - left - 8
    outside: list[str] = []
    ground: list[str] = []
    inside: list[str] = []
    y = 4.0
    for drawn in lines:
        set_off = " late-text" if drawn.marked else ""
        outside.append(text_tag(0, y + 13, drawn.name, class_="name" + set_off))
        outside.append(text_tag(0, y + 30, drawn.note, class_="small" + set_off))
        for track in drawn.line.tracks:
            outside.append(
                text_tag(left - 8, y + 13, track, class_="small", text_anchor="end")
            )
            ground.append(
                tag("rect", x=0, y=y, width="100%", height=_TRACK, class_="track")
            )
            inside += [
                _span(span, y, scale_s, inner, zoom)
                for span in sorted(drawn.line.spans, key=_waits_first)
                if span.track == track
            ]
            y += _TRACK + 3
        y += max(0.0, 2 - len(drawn.line.tracks)) * (_TRACK + 3) + 9
    height = y + 20
    grid = [
        *_time_axis(scale_s, scale_s, "shared-only" if zoom > 1.05 else "", y),
        *(_time_axis(own_end_s, scale_s, "fit-only", y) if zoom > 1.05 else ()),
    ]
    ends = [
        tag(
            "line",
            x1=_share(drawn.line.end_s, scale_s),
            x2=_share(drawn.line.end_s, scale_s),
            y1=0,
            y2=y,
            class_=f"end {drawn.name}",
        )
        for drawn in lines
        if drawn.name in ("predicted", "measured")
    ]
    plot = tag(
        "svg",
        "".join((*grid, *ground, *ends, *inside)),
        x=left,
        y=0,
        width=inner,
        height=height,
        class_="plot",
        data_shared=inner,
        data_fit=f"{inner * zoom:.1f}",
    )
    # The inner drawing grows beyond its frame when zoomed: a window clips it.
    window = tag("svg", plot, x=0, y=0, width=WIDTH, height=height)
    return svg_tag([*outside, window], height, f"Timeline of {name}")


def _share(value_s: float, of_s: float) -> str:
    return f"{100 * value_s / of_s:.4g}%"


def _waits_first(span: Span) -> bool:
    return span_kind(span) != "wait"


def _time_axis(end_s: float, scale_s: float, extra: str, y: float) -> list[str]:
    out = []
    values_s = ticks(end_s, 10)
    for i, value_s in enumerate(values_s):
        at = _share(value_s, scale_s)
        out.append(
            tag("line", x1=at, x2=at, y1=0, y2=y - 4, class_=f"grid {extra}".strip())
        )
        # The last label may not fit to its right.
        last = i == len(values_s) - 1 and value_s > 0.96 * end_s
        anchor = "start" if i == 0 else "end" if last else "middle"
        label = tick_label(value_s, end_s)
        out.append(
            _text_at(at, y + 11, label, class_=f"tick {extra}".strip(), anchor=anchor)
        )
    return out


def _text_at(x: str, y: float, body: str, *, class_: str, anchor: str) -> str:
    return tag("text", escape(body), x=x, y=y, class_=class_, text_anchor=anchor)


def span_kind(span: Span) -> str:
    """Return one of `KINDS`, or ``other``, which selects the color."""
    kind = span.args.get("kind")
    if kind in KINDS:
        return str(kind)
    if span.track.startswith("lane") and kind is None:
        return "send"
    return "other"


def _span(span: Span, y: float, scale_s: float, inner: float, zoom: float) -> str:
    kind = span_kind(span)
    width = span.duration_s / scale_s * inner
    title = (
        f"{span.name}\n{format_s(span.start_s)} to {format_s(span.end_s)}: "
        f"{format_s(span.duration_s)}"
    )
    for key, value in sorted(span.args.items()):
        title += f"\n{key}: {value}"
    waits = kind == "wait"
    rect = tag(
        "rect",
        tag("title", escape(title)),
        x=_share(span.start_s, scale_s),
        y=y + (_TRACK - 4 if waits else 0),
        width=f"{100 * max(width, 0.4) / inner:.4g}%",
        height=4 if waits else _TRACK - 5 if span.track != "compute" else _TRACK,
        class_=f"span {kind}" + (" thin" if width < 3 else ""),
    )
    if waits:
        return rect
    middle = _share((span.start_s + span.end_s) / 2, scale_s)
    baseline = y + (13 if span.track == "compute" else 10.5)
    for body in _span_labels(span):
        need = len(body) * 10 * CHAR + 4
        extra = "" if need <= width else "fit-only" if need <= width * zoom else None
        if extra is not None:
            return rect + _text_at(
                middle,
                baseline,
                body,
                class_=f"on {kind} {extra}".strip(),
                anchor="middle",
            )
    return rect


def _span_labels(span: Span) -> list[str]:
    """Return the possible labels of a span, longest first."""
    labels = [span.name]
    bucket = span.args.get("bucket")
    if isinstance(bucket, int):
        labels.append(str(bucket))
    return labels


def loss_svg(methods: Sequence[MethodResult]) -> str:
    """Draw each method's training loss; methods that agree share one curve."""
    groups = loss_groups(methods)
    if not groups:
        return ""
    left, right, top, bottom = 56.0, WIDTH - 190.0, 14.0, 250.0
    steps = max(len(losses) for _, losses in groups)
    values = [v for _, losses in groups for v in losses if math.isfinite(v)]
    low, high = min([0.0, *values]), max(values, default=1.0) or 1.0

    def x(step: float) -> float:
        return left + (right - left) * step / max(steps - 1, 1)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    out = []
    for value in ticks(high, 5):
        at = y(value)
        out.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        out.append(
            text_tag(left - 8, at + 4, f"{value:g}", class_="tick", text_anchor="end")
        )
    for step in ticks(steps - 1, 8):
        if step == int(step):
            at = x(step)
            out.append(
                text_tag(
                    at, bottom + 18, f"{step:g}", class_="tick", text_anchor="middle"
                )
            )
    out.append(text_tag((left + right) / 2, bottom + 38, "step", class_="small"))
    wanted: list[float] = []
    for i, (_, losses) in enumerate(groups):
        points = [
            (x(step), y(value))
            for step, value in enumerate(losses)
            if math.isfinite(value)
        ]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        out.append(tag("path", d=path, class_=f"curve c{i % len(SERIES)}"))
        wanted.append(points[-1][1] + 4)
    placed = spread_apart(wanted, 16.0)
    for i, ((names, losses), at) in enumerate(zip(groups, placed, strict=True)):
        label = names[0] if len(names) == 1 else f"all {len(names)} methods"
        if 1 < len(names) < len([m for m in methods if m.losses]):
            label = ", ".join(names)
        start = x(len(losses) - 1) + 10
        room = int((WIDTH - start) / (13 * CHAR))
        label = label if len(label) <= room else label[: room - 1] + "…"
        out.append(text_tag(start, at, label, class_=f"curve-name n{i % len(SERIES)}"))
    return svg_tag(out, bottom + 48, "Training loss of each method")


def loss_groups(
    methods: Sequence[MethodResult], tolerance: float = 1e-3
) -> list[tuple[list[str], tuple[float, ...]]]:
    """Return methods whose losses agree within ``tolerance``, with their losses.

    Methods with different numbers of steps agree if they do over their common steps;
    the longest losses represent all of them.
    """
    groups: list[tuple[list[str], tuple[float, ...]]] = []
    known = [m for m in methods if any(map(math.isfinite, m.losses))]
    for m in sorted(known, key=lambda m: -len(m.losses)):
        for names, losses in groups:
            if all(
                math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-9)
                for a, b in zip(losses, m.losses, strict=False)
            ):
                names.append(m.name)
                break
        else:
            groups.append(([m.name], m.losses))
    return groups


def spread_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Return positions near the wanted ones, in their order, at least ``gap`` apart."""
    placed = list(wanted)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for before, after in itertools.pairwise(order):
        placed[after] = max(placed[after], placed[before] + gap)
    overflow = max((placed[i] - wanted[i] for i in order), default=0.0) / 2
    return [at - overflow for at in placed]


_FIGURES = 178
"""Width of the column of figures right of the bars."""

_TRACK = 18
"""Height of one track in a timeline."""

SVG_STYLE = (
    f".drawing text{{font:13px {FONT};fill:var(--ink)}}"
    ".drawing .name{font-size:14px;font-weight:600}"
    ".drawing .figure{font-size:14px;font-weight:600;"
    "font-variant-numeric:tabular-nums}"
    ".drawing .best-text{fill:var(--best)}"
    ".drawing .small{font-size:12px;fill:var(--soft);"
    "font-variant-numeric:tabular-nums}"
    ".drawing .tick{font-size:11.5px;fill:var(--soft);"
    "font-variant-numeric:tabular-nums}"
    ".drawing .grid{stroke:var(--rule);stroke-width:1}"
    ".drawing .bar{fill:var(--bar)}.drawing .bar.best{fill:var(--best)}"
    ".drawing .bar.hollow{fill:none;stroke:var(--bar);stroke-width:1.5}"
    ".drawing .whisker{stroke:var(--ink);stroke-width:1.4;fill:none}"
    ".drawing .whisker-halo{stroke:var(--paper);stroke-width:3.6;fill:none;opacity:.7}"
    ".drawing .mark{fill:var(--mark);stroke:var(--paper);stroke-width:1.5}"
    ".drawing .bound{stroke:var(--bound);stroke-width:1.8;stroke-dasharray:5 3}"
    ".drawing .bound-text{font-size:12.5px;font-weight:600;fill:var(--bound)}"
    ".drawing .late-text{fill:var(--mark)}"
    ".drawing .ground{fill:var(--paper)}"
)
