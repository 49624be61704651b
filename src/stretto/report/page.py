"""One self-contained HTML page: it fetches nothing."""

from __future__ import annotations

import math
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from stretto.report import bars, ranks_page, svg
from stretto.report.curves import Chart, charts_svg
from stretto.report.ranks import find_late
from stretto.report.results import BASELINE
from stretto.report.tuning import decisions, trials_svg
from stretto.schema import codec
from stretto.units import format_bytes, format_rate, format_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from stretto.report.results import DemoReport, MethodResult, ScaledStep
    from stretto.schema import Cluster, Link, Workload

_DASH = "–"

_MAX_MS_S = 10.0
"""From this step time on, an axis counts seconds."""


def save(path: str | Path, report: DemoReport) -> None:
    """Write the page atomically.

    Raises:
        SpecError: the file cannot be written.
    """
    codec.write_atomically(path, render(report).encode())


def render(report: DemoReport) -> str:
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
        _plans(report),
        _subject(report),
        _reading(report),
        _provenance(report),
    )
    return framed(report.title, "\n".join(text for text in sections if text))


def _tuned(report: DemoReport) -> str:
    if report.tuning is None:
        return ""
    rows = [(list(row), "", False) for row in decisions(report.tuning)]
    table = _table(["step", "what", "why", "figures"], rows)
    return _section(
        "Tuning",
        "Plans tried while the training ran. Each dot is a trial's median step where "
        "it ended, large if it became the best so far; the line is the best so far. "
        "Below it is each technique's credit. Crosses are plans that could not be "
        "run.",
        trials_svg(report.tuning) + f'<div class="scroll">{table}</div>',
        id_="tuning",
    )


def framed(title: str, body: str) -> str:
    """Return a page as HTML text around its sections."""
    return _PAGE.format(
        title=escape(title),
        style=_style(),
        body=body,
        made_by=escape(codec.MADE_BY),
        script=_asset("page.js"),
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
{body}
<footer>Made by {made_by}. This page is whole: it loads nothing.</footer>
</main>
<script>
{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("stretto.report").joinpath(name).read_text("utf-8")


def _style() -> str:
    light = svg.css_variables(svg.LIGHT | {"back": "#f3f5f8", "font": svg.FONT})
    dark = svg.css_variables(svg.DARK | {"back": "#0e1217"})
    curves = "".join(
        f".drawing .c{i}{{stroke:{on_light};stroke-dasharray:{dashes or 'none'}}}"
        f".drawing .n{i}{{fill:{on_light}}}"
        f".key .c{i}{{background:{on_light}}}"
        for i, (on_light, _, dashes) in enumerate(svg.SERIES)
    )
    dark_curves = "".join(
        f".drawing .c{i}{{stroke:{on_dark}}}.drawing .n{i}{{fill:{on_dark}}}"
        for i, (_, on_dark, _) in enumerate(svg.SERIES)
    )
    kinds = "".join(
        f".drawing .span.{kind},.key .{kind}{{fill:var(--{kind});"
        f"background:var(--{kind})}}.drawing .on.{kind}{{fill:var(--on-{kind})}}"
        for kind in _KINDS
    )
    return (
        f":root{{{light}}}\n{svg.SVG_STYLE}\n{kinds}\n{curves}\n{_asset('page.css')}"
        "@media screen and (prefers-color-scheme: dark){"
        f":root{{{dark}}}{dark_curves}}}"
    )


_KINDS = {
    "forward": "forward",
    "backward": "backward",
    "send": "a bucket or slice on the wire",
    "wait": "a bucket that waits for its lane",
    "peer": "waits for another rank",
    "exposed": "waits for communication",
    "outside": "between steps",
    "other": "other",
}


def _headline(report: DemoReport) -> str:
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
            _tile(
                format_s(fastest.measured_step_s),
                f"a step with {fastest.name}, the median measured",
                best=True,
            )
        )
        if fastest.speedup_over_ddp is not None:
            tiles.append(
                _tile(f"{fastest.speedup_over_ddp:.2f}×", "as fast as DDP's default")
            )
        if fastest.bound_share is not None:
            tiles.append(
                _tile(
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
            words = f"mean prediction error, {_share(worst)} at worst"
        tiles.append(_tile(_share(mean), words))
    kicker = f'<p class="kicker">{escape(report.title)}</p>'
    return (
        f"<header>{kicker if title != report.title else ''}"
        f"<h1>{escape(title)}</h1>{lead}</header>"
        + (f'<div class="tiles">{"".join(tiles)}</div>' if tiles else "")
    )


def _prediction(report: DemoReport) -> tuple[str, list[str]]:
    """Return title and tiles of a page without measurements."""
    known = [(m.predicted_step_s, m) for m in report.methods if m.predicted_step_s]
    if not known:
        return report.title, []
    step_s, best = min(known, key=lambda pair: pair[0])
    title = f"{best.name}: {format_s(step_s)} a step, predicted"
    if len(known) > 1:
        title = f"{best.name} is predicted to be the fastest of {len(known)} methods"
    tiles = [_tile(format_s(step_s), f"a step with {best.name}, predicted", best=True)]
    ddp = [known_s for known_s, m in known if m.name == BASELINE and m is not best]
    if ddp:
        tiles.append(_tile(f"{ddp[0] / step_s:.2f}×", "as fast as DDP's default"))
    if best.name in report.gaps:
        words = "over the lower bound: no plan of its kind gains more"
        tiles.append(_tile(_share(max(0.0, report.gaps[best.name])), words))
    return title, tiles


def _scaling(report: DemoReport) -> str:
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
        last_gaps[name] = _share(_gap(last))
        rows.append([name, *(_maybe(r, _scaled) for r in points)])
    rows.insert(0, ["ranks", *map(str, ranks)])
    if len(ranks) > len(names):
        rows = [list(column) for column in zip(*rows, strict=True)]
    table = _table(rows[0], [(row, "", False) for row in rows[1:]])
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
    return _section(
        "Over the number of ranks",
        "Planned separately for each number unless a plan was given. The figure "
        "beside a curve's name is its value at the right end. The axis of time begins "
        "below the shortest, not at zero, and is logarithmic if times span a wide "
        "range. In the table, in brackets: the share of the step that is computation.",
        f'<figure class="scroll">{drawing}</figure><div class="scroll">{table}</div>',
        id_="scaling",
    )


def _gap(row: ScaledStep) -> float:
    return max(0.0, row.step_s / row.bound_s - 1) if row.bound_s > 0 else 0.0


def _scaled(row: ScaledStep) -> str:
    return f"{format_s(row.step_s)} ({row.efficiency_ratio:.0%})"


def _gaps(report: DemoReport) -> str:
    if not report.gaps:
        return ""
    return _section(
        "Gap to the lower bound",
        "How much longer the predicted step is than the lower bound over the plans "
        "that the method chooses from. 0 % is proven to be the best of these.",
        f'<figure class="scroll">{bars.gaps_svg(report.gaps)}</figure>',
        id_="gaps",
    )


def _contributions(report: DemoReport) -> str:
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
    return _section(
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


def _tile(figure: str, words: str, *, best: bool = False) -> str:
    return (
        f'<div class="tile{" best" if best else ""}"><b>{escape(figure)}</b>'
        f"<span>{escape(words)}</span></div>"
    )


def _step_times(report: DemoReport) -> str:
    if not any(m.step_s is not None for m in report.methods):
        return ""
    # If everything is predicted, the drawing shows all that the table would.
    table = ""
    if not report.gaps or report.fastest is not None:
        table = _methods_table(report)
        table = f'<div class="scroll" style="margin-top:18px">{table}</div>'
    scope = f" with {escape(report.bound_scope)}" if report.bound_scope else ""
    return _section(
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


def _methods_table(report: DemoReport) -> str:
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
            _maybe(m.predicted_step_s, format_s),
            _maybe(m.measured_step_s, format_s),
            _maybe(m.spread_s, lambda v: f"± {format_s(v)}"),
            _maybe(m.error_ratio, lambda v: f"{v:+.1%}".replace("-", "−")),
            _maybe(m.speedup_over_ddp, lambda v: f"{v:.2f}×"),
            _maybe(m.bound_share, _over),
            _maybe(m.final_loss, lambda v: f"{v:.4g}"),
        ]
        rows.append((cells, m.description, m is report.fastest))
    return _table(heads, rows)


def _table(heads: list[str], rows: Iterable[tuple[list[str], str, bool]]) -> str:
    """Format rows of cells; a row's note is printed small below its first cell.

    Columns without any known value are left out.
    """
    rows = list(rows)
    kept = [i for i in range(len(heads)) if any(row[0][i] != _DASH for row in rows)]
    heads = [heads[i] for i in kept]
    rows = [([cells[i] for i in kept], words, best) for cells, words, best in rows]
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = ""
    for cells, words, best in rows:
        below = f"<small>{escape(words)}</small>" if words else ""
        row = f"<td>{escape(cells[0])}{below}</td>"
        row += "".join(f"<td>{escape(text)}</td>" for text in cells[1:])
        body += f'<tr class="best">{row}</tr>' if best else f"<tr>{row}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _timelines(report: DemoReport) -> str:
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
        for kind, words in _KINDS.items()
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
    return _section(
        "One step, drawn",
        "Computation above, the lanes that carry gradients below, from the start of "
        "forward. Point at a span to see what it is.",
        f'<div class="key">{key}</div>{figures}',
        id_="timelines",
        class_="long",
    )


def _all_ranks(report: DemoReport) -> list[str]:
    """Draw each method's steps on all ranks, with late ranks and the cause."""
    sections = []
    for method in report.methods:
        found = find_late(method.ranks) if method.ranks is not None else None
        if method.ranks is None or found is None:
            continue
        present = {svg.span_kind(span) for span in method.ranks.spans}
        key = "".join(
            f'<span><i class="{kind}"></i>{words}</span>'
            for kind, words in _KINDS.items()
            if kind in present
        )
        drawing = ranks_page.ranks_svg(method.name, method.ranks, found)
        tables = "".join(
            '<figure class="scroll">'
            + _table(
                heads, [(row, "late" if late else "", False) for row, late in rows]
            )
            + "</figure>"
            for heads, rows in (
                ranks_page.rank_rows(found),
                ranks_page.lane_rows(found),
            )
            if rows
        )
        meanings = _facts(ranks_page.MEANINGS)
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
            _section(
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


def _losses(report: DemoReport) -> str:
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
    return _section("Training loss", words, figure)


def _plans(report: DemoReport) -> str:
    planned = [(m, m.plan) for m in report.methods if m.plan is not None]
    if not planned:
        return ""
    sizes = {}
    if report.workload is not None:
        sizes = {tensor.name: tensor.bytes for tensor in report.workload.tensors}
    rows = []
    for m, plan in planned:
        totals = [
            sum(sizes[name] for name in bucket.tensors)
            for bucket in plan.buckets
            if all(name in sizes for name in bucket.tensors)
        ]
        known = len(totals) == len(plan.buckets)
        rows.append(
            (
                [
                    m.name,
                    plan.planner,
                    plan.overlap,
                    str(len(plan.buckets)),
                    str(sum(bucket.slices for bucket in plan.buckets)),
                    str(plan.lanes),
                    format_bytes(min(totals)) if known else _DASH,
                    format_bytes(max(totals)) if known else _DASH,
                ],
                "",
                m is report.fastest,
            )
        )
    heads = [
        "method",
        "planner",
        "overlap",
        "buckets",
        "collectives",
        "lanes",
        "smallest bucket",
        "largest bucket",
    ]
    return _section(
        "Plans",
        "A bucket is what one collective sends. Slices of a bucket are sent at once "
        "on several lanes, so there may be more collectives than buckets.",
        f'<div class="scroll">{_table(heads, rows)}</div>',
    )


def _subject(report: DemoReport) -> str:
    parts = []
    if report.workload is not None:
        parts.append(
            f"<div><h3>Model</h3>{_facts(_workload_facts(report.workload))}</div>"
        )
    if report.cluster is not None:
        parts.append(
            f"<div><h3>Cluster</h3>{_facts(_cluster_facts(report.cluster))}</div>"
        )
    if not parts:
        return ""
    return _section(
        "Model and cluster", "", f'<div class="pair">{"".join(parts)}</div>'
    )


def _workload_facts(workload: Workload) -> dict[str, str]:
    sizes = [tensor.bytes for tensor in workload.tensors]
    return {
        "name": workload.name,
        "framework": workload.framework,
        "device": workload.device,
        "batch per rank": str(workload.batch_per_rank),
        "forward and rest": format_s(workload.forward_s),
        "backward": format_s(workload.backward_s),
        "gradients": f"{len(sizes)} tensors, {format_bytes(workload.total_bytes)}",
        "largest tensor": format_bytes(max(sizes)),
        "smallest tensor": format_bytes(min(sizes)),
    }


def _cluster_facts(cluster: Cluster) -> dict[str, str]:
    facts = {
        "name": cluster.name,
        "ranks": f"{cluster.ranks}: {cluster.hosts} hosts of {cluster.ranks_per_host}",
    }
    if cluster.hosts > 1:
        facts |= _link_facts("between hosts", cluster.inter_host)
    if cluster.ranks_per_host > 1 or cluster.hosts == 1:
        facts |= _link_facts("inside a host", cluster.intra_host)
    if cluster.allreduce is not None:
        fit = cluster.allreduce
        facts["all-reduce alone"] = (
            f"{format_s(fit.startup_s)} and {format_s(fit.s_per_byte * 2**20)} per "
            f"MiB, fitted at {fit.ranks} ranks"
        )
    if cluster.concurrency is not None:
        gammas = ", ".join(f"{value:.3g}" for value in cluster.concurrency.gamma)
        facts["slow-down of 1, 2, ... at once"] = gammas
    return facts


def _link_facts(name: str, link: Link) -> dict[str, str]:
    flow = link.stream_bytes_per_s
    return {
        name: format_rate(link.bandwidth_bytes_per_s)
        + (f", one flow {format_rate(flow)}" if flow is not None else "")
        + (f", latency {format_s(link.latency_s)}" if link.latency_s else "")
    }


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(str(key))}</dt><dd>{escape(_fact(value))}</dd>"
        for key, value in facts.items()
    )
    return f"<dl>{rows}</dl>"


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_fact(item) for item in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return {True: "yes", False: "no", None: _DASH}.get(value, str(value))


def _reading(report: DemoReport) -> str:
    notes = [escape(note) for note in report.notes]
    if any(m.measured_step_s is not None for m in report.methods):
        notes.append(
            "<b>measured</b> is the median over the steps of the slowest rank; "
            "<b>spread</b> is half the distance between the quartiles."
        )
    if report.mean_error_ratio is not None:
        notes.append(
            "<b>predicted</b> was computed before the run from the model's profile and "
            "the network's probe alone; <b>error</b> is predicted over measured, less "
            "one."
        )
    shares = any(m.bound_share is not None for m in report.methods)
    if report.bound_s is not None and shares:
        notes.append(
            "<b>over bound</b> is the measured step over the lower bound, "
            f"{format_s(report.bound_s)}: a perfect plan would have 1.00. The bound is "
            "computed from the measured network and profile, so it has their error: a "
            "figure just below 1 is that error, not a faster network."
        )
    if any(m.measured is not None for m in report.methods):
        notes.append(
            "A measured timeline is one recorded step of rank 0, the one of median "
            "length. A lane is drawn as if it sent one slice after another."
        )
    if not notes:
        return ""
    items = "".join(f"<li>{note}</li>" for note in notes)
    return _section("How to read this", "", f"<ul>{items}</ul>")


def _provenance(report: DemoReport) -> str:
    parts = []
    for title, facts in (
        ("Machine and options", report.environment),
        ("Profile", report.workload.provenance if report.workload else {}),
        ("Probe", report.cluster.provenance if report.cluster else {}),
    ):
        if facts:
            parts.append(f"<div><h3>{title}</h3>{_facts(facts)}</div>")
    if not parts:
        return ""
    body = f'<div class="pair">{"".join(parts)}</div>'
    return _section("Sources of the figures", "", body)


def _section(
    title: str, why: str, body: str, *, id_: str = "", class_: str = ""
) -> str:
    attributes = (f' id="{id_}"' if id_ else "") + (
        f' class="{class_}"' if class_ else ""
    )
    why = f'<p class="why">{why}</p>' if why else ""
    return f"<section{attributes}><h2>{title}</h2>{why}{body}</section>"


def _over(share: float) -> str:
    return f"{1 / share:.2f}"


def _share(ratio: float) -> str:
    return f"{ratio:.1%}"


def _maybe(value: Any, text: Any) -> str:
    return _DASH if value is None else str(text(value))
