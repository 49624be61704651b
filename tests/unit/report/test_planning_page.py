"""The sections of a page on plans: ranks, gaps, contributions."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from stretto.report import MethodResult, RunReport, ScaledStep, page
from stretto.report.bars import axis_begin_s, contributions_svg, gaps_svg
from stretto.report.curves import Chart, charts_svg

SVG = "{http://www.w3.org/2000/svg}"
ROWS = (("fusion", 0.308), ("lanes", 0.28), ("slices", 0.28), ("forward", 0.25))


def a_method(name: str, step_s: float) -> MethodResult:
    return MethodResult(
        name=name,
        predicted_step_s=step_s,
        measured_step_s=None,
        spread_s=None,
        speedup_over_ddp=None,
        bound_share=None,
        final_loss=None,
    )


def scaled(method: str, ranks: int, step_s: float) -> ScaledStep:
    return ScaledStep(
        method=method, ranks=ranks, step_s=step_s, bound_s=0.2, efficiency_ratio=0.5
    )


def a_report() -> RunReport:
    return RunReport(
        title="a model on a cluster",
        methods=(a_method("ddp", 0.3), a_method("joint <x>", 0.21)),
        bound_s=0.2,
        bound_scope="rings & trees",
        gaps={"ddp": 0.5, "joint <x>": 0.05},
        scaling=(
            scaled("ddp", 2048, 0.6),
            scaled("ddp", 16, 0.3),
            scaled("joint <x>", 16, 0.21),
            scaled("joint <x>", 2048, 0.23),
        ),
        contributions=ROWS,
    )


def section(html: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', html, re.S)
    assert found is not None
    return found.group()


def drawing(html: str) -> ET.Element:
    found = re.search(r"<svg .*</svg>", html, re.S)
    assert found is not None
    return ET.fromstring(found.group())  # refuses what is not well formed


def texts(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def bars(root: ET.Element) -> list[tuple[float, float]]:
    """Left and right ends of the bars, from above."""
    rects = root.iter(f"{SVG}rect")
    return [
        (float(r.get("x", 0)), float(r.get("x", 0)) + float(r.get("width", 0)))
        for r in rects
    ]


def test_sections_hold_every_value_and_fetch_nothing() -> None:
    html = page.render(a_report())
    chart = section(html, "scaling")
    shown = texts(drawing(chart))
    assert {"16", "2048", "ranks", "Step time", "ddp 600 ms"} <= set(shown)
    assert {"joint <x> 230 ms", "joint <x> 15.0%"} <= set(shown)
    assert "<td>ddp</td><td>300 ms (50%)</td><td>600 ms (50%)</td>" in chart
    assert {"ddp", "50.0%", "5.0%"} <= set(texts(drawing(section(html, "gaps"))))
    steps = texts(drawing(section(html, "contributions")))
    assert {"fusion", "+ lanes", "+ forward", "all", "308 ms", "250 ms"} <= set(steps)
    assert {"−9.1%", "nothing", "−10.7%"} <= set(steps)
    assert "joint &lt;x&gt; is predicted to be the fastest of 2 methods" in html
    assert "No plan with rings &amp; trees can be left of the dashed line" in html
    plain = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|@import|url\(|fetch\(|\bsrc=|href=", plain)


def test_many_numbers_of_ranks_are_the_rows_of_the_table() -> None:
    rows = tuple(scaled("ddp", n, n / 100) for n in (4, 2, 8))
    chart = section(page.render(RunReport(title="t", scaling=rows)), "scaling")
    assert "<th>ranks</th><th>ddp</th>" in chart
    assert re.findall(r"<tr><td>(\d+)</td>", chart) == ["2", "4", "8"]


def test_sections_without_figures_are_left_out() -> None:
    html = page.render(RunReport(title="t", methods=(a_method("ddp", 0.3),)))
    assert not re.search('id="(scaling|gaps|contributions)"', html)


def test_the_gaps_are_to_scale_and_the_least_is_marked() -> None:
    root = drawing(gaps_svg({"a": 0.4, "b": 0.2, "c": -1e-12}))
    lengths = [right - left for left, right in bars(root)]
    assert lengths[0] == pytest.approx(2 * lengths[1], abs=0.02)
    assert lengths[2] == 1.5
    marked = [r.get("class") for r in root.iter(f"{SVG}rect")]
    assert marked == ["bar", "bar", "bar best"]
    assert "0.0%" in texts(root)


@pytest.mark.parametrize("low_s", [0.25, 0.01])
def test_the_staircase_descends_to_scale(low_s: float) -> None:
    rows = [*ROWS[:-1], ("forward", low_s)]
    ends = bars(drawing(contributions_svg(rows)))
    origin = ends[0][0]
    begin_s = axis_begin_s(rows)
    assert begin_s <= low_s
    assert (begin_s == 0) == (low_s == 0.01)
    unit = (ends[0][1] - origin) / (0.308 - begin_s)
    assert ends[-1] == pytest.approx((origin, origin + unit * (low_s - begin_s)), 1e-3)
    middle = ends[1:-1]
    for (_, step_s), (left, right), (_, before_s) in zip(
        rows[1:], middle, rows, strict=False
    ):
        assert left == pytest.approx(origin + unit * (step_s - begin_s), abs=0.02)
        length = max(unit * (before_s - step_s), 1.5)
        assert right - left == pytest.approx(length, abs=0.03)


def test_a_chart_has_a_logarithmic_axis_and_labels_apart() -> None:
    ranks = (16, 17, 64, 256)
    columns = {f"method {i}": [1.0, math.nan, 2.0, 3.0 + i / 1e3] for i in range(8)}
    chart = Chart(title="t", axis="ranks", unit="ms", x=ranks, columns=columns)
    root = drawing(charts_svg([chart], "label", standalone=False))
    assert root.find(f"{SVG}style") is None
    at = {t.text: float(t.get("x", 0)) for t in root.iter(f"{SVG}text")}
    assert at["256"] - at["64"] == pytest.approx(
        (at["256"] - at["17"]) * 2 / math.log2(256 / 17), abs=0.1
    )
    assert "16" not in at  # it would overlap the 17
    names = [t for t in root.iter(f"{SVG}text") if "method" in (t.text or "")]
    heights = sorted(float(t.get("y", 0)) for t in names)
    assert len(heights) == 8
    assert all(b - a >= 15.9 for a, b in pairwise(heights))
    assert drawing(charts_svg([chart], "label")).find(f"{SVG}style") is not None


def test_labels_that_are_not_crowded_are_at_their_curves_ends() -> None:
    columns = {"top": [1.0, 50.0], "a": [1.0, 1.01], "b": [1.0, 1.0]}
    chart = Chart(title="t", axis="", unit="s", x=(2, 4), columns=columns)
    for wide in (False, True):
        root = drawing(charts_svg([replace(chart, wide=wide)], "l", standalone=False))
        at = {t.text: float(t.get("y", 0)) for t in root.iter(f"{SVG}text")}
        ends = [float(c.get("cy", 0)) for c in root.iter(f"{SVG}circle")][1::2]
        assert at["top"] == pytest.approx(ends[0] + 4, abs=0.02)
        assert at["b"] - at["a"] == pytest.approx(16, abs=0.02)
        assert at["b"] <= at["2"] - 13
        assert ("5 s" in at) == wide


def test_a_wide_chart_has_decades_as_its_axis() -> None:
    columns = {"a": [1.0, 100.0]}
    chart = Chart(title="", axis="", unit="s", x=(2, 4), columns=columns, wide=True)
    root = drawing(charts_svg([chart], "l", standalone=False))
    at = {t.text: float(t.get("y", 0)) for t in root.iter(f"{SVG}text")}
    assert at["1 s"] - at["10 s"] == pytest.approx(at["10 s"] - at["100 s"], abs=0.02)


def test_one_number_of_ranks_and_perfect_plans_can_be_drawn() -> None:
    report = RunReport(
        title="t",
        methods=(a_method("joint", 0.2),),
        gaps={"joint": 0.0},
        scaling=(scaled("joint", 8, 0.2),),
        contributions=(("fusion", 0.2), ("lanes", 0.2)),
    )
    html = page.render(report)
    for name in ("scaling", "gaps", "contributions"):
        drawing(section(html, name))
    assert "nan" not in html
