"""``stretto reproduce``: recompute the papers' tables."""

from __future__ import annotations

import json
import math
import textwrap
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stretto.cli._outputs import OutputCommand, writable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.papers import Correction, Figure, Reproduction, Series

PAPERS = ("asc-wfbp", "libra", "aiacc", "deeppool")
"""Listed here too, so that ``--help`` imports no planner; a test compares the lists."""


@click.command(cls=OutputCommand, name="reproduce")
@click.argument("paper", type=click.Choice(PAPERS))
@click.option(
    "--svg",
    "drawing",
    metavar="FILE",
    callback=writable,
    help="Draw the curves to this file, as SVG.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(paper: str, drawing: str | None, as_json: bool) -> None:
    """Recompute the figures of PAPER, ours beside their references.

    Each reference is labeled: published (printed in the paper), derived (computed from
    what is printed), repository (the authors'), target (our own). A figure outside its
    tolerance is shown as missed, with the reason. What cannot be recomputed is listed
    with the reason, and the paper's errors with counterexamples.
    """
    from stretto.papers import reproduce

    done = reproduce(paper)
    if drawing is not None:
        _draw(done, drawing)
    if as_json:
        click.echo(json.dumps(_finite(done.as_dict()), indent=2, allow_nan=False))
        return
    click.echo("\n".join(_lines(done)))


def _draw(done: Reproduction, path: str) -> None:
    from stretto.report.curves import Chart, charts_svg

    if not done.series:
        raise click.UsageError(f"{done.paper} has no curves to draw: omit --svg")
    charts = [
        Chart(title=s.title, axis=s.axis, unit=s.unit, x=s.x, columns=s.columns)
        for s in done.series
    ]
    Path(path).write_text(charts_svg(charts, done.title), encoding="utf-8")


def _lines(done: Reproduction) -> Iterator[str]:
    yield done.title
    for text in done.assumed:
        yield f"  assumed: {text}"
    for table, figures in groupby(
        sorted(done.figures, key=_order(done)), key=lambda f: f.table
    ):
        yield ""
        yield table
        yield from _figures(list(figures))
    for series in done.series:
        yield ""
        yield from _series(series)
    yield ""
    yield "corrections"
    for correction in done.corrections:
        yield from _correction(correction)
    yield ""
    yield "not recomputed"
    for left in done.left:
        yield from _wrapped(f"{left.item}: {left.reason}", "  ")
    yield ""
    yield from _totals(done)


_LABELS = {
    "published": "published",
    "derived": "derived from published figures",
    "repository": "from the authors' repository",
    "target": "our targets",
    "identity": "identities (follow from the same numbers, and do not test the model)",
}


def _totals(done: Reproduction) -> Iterator[str]:
    """Count how many figures of each source are within tolerance."""
    counts = done.counts()
    for source, label in _LABELS.items():
        if source in counts:
            parts = [f"{number} {state}" for state, number in counts[source].items()]
            yield f"{label}: {', '.join(sorted(parts))}"


def _order(done: Reproduction) -> Any:
    """Return the tables in the order of their first figure."""
    first: dict[str, int] = {}
    for figure in done.figures:
        first.setdefault(figure.table, len(first))
    return lambda figure: first[figure.table]


def _figures(figures: list[Figure]) -> Iterator[str]:
    width = max(6, *(len(f.name) for f in figures))
    head = f"  {'figure':<{width}}  {'ours':>9}  {'reference':>12}  {'':<2}{'error':>8}"
    yield f"  {head.strip()}  {'source':<10}  state"
    for figure in figures:
        error = figure.error
        row = (
            f"  {figure.name:<{width}}  {_number(figure.ours):>9}"
            f"  {_reference(figure):>12}  {figure.unit:<2}"
            f"{'' if error is None else f'{error:+.1%}':>8}"
            f"  {figure.source or '-':<10}  {_state(figure)}"
        )
        yield row.rstrip()
        if figure.note:
            yield from _wrapped(figure.note, "      ")


def _state(figure: Figure) -> str:
    if figure.identity:
        return {True: "identity", False: "DIFFERS", None: "identity"}[figure.within]
    return {True: "reached", False: "MISSED", None: ""}[figure.within]


def _reference(figure: Figure) -> str:
    if figure.reference is None:
        return "-"
    if figure.reference_high is not None:
        return f"{_number(figure.reference)}..{_number(figure.reference_high)}"
    sign = ">" if figure.at_least else "<" if figure.at_most else ""
    return sign + _number(figure.reference)


def _series(series: Series) -> Iterator[str]:
    yield series.title + (f" ({series.note})" if series.note else "")
    width = max(len(name) for name in (series.axis, *series.columns))
    yield f"  {series.axis:<{width}}" + "".join(f"{x:>8}" for x in series.x)
    for name, values in series.columns.items():
        yield f"  {name:<{width}}" + "".join(f"{v:>8.3f}" for v in values)


def _correction(correction: Correction) -> Iterator[str]:
    yield from _wrapped(
        f"{correction.where}: {correction.defect} -> {correction.reading}", "  "
    )
    if correction.shown:
        state = "" if correction.holds is not False else " (NOT SHOWN)"
        yield from _wrapped(f"computed: {correction.shown}{state}", "      ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 98, initial_indent=indent, subsequent_indent=indent + "  "
    )


def _number(value: float) -> str:
    if math.isfinite(value) and value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}"


def _finite(value: Any) -> Any:
    """Replace infinite numbers by ``None``: JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
