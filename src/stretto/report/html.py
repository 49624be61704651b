"""The frame of a page, and its parts: sections, tables, tiles, facts."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from stretto.report import svg
from stretto.schema import codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


DASH = "–"
"""A cell without a value."""


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
<footer>Made by {made_by}. This page is self-contained: it loads nothing.</footer>
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
        for kind in KINDS
    )
    return (
        f":root{{{light}}}\n{svg.SVG_STYLE}\n{kinds}\n{curves}\n{_asset('page.css')}"
        "@media screen and (prefers-color-scheme: dark){"
        f":root{{{dark}}}{dark_curves}}}"
    )


KINDS = {
    "forward": "forward",
    "backward": "backward",
    "send": "a bucket or slice on the wire",
    "wait": "a bucket that waits for its lane",
    "peer": "waits for another rank",
    "exposed": "waits for communication",
    "outside": "between steps",
    "other": "other",
}
"""Kinds of spans in drawings, and what each stands for."""


def tile(figure: str, words: str, *, best: bool = False) -> str:
    """Return one large figure with its words."""
    return (
        f'<div class="tile{" best" if best else ""}"><b>{escape(figure)}</b>'
        f"<span>{escape(words)}</span></div>"
    )


def table(heads: list[str], rows: Iterable[tuple[list[str], str, bool]]) -> str:
    """Format rows of cells; a row's note is printed small below its first cell.

    Columns without any known value are left out.
    """
    rows = list(rows)
    kept = [i for i in range(len(heads)) if any(row[0][i] != DASH for row in rows)]
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


def facts_list(facts: Mapping[str, Any]) -> str:
    """Return names and values as a list of definitions."""
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
    return {True: "yes", False: "no", None: DASH}.get(value, str(value))


def section(title: str, why: str, body: str, *, id_: str = "", class_: str = "") -> str:
    """Return a section: its heading, a sentence on why it matters, and its body."""
    attributes = (f' id="{id_}"' if id_ else "") + (
        f' class="{class_}"' if class_ else ""
    )
    why = f'<p class="why">{why}</p>' if why else ""
    return f"<section{attributes}><h2>{title}</h2>{why}{body}</section>"


def percent(ratio: float) -> str:
    """Return a ratio as a percentage."""
    return f"{ratio:.1%}"


def or_dash(value: Any, text: Any) -> str:
    """Return ``text(value)``, or a dash for ``None``."""
    return DASH if value is None else str(text(value))
