"""Show how a run's tuning went: its trials over steps, and every decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, final

from stretto.report.svg import (
    SERIES,
    spread_apart,
    svg_tag,
    tag,
    text_tag,
    tick_label,
    ticks,
)
from stretto.schema.tuning import TuningEvent
from stretto.units import format_rate, format_s

if TYPE_CHECKING:
    from stretto.schema.tuning import Tuning

WIDTH = 880.0
_LEFT, _RIGHT = 70.0, WIDTH - 170.0
_TOP, _HEIGHT = 22.0, 260.0
_CREDIT_GAP, _CREDIT_HEIGHT = 74.0, 110.0
"""Gap between the areas of trials and of credits, and the height of the latter."""

_UNKNOWN = "unknown"


def trials_svg(tuning: Tuning) -> str:
    """Draw each trial's step time where it ended, the best so far, and the lower bound.

    Below, draw each technique's credit with the bandit, if it chose. After a lasting
    change the search starts again, and so do the line of the best and the bound. Plans
    that could not be run are crosses at the upper edge. The result is empty if nothing
    was tried.
    """
    searches = _searches(tuning.events)
    tried = [event for search in searches for event in search.tried]
    if not tried:
        return ""
    names = sorted({_technique(event) for event in tried})
    last = max(event.step for event in tried) or 1

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * step / last

    out, bottom = _trials(searches, names, x)
    if any(_credits(event) for event in tried):
        out += _credit(searches, names, x, bottom + _CREDIT_GAP)
        bottom += _CREDIT_GAP + _CREDIT_HEIGHT
    out += [
        text_tag(
            x(step), bottom + 20, f"step {step:g}", class_="tick", text_anchor="middle"
        )
        for step in ticks(last, 6)
        if step == round(step)
    ]
    out += _key(names, bottom + 46)
    height = bottom + 60 + 18 * ((len(names) - 1) // 4)
    return svg_tag(out, height, f"Trials of {tuning.name}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Trials from one profile to the plan that settled."""

    tried: Sequence[TuningEvent]

    bound_s: float | None
    """Lower bound on every plan's step, as known at the end."""


def _searches(events: Sequence[TuningEvent]) -> list[_Search]:
    parts: list[list[TuningEvent]] = [[]]
    for event in events:
        if event.what == "changed":
            parts.append([])
        parts[-1].append(event)
    found = []
    for part in parts:
        bounds = [_number(event, "bound_s") for event in part]
        known = [bound_s for bound_s in bounds if bound_s]
        tried = [event for event in part if event.what == "tried"]
        found.append(_Search(tried=tried, bound_s=known[-1] if known else None))
    return [search for search in found if search.tried]


def _trials(
    searches: Sequence[_Search], names: Sequence[str], x: Callable[[float], float]
) -> tuple[list[str], float]:
    """Return the area of step times, and where it ends."""
    bottom = _TOP + _HEIGHT
    tried = [event for search in searches for event in search.tried]
    figures = [
        _number(event, key) for event in tried for key in ("step_s", "incumbent_s")
    ]
    bounds = [search.bound_s for search in searches]
    # One if no plan could be run, because then there is no figure.
    high_s = max((s for s in (*figures, *bounds) if s is not None), default=0.0) or 1.0

    def y(step_s: float) -> float:
        return _TOP + _HEIGHT * (1 - step_s / (1.08 * high_s))

    out = []
    for value_s in ticks(1.08 * high_s, 5):
        at = y(value_s)
        label = tick_label(value_s, high_s)
        out += [
            tag("line", x1=_LEFT, x2=_RIGHT, y1=at, y2=at, class_="grid"),
            text_tag(_LEFT - 8, at + 4, label, class_="tick", text_anchor="end"),
        ]
    ends: list[tuple[float, str, str]] = []
    for search in searches:
        steps = [event.step for event in search.tried]
        if search.bound_s is not None:
            begin = _LEFT if search is searches[0] else x(steps[0])
            end = _RIGHT if search is searches[-1] else x(steps[-1])
            at = y(search.bound_s)
            out.append(tag("line", x1=begin, x2=end, y1=at, y2=at, class_="bound"))
        if search is not searches[0]:
            edge = x(steps[0])
            out.append(
                tag("line", x1=edge, x2=edge, y1=_TOP, y2=bottom, class_="grid")
                + text_tag(edge + 4, _TOP + 10, "searching again", class_="tick")
            )
        path, best_s = _best_line(search.tried, x, y)
        if path:
            out.append(tag("path", d=path, class_="whisker"))
        if search is searches[-1]:
            if best_s is not None:
                ends.append((y(best_s) + 4, f"best {format_s(best_s)}", "tick"))
            if search.bound_s is not None:
                label = f"bound {format_s(search.bound_s)}"
                ends.append((y(search.bound_s) + 4, label, "bound-text"))
    out += [_dot(event, names, x, y) for event in tried]
    if any(_number(event, "step_s") is None for event in tried):
        ends.append((_TOP + 4, "× could not be run", "tick"))
    return [*out, *_labels(ends)], bottom


def _labels(ends: Sequence[tuple[float, str, str]]) -> list[str]:
    """Place texts right of an area at their lines' levels, or near them if crowded."""
    places = spread_apart([at for at, _, _ in ends], 16)
    return [
        text_tag(_RIGHT + 8, at, label, class_=style)
        for at, (_, label, style) in zip(places, ends, strict=True)
    ]


def _best_line(
    tried: Sequence[TuningEvent],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> tuple[str, float | None]:
    """Return the path of the best so far, and its last value."""
    path, before = "", math.nan
    for event in tried:
        best_s = _number(event, "incumbent_s")
        if best_s is None:
            continue
        at, level = f"{x(event.step):.1f}", f"{y(best_s):.1f}"
        if not path:
            path = f"M{at} {level}"
        else:
            path += f"H{at}" + (f"V{level}" if best_s != before else "")
        before = best_s
    return path, None if math.isnan(before) else before


def _dot(
    event: TuningEvent,
    names: Sequence[str],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    name, step_s = _technique(event), _number(event, "step_s")
    style = f"n{names.index(name) % len(SERIES)}"
    title = f"<title>{escape(f'{name}, step {event.step}: {event.why}')}</title>"
    at = x(event.step)
    if step_s is None:
        # Escaped already: `text_tag` would escape the title's tags.
        return tag(
            "text", f"{title}×", x=at, y=_TOP + 4, class_=style, text_anchor="middle"
        )
    radius = 6.0 if event.values.get("won") is True else 4.0
    return tag("circle", title, cx=at, cy=y(step_s), r=radius, class_=style)


def _credit(
    searches: Sequence[_Search],
    names: Sequence[str],
    x: Callable[[float], float],
    top: float,
) -> list[str]:
    """Draw each technique's credit over steps, 0 to 1."""
    credited = [
        [(event.step, _credits(event)) for event in search.tried if _credits(event)]
        for search in searches
    ]
    credited = [part for part in credited if part]

    def y(value: float) -> float:
        return top + _CREDIT_HEIGHT * (1 - min(max(value, 0.0), 1.0))

    out = [text_tag(20.0, top - 14, "Credit of each technique", class_="name")]
    for value in (0.0, 0.5, 1.0):
        at = y(value)
        out += [
            tag("line", x1=_LEFT, x2=_RIGHT, y1=at, y2=at, class_="grid"),
            text_tag(_LEFT - 8, at + 4, f"{value:g}", class_="tick", text_anchor="end"),
        ]
    ends: list[tuple[float, str, str]] = []
    arms = sorted({arm for part in credited for _, values in part for arm in values})
    # An arm that never got a trial has no color yet.
    hues = [*names, *(arm for arm in arms if arm not in names)]
    for arm in arms:
        style = hues.index(arm) % len(SERIES)
        path, value = "", 0.0
        for part in credited:
            points = [(step, values[arm]) for step, values in part if arm in values]
            places = [f"{x(step):.1f} {y(value):.1f}" for step, value in points]
            path += "M" + "L".join(places) if places else ""
            value = points[-1][1] if points else value
        out.append(tag("path", d=path, fill="none", class_=f"curve c{style}"))
        ends.append((y(value) + 4, f"{arm} {value:.2f}", f"tick n{style}"))
    return [*out, *_labels(ends)]


def _key(names: Sequence[str], top: float) -> list[str]:
    out = []
    for i, name in enumerate(names):
        at, left = top + 18 * (i // 4), _LEFT + 190 * (i % 4)
        out += [
            tag("circle", cx=left, cy=at - 4, r=4.0, class_=f"n{i % len(SERIES)}"),
            text_tag(left + 10, at, name, class_="tick"),
        ]
    return out


def decisions(tuning: Tuning) -> list[tuple[str, str, str, str]]:
    """Return step, event, reason and figures, one row for each decision."""
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
            inner = ", ".join(f"{k} {v:.2f}" for k, v in _numbers(value).items())
            if inner:
                parts.append(f"{name}: {inner}")
        elif not isinstance(value, int | float):
            parts.append(f"{key.replace('_', ' ')} {value}")
        elif key.endswith("_bytes_per_s"):
            name = key.removesuffix("_bytes_per_s").replace("_", " ")
            parts.append(f"{name} {format_rate(value)}")
        elif key.endswith("_s"):
            parts.append(f"{name} {format_s(value)}")
        elif key.endswith("_ratio"):
            name = key.removesuffix("_ratio").replace("_", " ")
            parts.append(f"{name} {100 * value:.3g} %")
        else:
            parts.append(f"{name} {value:.3g}" if value % 1 else f"{name} {value:g}")
    return "; ".join(parts)


def _technique(event: TuningEvent) -> str:
    return str(event.values.get("technique", _UNKNOWN))


def _number(event: TuningEvent, key: str) -> float | None:
    """Return a finite figure of at least 0; a file's values may be anything."""
    return _numbers({key: event.values.get(key)}).get(key)


def _credits(event: TuningEvent) -> dict[str, float]:
    credit = event.values.get("credits")
    return _numbers(credit) if isinstance(credit, dict) else {}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    }
