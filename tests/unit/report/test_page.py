from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from stretto import report as reporting
from stretto.report import RunReport, page, svg
from stretto.schema import Timeline

VOID = {"meta", "br", "link", "img", "input"}


class Checker(HTMLParser):
    """Follows open elements and collects text and what would be fetched."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.unbalanced = []
        self.fetched = []
        self.text = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.fetched.append(value)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def read(html):
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.unbalanced == []
    assert checker.open == []
    return checker


def text_of(html):
    return " ".join(read(html).text)


def drawings(html):
    """Every drawing, parsed as XML, which refuses what is not well formed."""
    found = re.findall(r'<svg [^>]*class="drawing".*?</svg>(?=</figure>)', html, re.S)
    return [ET.fromstring(text) for text in found]


def texts(element):
    return [node.text for node in element.iter() if node.tag.endswith("text")]


def test_the_page_fetches_nothing(report):
    html = page.render(report)
    assert read(html).fetched == []
    without_namespace = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(", without_namespace)


def test_the_page_says_what_was_fastest_by_how_much_and_how_well_predicted(report):
    text = text_of(page.render(report))
    assert "stretto is the fastest of 3 methods" in text
    assert "400 ms" in text
    assert "2.00 times as fast" in text  # than ddp, the next best
    assert "2.00×" in text  # over ddp
    assert "1.14×" in text  # the lower bound
    assert "2.4%" in text  # mean error


def test_a_lead_within_the_spread_is_not_sold_as_one(report):
    single, ddp, ours = report.methods
    close = dataclasses.replace(ours, measured_step_s=0.79)
    html = page.render(dataclasses.replace(report, methods=(single, ddp, close)))
    assert "within the spread" in text_of(html)
    assert "within the spread" not in text_of(page.render(report))


def test_what_comes_from_files_is_escaped(report):
    html = page.render(
        dataclasses.replace(report, title="<script>alert(1)</script> & more")
    )
    assert "<script>alert" not in html
    assert "toy &amp; net" in html
    assert "bucket &lt;1&gt;" in html
    assert "share &lt;two&gt; cores" in html


def test_the_same_report_gives_the_same_page(report):
    assert page.render(report) == page.render(report)


def test_every_method_has_predicted_and_measured_drawn(report):
    html = page.render(report)
    shown = [texts(d) for d in drawings(html)]
    timelines = [t for t in shown if "compute" in t]
    assert len(timelines) == 3
    for words in timelines:
        assert words.count("compute") == 2
        assert {"predicted", "measured", "lane0", "lane1"} <= set(words)


def test_timelines_drawn_together_have_one_scale(report):
    ends = []
    for m in report.methods:
        drawn = ET.fromstring(
            svg.timeline_svg(m.name, m.predicted, m.measured, shared_end_s=1.0)
        )
        ends += [
            float(node.get("x1").rstrip("%"))
            for node in drawn.iter()
            if node.get("class") in ("end predicted", "end measured")
        ]
    want = [0.88, 0.9, 0.82, 0.8, 0.39, 0.4]
    assert [end / 100 * 1.01 for end in ends] == pytest.approx(want, rel=1e-3)


def test_nothing_is_drawn_outside_the_time_axis(report):
    for m in report.methods:
        drawn = ET.fromstring(
            svg.timeline_svg(m.name, m.predicted, m.measured, shared_end_s=0.0)
        )
        for node in drawn.iter():
            if (node.get("class") or "").startswith("span"):
                start = float(node.get("x").rstrip("%"))
                width = float(node.get("width").rstrip("%"))
                assert 0 <= start <= start + width <= 100.1


def test_spans_describe_themselves_when_pointed_at(report):
    html = page.render(report)
    assert re.search(
        r"<title>bucket 0\n200 ms to 400 ms: 200 ms\n[^<]*bytes: 4096", html
    )


def test_losses_that_agree_are_one_curve_and_others_are_named(report):
    html = page.render(report)
    assert "all 3 methods" in text_of(html)
    single, ddp, ours = report.methods
    apart = dataclasses.replace(ours, losses=(2.0, 1.5, 0.9))
    html = page.render(dataclasses.replace(report, methods=(single, ddp, apart)))
    curves = [t for t in map(texts, drawings(html)) if "single, ddp" in t]
    assert len(curves) == 1
    assert "stretto" in curves[0]
    assert "all 3 methods" not in text_of(html)


def test_methods_that_made_fewer_steps_share_the_curve_as_far_as_they_went(report):
    single, ddp, ours = report.methods
    shorter = dataclasses.replace(ddp, losses=ddp.losses[:2])
    groups = svg.loss_groups([shorter, single, ours])
    assert groups == [(["single", "stretto", "ddp"], single.losses)]


def test_losses_that_are_no_numbers_do_not_break_the_drawing(report):
    nan = float("nan")
    broken = dataclasses.replace(report.methods[0], losses=(2.0, nan, 1.0))
    lost = dataclasses.replace(report.methods[1], losses=(nan, nan))
    drawn = ET.fromstring(svg.loss_svg([broken, lost, report.methods[2]]))
    assert not [n for n in drawn.iter() if "nan" in " ".join(n.attrib.values()).lower()]


@pytest.mark.parametrize(
    "lacking",
    [
        {"cluster": None},
        {"workload": None},
        {"bound_s": None},
        {"methods": ()},
        {"environment": {}, "notes": ()},
        {"cluster": None, "workload": None, "methods": (), "bound_s": None},
    ],
    ids=lambda lacking: "-".join(lacking),
)
def test_what_is_absent_is_left_out(report, lacking):
    html = page.render(dataclasses.replace(report, **lacking))
    text = text_of(html)
    assert "None" not in text
    assert "nan" not in text


def test_a_page_of_predictions_alone_claims_no_measurement(report):
    methods = tuple(
        dataclasses.replace(
            m,
            measured_step_s=None,
            spread_s=None,
            speedup_over_ddp=None,
            bound_share=None,
            final_loss=None,
            losses=(),
            measured=None,
        )
        for m in report.methods
    )
    html = page.render(dataclasses.replace(report, methods=methods, notes=()))
    text = text_of(html)
    assert "fastest" not in text
    assert "measured" not in text
    assert "390 ms predicted" in text


def test_an_empty_timeline_can_be_drawn():
    empty = Timeline(name="empty", spans=())
    ET.fromstring(svg.timeline_svg("x", empty, empty, shared_end_s=0.0))


@pytest.mark.parametrize("names", [("a",), ("a name that is rather long", "b")])
def test_the_step_time_drawing_is_a_file_of_its_own(report, names):
    methods = tuple(
        dataclasses.replace(m, name=n)
        for m, n in zip(report.methods, names, strict=False)
    )
    text = reporting.step_time_svg(
        dataclasses.replace(report, methods=methods), standalone=True
    )
    drawn = ET.fromstring(text)
    assert set(names) <= set(texts(drawn))
    styles = "".join(n.text or "" for n in drawn.iter() if n.tag.endswith("style"))
    for color in re.findall(r"var\((--[\w-]+)\)", styles):
        assert f"{color}:" in styles
    assert "prefers-color-scheme:dark" in styles
    width = float(drawn.get("viewBox").split()[2])
    for node in drawn.iter():
        if node.tag.endswith("rect") and not node.get("width").endswith("%"):
            assert float(node.get("x")) + float(node.get("width")) <= width


def test_every_color_that_is_used_is_defined(report):
    html = page.render(report)
    style = re.search(r"<style>(.*?)</style>", html, re.S)[1]
    used = set(re.findall(r"var\((--[\w-]+)\)", style))
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")
    for color in used - {"--font"}:
        assert f"{color}:" in light
        assert f"{color}:" in dark


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(colors):
    for ink in ("ink", "soft", "best", "bound", "mark"):
        assert contrast(colors[ink], colors["paper"]) >= 4.5, ink
    for kind in ("forward", "backward", "send", "wait", "other"):
        assert contrast(colors[f"on-{kind}"], colors[kind]) >= 4.5, kind


@pytest.mark.parametrize("end", [1e-7, 0.003, 0.99, 1.0, 7.0, 59.9, 1234.0])
@pytest.mark.parametrize("most", [4, 8])
def test_ticks_are_few_even_and_within(end, most):
    marks = svg.ticks(end, most)
    assert marks[0] == 0
    assert marks[-1] <= end * (1 + 1e-9)
    assert most / 3 <= len(marks) <= most + 1
    steps = {round((b - a) / end, 9) for a, b in pairwise(marks)}
    assert len(steps) == 1


def test_labels_are_moved_apart():
    wanted = [10.0, 11.0, 50.0, 10.5]
    placed = svg.spread_apart(wanted, 16)
    order = sorted(range(4), key=lambda i: wanted[i])
    gaps = [placed[b] - placed[a] for a, b in pairwise(order)]
    assert min(gaps) >= 16 - 1e-9


def test_an_empty_report_is_a_page():
    assert "nothing here" in text_of(page.render(RunReport(title="nothing here")))
