"""The search drawn: trials over steps, credits, the best, the bound; and its table."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from stretto.report import RunReport, render
from stretto.report.gather import gather
from stretto.report.tuning import decisions, trials_svg
from stretto.schema.tuning import Tuning, TuningEvent

SVG = "{http://www.w3.org/2000/svg}"


def event(step: int, what: str, why: str = "so", **values: Any) -> TuningEvent:
    return TuningEvent(step=step, what=what, why=why, values=values)


def tried(step: int, technique: str, step_s: float | None, **values: Any) -> Any:
    return event(
        step, "tried", f"trial at {step}", technique=technique, step_s=step_s, **values
    )


def story(*events: TuningEvent) -> Tuning:
    return Tuning(name="net", events=events)


ONE = story(
    event(0, "started", ranks=4, hosts=2),
    tried(10, "planner", 0.4, won=True, incumbent_s=0.4, credits={"a": 0.0, "b": 0.0}),
    tried(20, "a", 0.5, won=False, incumbent_s=0.4, credits={"a": 0.0, "b": 0.0}),
    tried(40, "b", 0.3, won=True, incumbent_s=0.3, credits={"a": 0.0, "b": 0.8}),
    event(40, "settled", step_s=0.3, bound_s=0.2),
)
AGAIN = story(
    *ONE.events,
    event(60, "changed", before_s=0.3, now_s=0.5),
    tried(70, "planner", 0.6, won=True, incumbent_s=0.6, credits={"a": 0.0, "b": 0.0}),
    tried(80, "a", 0.45, won=True, incumbent_s=0.45, credits={"a": 1.0, "b": 0.0}),
    event(80, "settled", step_s=0.45, bound_s=0.4),
)


def drawn(tuning: Tuning) -> ET.Element:
    return ET.fromstring(trials_svg(tuning))


def dots(drawing: ET.Element) -> list[ET.Element]:
    """Return the dots of trials; those of the key have no title."""
    found = drawing.iter(f"{SVG}circle")
    return [dot for dot in found if dot.find(f"{SVG}title") is not None]


def texts(drawing: ET.Element) -> list[str]:
    return ["".join(text.itertext()) for text in drawing.iter(f"{SVG}text")]


def numbers(path: ET.Element) -> list[float]:
    return [float(n) for n in re.findall(r"[\d.]+", path.attrib["d"])]


def lines(drawing: ET.Element, style: str) -> list[ET.Element]:
    return [e for e in drawing.iter() if style in e.attrib.get("class", "").split()]


def at(dot: ET.Element) -> tuple[float, float]:
    return float(dot.attrib["cx"]), float(dot.attrib["cy"])


def test_each_trial_is_drawn_at_its_step_and_its_time() -> None:
    (x1, y1), (x2, y2), (x3, y3) = map(at, dots(drawn(ONE)))
    # Steps 10, 20, 40 and 0.4, 0.5, 0.3 seconds; down is up in numbers.
    assert (x3 - x2) / (x2 - x1) == pytest.approx(2, rel=1e-3)
    assert (y1 - y2) == pytest.approx((y3 - y1), abs=0.02)
    assert y2 < y1 < y3
    titles = [dot.findtext(f"{SVG}title") for dot in dots(drawn(ONE))]
    assert titles[2] == "b, step 40: trial at 40"


def test_a_trial_that_won_is_larger_and_techniques_differ_in_color() -> None:
    planner, a, b = dots(drawn(ONE))
    assert planner.attrib["r"] == b.attrib["r"] > a.attrib["r"]
    assert len({dot.attrib["class"] for dot in (planner, a, b)}) == 3
    assert {"planner", "a", "b"} <= set(texts(drawn(ONE)))


def test_the_line_of_the_best_falls_where_a_trial_won() -> None:
    (best,) = lines(drawn(ONE), "whisker")
    assert re.fullmatch(r"M[\d. ]+H[\d.]+H[\d.]+V[\d.]+", best.attrib["d"])
    first, _, last = map(at, dots(drawn(ONE)))
    x1, y1, _, x3, y3 = numbers(best)
    assert (x1, y1) == pytest.approx(first, abs=0.1)
    assert (x3, y3) == pytest.approx(last, abs=0.1)
    assert "best 300 ms" in texts(drawn(ONE))


def test_the_bound_lies_below_every_trial_and_says_its_time() -> None:
    (bound,) = lines(drawn(ONE), "bound")
    assert float(bound.attrib["y1"]) > max(y for _, y in map(at, dots(drawn(ONE))))
    assert "bound 200 ms" in texts(drawn(ONE))
    without = story(*ONE.events[:-1])
    assert lines(drawn(without), "bound") == []
    assert len(dots(drawn(without))) == 3


def test_what_techniques_are_credited_with_is_drawn_below() -> None:
    drawing = drawn(ONE)
    assert "Credit of each technique" in texts(drawing)
    a, b = lines(drawing, "curve")
    lowest = max(y for _, y in map(at, dots(drawing)))
    for curve in (a, b):
        xs, ys = numbers(curve)[::2], numbers(curve)[1::2]
        assert xs == pytest.approx([x for x, _ in map(at, dots(drawing))], abs=0.1)
        assert min(ys) > lowest
    assert len(set(numbers(a)[1::2])) == 1
    assert numbers(b)[-1] < numbers(b)[1]
    assert {"a 0.00", "b 0.80"} <= set(texts(drawing))
    # The color is the one of the technique's dots.
    assert a.attrib["class"] == "curve c0"
    assert dots(drawing)[1].attrib["class"] == "n0"


def test_without_a_bandit_there_is_no_credit() -> None:
    plain = story(tried(10, "grid", 0.4, won=True, incumbent_s=0.4, credits={}))
    assert "Credit of each technique" not in texts(drawn(plain))
    full, less = drawn(ONE), drawn(plain)
    assert float(less.attrib["height"]) < float(full.attrib["height"])


def test_after_a_change_the_search_begins_again() -> None:
    drawing = drawn(AGAIN)
    assert "searching again" in texts(drawing)
    assert "searching again" not in texts(drawn(ONE))
    first, second = lines(drawing, "whisker")
    assert max(numbers(first)[0::2]) < numbers(second)[0]
    before, after = lines(drawing, "bound")
    assert float(before.attrib["x2"]) < float(after.attrib["x1"])
    assert float(before.attrib["y1"]) > float(after.attrib["y1"])
    # Labels are those of the search that counts now.
    assert {"bound 400 ms", "best 450 ms", "a 1.00"} <= set(texts(drawing))
    assert "bound 200 ms" not in texts(drawing)
    for curve in lines(drawing, "curve"):
        assert curve.attrib["d"].count("M") == 2


def test_a_plan_that_could_not_be_run_is_a_cross() -> None:
    failed = story(*ONE.events, tried(50, "a", None, won=False, incumbent_s=0.3))
    drawing = drawn(failed)
    crosses = [
        t for t in drawing.iter(f"{SVG}text") if t.find(f"{SVG}title") is not None
    ]
    (cross,) = crosses
    assert cross.findtext(f"{SVG}title") == "a, step 50: trial at 50"
    assert "× could not be run" in texts(drawing)
    assert "× could not be run" not in texts(drawn(ONE))
    assert len(dots(drawing)) == 3


def test_where_no_plan_could_be_run_there_are_crosses_alone() -> None:
    # The incumbent is then a plan that takes forever.
    lost = story(tried(1, "planner", None, won=False, incumbent_s=math.inf, credits={}))
    drawing = drawn(lost)
    assert dots(drawing) == []
    assert lines(drawing, "whisker") == []
    assert decisions(lost)[0][3] == "technique planner; incumbent inf"


def test_where_nothing_was_tried_nothing_is_drawn() -> None:
    assert trials_svg(story()) == ""
    assert trials_svg(story(event(0, "started"), event(9, "gave up"))) == ""
    page = render(RunReport(title="t", tuning=story(event(9, "gave up", "no <link>"))))
    assert 'id="tuning"' in page
    assert "no &lt;link&gt;" in page
    assert 'aria-label="Trials' not in page


def test_many_techniques_and_steps_stay_apart() -> None:
    many = story(
        *(tried(i, f"arm {i}", 0.1 + i / 100, incumbent_s=0.1) for i in range(14)),
        event(14, "settled", bound_s=0.1),
    )
    drawing = drawn(many)
    assert {f"arm {i}" for i in range(14)} <= set(texts(drawing))
    height = float(drawing.attrib["height"])
    assert all(float(t.attrib["y"]) < height for t in drawing.iter(f"{SVG}text"))
    # The best and the bound are one line; their labels do not lie on each other.
    ends = [t for t in drawing.iter(f"{SVG}text") if "100 ms" in (t.text or "")][-2:]
    assert [t.text for t in ends] == ["best 100 ms", "bound 100 ms"]
    assert float(ends[1].attrib["y"]) - float(ends[0].attrib["y"]) >= 16


def test_a_file_with_odd_figures_is_shown_as_far_as_it_goes(tmp_path) -> None:
    odd = story(
        event(0, "profiled", link_bytes_per_s="fast", forward_s=None),
        event(5, "tried", technique="a", step_s="slow", credits=[1]),
        event(6, "tried", step_s=0.4, won="yes", incumbent_s=True, credits={"a": "x"}),
        event(7, "settled", bound_s={"a": 0.1}, credits={"a": "x", "b": 0.5}),
    )
    odd.save(tmp_path / "tuning.json")
    report = gather([tmp_path / "tuning.json"])
    assert report.tuning == odd
    page = render(report)
    assert "link bytes per s fast" in page
    assert len(dots(drawn(odd))) == 1
    assert {"unknown", "a"} <= set(texts(drawn(odd)))


def test_the_table_has_every_decision_with_its_figures_in_units() -> None:
    rows = decisions(
        story(
            event(
                7,
                "profiled",
                "a look",
                forward_s=0.03,
                flow_bytes_per_s=3.75e7,
                plan="sha256:1",
                won=True,
                nothing=None,
            ),
            event(8, "corrected", error_ratio=-0.083, backward=1.02),
            event(9, "tried", technique="a", steps=12, credits={"a": 0.5, "b": 0}),
            event(9, "tried", credits={}),
        )
    )
    assert rows == [
        ("7", "profiled", "a look", "forward 30.0 ms; flow 300 Mbit/s"),
        ("8", "corrected", "so", "error -8.3 %; backward 1.02"),
        ("9", "tried", "so", "technique a; steps 12; credits: a 0.50, b 0.00"),
        ("9", "tried", "so", ""),
    ]


def test_the_page_has_drawing_and_table_and_escapes_names() -> None:
    sharp = Tuning(
        name="<net>", events=(tried(3, "<a>", 0.1, credits={"<a>": 1.0}), *ONE.events)
    )
    page = render(RunReport(title="t", tuning=sharp))
    assert 'id="tuning"' in page
    assert "<net>" not in page
    assert "<a>" not in page
    assert "&lt;a&gt;" in page
    assert page.count("trial at 40") == 2
    ET.fromstring(trials_svg(sharp))
