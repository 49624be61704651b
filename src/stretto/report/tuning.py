"""How a run's tuning went: its trials over steps, and every decision."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from stretto.report.svg import SERIES, _svg, _tag, _text, _tick_label, ticks
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema.tuning import Tuning, TuningEvent

_WIDTH = 880.0
_LEFT, _RIGHT = 70.0, _WIDTH - 170.0
_TOP, _HEIGHT = 22.0, 260.0


def trials_svg(tuning: Tuning) -> str:
    """Each trial's step time where it ended, the best so far, and the lower bound.

    Empty where nothing was tried.
    """
    trials = [
        event
        for event in tuning.events
        if event.what == "tried" and event.values.get("step_s") is not None
    ]
    if not trials:
        return ""
    bounds = [e.values["bound_s"] for e in tuning.events if e.values.get("bound_s")]
    bound_s = bounds[-1] if bounds else None
    times_s = [float(event.values["step_s"]) for event in trials]
    high_s = max(*times_s, bound_s or 0.0)
    last = max(event.step for event in trials) or 1

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * step / last

    def y(step_s: float) -> float:
        return _TOP + _HEIGHT * (1 - step_s / (1.08 * high_s))

    out = []
    for value_s in ticks(1.08 * high_s, 5):
        at = y(value_s)
        label = _tick_label(value_s, high_s)
        out += [
            _tag("line", x1=_LEFT, x2=_RIGHT, y1=at, y2=at, class_="grid"),
            _text(_LEFT - 8, at + 4, label, class_="tick", text_anchor="end"),
        ]
    names = sorted({str(event.values["technique"]) for event in trials})
    if bound_s is not None:
        at = y(bound_s)
        out += [
            _tag("line", x1=_LEFT, x2=_RIGHT, y1=at, y2=at, class_="bound"),
            _text(
                _RIGHT + 8, at + 4, f"bound {format_s(bound_s)}", class_="bound-text"
            ),
        ]
    out.append(_best_line(trials, x, y))
    for event in trials:
        style = f"n{names.index(str(event.values['technique'])) % len(SERIES)}"
        won = bool(event.values.get("won"))
        out.append(
            _tag(
                "circle",
                f"<title>{escape(event.why)}</title>",
                cx=x(event.step),
                cy=y(float(event.values["step_s"])),
                r=6.0 if won else 4.0,
                class_=style,
            )
        )
    for i, name in enumerate(names):
        at = _TOP + _HEIGHT + 46 + 18 * (i // 4)
        left = _LEFT + 190 * (i % 4)
        out += [
            _tag("circle", cx=left, cy=at - 4, r=4.0, class_=f"n{i % len(SERIES)}"),
            _text(left + 10, at, name, class_="tick"),
        ]
    out.append(
        _text(
            _RIGHT,
            _TOP + _HEIGHT + 22,
            f"step {last}",
            text_anchor="end",
            class_="tick",
        )
    )
    out.append(_text(_LEFT, _TOP + _HEIGHT + 22, "step 0", class_="tick"))
    height = _TOP + _HEIGHT + 60 + 18 * ((len(names) - 1) // 4)
    return _svg(out, height, f"Trials of {tuning.name}")


def _best_line(trials: Sequence[TuningEvent], x: Any, y: Any) -> str:
    path, before = "", math.nan
    for event in trials:
        best_s = event.values.get("incumbent_s")
        if best_s is None:
            continue
        at = f"{x(event.step):.1f}"
        level = f"{y(float(best_s)):.1f}"
        if not path:
            path = f"M{at} {level}"
        else:
            path += f"H{at}" + (f"V{level}" if best_s != before else "")
        before = best_s
    return _tag("path", d=path, class_="whisker")


def decisions(tuning: Tuning) -> list[tuple[str, str, str, str]]:
    """Step, what happened, why, and figures, one row for each decision."""
    return [
        (str(event.step), event.what, event.why, _figures(event))
        for event in tuning.events
    ]


def _figures(event: TuningEvent) -> str:
    parts = []
    for key, value in event.values.items():
        name = key.removesuffix("_s").replace("_", " ")
        if isinstance(value, bool) or value is None or key == "plan":
            continue
        if isinstance(value, dict):
            inner = ", ".join(f"{k} {v:.2f}" for k, v in value.items())
            if inner:
                parts.append(f"{name}: {inner}")
        elif key.endswith("bytes_per_s"):
            parts.append(f"{key.removesuffix('_bytes_per_s')} {value / 1e6:.1f} MB/s")
        elif key.endswith("_s"):
            parts.append(f"{name} {format_s(value)}")
        elif isinstance(value, float):
            parts.append(f"{name} {value:.3g}")
        else:
            parts.append(f"{name} {value}")
    return "; ".join(parts)
