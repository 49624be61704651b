"""The page of a demo or a run: what was measured, and what was predicted.

It is one HTML file that fetches nothing (`html`); `page_facts` has the sections about
plans, model, cluster and sources.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from stretto.report import bars, ranks_page, svg
from stretto.report.curves import Chart, charts_svg
from stretto.report.html import (
    KINDS,
    facts_list,
    framed,
    or_dash,
    percent,
    section,
    table,
    tile,
)
from stretto.report.page_facts import plans, provenance, reading, subject
from stretto.report.ranks import find_late
from stretto.report.results import BASELINE
from stretto.report.tuning import decisions, trials_svg
from stretto.schema import codec
from stretto.units import format_s

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.report.results import MethodResult, RunReport, ScaledStep

_MAX_MS_S = 10.0
"""From this step time on, an axis counts seconds."""


def save(path: str | Path, report: RunReport) -> None:
    """Write the page atomically.

    Raises:
        SpecError: the file cannot be written.
    """
    codec.write_atomically(path, render(report).encode())


def render(report: RunReport) -> str:
    """Return the page as HTML text, without sections about missing data."""
    sections = (
        _headline(report),
        _step_times(report),
        _scaling(report),
        _gaps(report),
        _contributions(report),
        _tuned(report),
        _timelines(report),
        *_all_ranks(report),
        _losses(report),
        plans(report),
        subject(report),
        reading(report),
        provenance(report),
    )
    return framed(report.title, "\n".join(text for text in sections if text))


def _tuned(report: RunReport) -> str:
    if report.tuning is None:
        return ""
    rows = [(list(row), "", False) for row in decisions(report.tuning)]
    rows_table = table(["step", "what", "why", "figures"], rows)
    return section(
        "Tuning",
        "Plans tried while the training ran. Each dot is a trial's median step where "
        "it ended, large if it became the best so far; the line is the best so far. "
        "Below it is each technique's credit. Crosses are plans that could not be "
        "run.",
        trials_svg(report.tuning) + f'<div class="scroll">{rows_table}</div>',
        id_="tuning",
    )


def _headline(report: RunReport) -> str:
    fastest = report.fastest
    title, lead = report.title, ""
    tiles: list[str] = []
    if fastest is not None and fastest.measured_step_s:
        others = [m for m in report.methods if m is not fastest and m.measured_step_s]
        title = f"{fastest.name} is the fastest of {len(others) + 1} methods"
        if not others:
            title = f"{fastest.name}: {format_s(fastest.measured_step_s)} a step"
        lead = _lead(fastest, others)
        tiles.append(
            tile(
                format_s(fastest.measured_step_s),
                f"a step with {fastest.name}, the median measured",
                best=True,
            )
        )
        if fastest.speedup_over_ddp is not None:
            tiles.append(
                tile(f"{fastest.speedup_over_ddp:.2f}×", "as fast as DDP's default")
            )
        if fastest.bound_share is not None:
            tiles.append(
                tile(
                    f"{1 / fastest.bound_share:.2f}×",
                    "the lower bound, which no plan can beat",
                )
            )
    elif report.gaps or report.scaling:
        title, more = _prediction(report)
        tiles += more
    mean, worst = report.mean_error_ratio, report.worst_error_ratio
    if mean is not None and worst is not None:
        count = sum(m.error_ratio is not None for m in report.methods)
        words = "prediction error"
        if count > 1:
            words = f"mean prediction error, {percent(worst)} at worst"
        tiles.append(tile(percent(mean), words))
    kicker = f'<p class="kicker">{escape(report.title)}</p>'
    return (
        f"<header>{kicker if title != report.title else ''}"
        f"<h1>{escape(title)}</h1>{lead}</header>"
        + (f'<div class="tiles">{"".join(tiles)}</div>' if tiles else "")
    )


def _prediction(report: RunReport) -> tuple[str, list[str]]:
    """Return title and tiles of a page without measurements."""
    known = [(m.predicted_step_s, m) for m in report.methods if m.predicted_step_s]
    if not known:
        return report.title, []
    step_s, best = min(known, key=lambda pair: pair[0])
    title = f"{best.name}: {format_s(step_s)} a step, predicted"
    if len(known) > 1:
        title = f"{best.name} is predicted to be the fastest of {len(known)} methods"
    tiles = [tile(format_s(step_s), f"a step with {best.name}, predicted", best=True)]
    ddp = [known_s for known_s, m in known if m.name == BASELINE and m is not best]
    if ddp:
        tiles.append(tile(f"{ddp[0] / step_s:.2f}×", "as fast as DDP's default"))
    if best.name in report.gaps:
        words = "over the lower bound: no plan of its kind gains more"
        tiles.append(tile(percent(max(0.0, report.gaps[best.name])), words))
    return title, tiles


def _scaling(report: RunReport) -> str:
    """Draw step time and gap over the number of ranks: charts, then the figures."""
    if not report.scaling:
        return ""
    ranks = sorted({row.ranks for row in report.scaling})
    names = list(dict.fromkeys(row.method for row in report.scaling))
    at = {(row.method, row.ranks): row for row in report.scaling}
    longest_s = max(row.step_s for row in report.scaling)
    scale, unit = (1e3, "ms") if longest_s < _MAX_MS_S else (1.0, "s")
    times: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    last_s: dict[str, str] = {}
    last_gaps: dict[str, str] = {}
    rows: list[list[str]] = []
    for name in names:
        points = [at.get((name, count)) for count in ranks]
        times[name] = [row.step_s * scale if row else math.nan for row in points]
        gaps[name] = [100 * _gap(row) if row else math.nan for row in points]
        last = next(row for row in reversed(points) if row)
        last_s[name] = format_s(last.step_s)
        last_gaps[name] = percent(_gap(last))
        rows.append([name, *(or_dash(r, _scaled) for r in points)])
    rows.insert(0, ["ranks", *map(str, ranks)])
    if len(ranks) > len(names):
        rows = [list(column) for column in zip(*rows, strict=True)]
    numbers = table(rows[0], [(row, "", False) for row in rows[1:]])
    charts = [
        Chart(
            title="Step time",
            axis="ranks",
            unit=unit,
            x=ranks,
            columns=times,
            ends=last_s,
            wide=True,
        ),
        Chart(
            title="Over the lower bound",
            axis="ranks",
            unit="%",
            x=ranks,
            columns=gaps,
            ends=last_gaps,
        ),
    ]
    drawing = charts_svg(charts, "Step time over ranks", standalone=False)
    return section(
        "Over the number of ranks",
        "Planned separately for each number unless a plan was given. The figure "
        "beside a curve's name is its value at the right end. The axis of time begins "
        "below the shortest, not at zero, and is logarithmic if times span a wide "
        "range. In the table, in brackets: the share of the step that is computation.",
        f'<figure class="scroll">{drawing}</figure><div class="scroll">{numbers}</div>',
        id_="scaling",
    )


def _gap(row: ScaledStep) -> float:
    return max(0.0, row.step_s / row.bound_s - 1) if row.bound_s > 0 else 0.0


def _scaled(row: ScaledStep) -> str:
    return f"{format_s(row.step_s)} ({row.efficiency_ratio:.0%})"


def _gaps(report: RunReport) -> str:
    if not report.gaps:
        return ""
    return section(
        "Gap to the lower bound",
        "How much longer the predicted step is than the lower bound over the plans "
        "that the method chooses from. 0 % is proven to be the best of these.",
        f'<figure class="scroll">{bars.gaps_svg(report.gaps)}</figure>',
        id_="gaps",
    )


def _contributions(report: RunReport) -> str:
    rows = report.contributions
    if not rows:
        return ""
    begin_s = bars.axis_begin_s(rows)
    why = (
        f"The predicted step with {escape(rows[0][0])} alone, then with one more "
        "dimension opened in each row. A dimension that this cluster lacks saves "
        "nothing; the runtime may execute fewer."
    )
    if begin_s:
        why += f" The axis begins at {format_s(begin_s)}."
    return section(
        "What each dimension contributes",
        why,
        f'<figure class="scroll">{bars.contributions_svg(rows)}</figure>',
        id_="contributions",
    )


def _lead(fastest: MethodResult, others: list[MethodResult]) -> str:
    """Return one sentence: how much faster than the next best, and how certain."""
    if not others or fastest.measured_step_s is None:
        return ""
    second = min(others, key=lambda m: m.measured_step_s or math.inf)
    second_s = second.measured_step_s or math.inf
    text = (
        f"A step takes {format_s(fastest.measured_step_s)}, against "
        f"{format_s(second_s)} with {second.name}, the next best: "
        f"{second_s / fastest.measured_step_s:.2f} times as fast."
    )
    spread_s = (fastest.spread_s or 0.0) + (second.spread_s or 0.0)
    if second_s - fastest.measured_step_s <= spread_s:
        text += " The difference is within the spread of the measurements."
    return f'<p class="lead">{escape(text)}</p>'


def _step_times(report: RunReport) -> str:
    if not any(m.step_s is not None for m in report.methods):
        return ""
    # If everything is predicted, the drawing shows all that the table would.
    table = ""
    if not report.gaps or report.fastest is not None:
        table = _methods_table(report)
        table = f'<div class="scroll" style="margin-top:18px">{table}</div>'
    scope = f" with {escape(report.bound_scope)}" if report.bound_scope else ""
    return section(
        "Step time",
        "Shorter is better."
        + (
            f" No plan{scope} can be left of the dashed line: the computation, or "
            "sending the gradients through the slowest link, takes at least this "
            "time."
            if report.bound_s is not None
            else ""
        ),
        f'<figure class="scroll">{svg.step_time_svg(report)}</figure>{table}',
    )


def _methods_table(report: RunReport) -> str:
    heads = [
        "method",
        "predicted",
        "measured",
        "spread",
        "error",
        "against ddp",
        "over bound",
        "final loss",
    ]
    rows = []
    for m in report.methods:
        cells = [
            m.name,
            or_dash(m.predicted_step_s, format_s),
            or_dash(m.measured_step_s, format_s),
            or_dash(m.spread_s, lambda v: f"± {format_s(v)}"),
            or_dash(m.error_ratio, lambda v: f"{v:+.1%}".replace("-", "−")),
            or_dash(m.speedup_over_ddp, lambda v: f"{v:.2f}×"),
            or_dash(m.bound_share, _over),
            or_dash(m.final_loss, lambda v: f"{v:.4g}"),
        ]
        rows.append((cells, m.description, m is report.fastest))
    return table(heads, rows)


def _timelines(report: RunReport) -> str:
    drawn = [
        m for m in report.methods if m.predicted is not None or m.measured is not None
    ]
    if not drawn:
        return ""
    lines = [line for m in drawn for line in (m.predicted, m.measured) if line]
    shared_end_s = max((line.end_s for line in lines), default=0.0)
    present = {svg.span_kind(span) for line in lines for span in line.spans}
    key = "".join(
        f'<span><i class="{kind}"></i>{words}</span>'
        for kind, words in KINDS.items()
        if kind in present
    )
    key += '<span><i class="line"></i>end of the step</span>'
    if len(drawn) > 1:
        key += '<button id="zoom" type="button" aria-pressed="false" hidden></button>'
    figures = "".join(
        f"<h3>{escape(m.name)}{_described(m)}</h3>"
        '<figure class="scroll">'
        + svg.timeline_svg(m.name, m.predicted, m.measured, shared_end_s=shared_end_s)
        + "</figure>"
        for m in drawn
    )
    return section(
        "One step, drawn",
        "Computation above, the lanes that carry gradients below, from the start of "
        "forward. Point at a span to see what it is.",
        f'<div class="key">{key}</div>{figures}',
        id_="timelines",
        class_="long",
    )


def _all_ranks(report: RunReport) -> list[str]:
    """Draw each method's steps on all ranks, with late ranks and the cause."""
    sections = []
    for method in report.methods:
        found = find_late(method.ranks) if method.ranks is not None else None
        if method.ranks is None or found is None:
            continue
        present = {svg.span_kind(span) for span in method.ranks.spans}
        key = "".join(
            f'<span><i class="{kind}"></i>{words}</span>'
            for kind, words in KINDS.items()
            if kind in present
        )
        drawing = ranks_page.ranks_svg(method.name, method.ranks, found)
        tables = "".join(
            '<figure class="scroll">'
            + table(heads, [(row, "late" if late else "", False) for row, late in rows])
            + "</figure>"
            for heads, rows in (
                ranks_page.rank_rows(found),
                ranks_page.lane_rows(found),
            )
            if rows
        )
        meanings = facts_list(ranks_page.MEANINGS)
        name = f": {method.name}" if len(report.methods) > 1 else ""
        counted = len(found.steps)
        shown = ranks_page.drawn_ranks(found)
        left_out = ""
        if len(shown) < len(found.ranks):
            left_out = (
                f" {len(shown)} of {len(found.ranks)} ranks are drawn: the latest and "
                "the earliest."
            )
        sections.append(
            section(
                f"All ranks on one clock{name}",
                f"{found.words()} The drawing is one of {counted} steps recorded, the "
                f"tables are medians over them.{left_out}",
                f'<div class="key">{key}</div>'
                f'<figure class="scroll">{drawing}</figure>{tables}'
                f"<h3>What the spans mean</h3>{meanings}",
                class_="long",
            )
        )
    return sections


def _described(method: MethodResult) -> str:
    if not method.description:
        return ""
    return f' <span class="soft">{escape(method.description)}</span>'


def _losses(report: RunReport) -> str:
    groups = svg.loss_groups(report.methods)
    if not groups:
        return ""
    total = sum(len(names) for names, _ in groups)
    words = "Same seeds, same data: only the time at which gradients are sent differs."
    if len(groups) == 1 and total > 1:
        words += " The curves agree to a thousandth, as they must."
    elif len(groups) > 1:
        words += " Curves that agree to a thousandth are drawn as one."
    figure = f'<figure class="scroll">{svg.loss_svg(report.methods)}</figure>'
    return section("Training loss", words, figure)


def _over(share: float) -> str:
    return f"{1 / share:.2f}"
