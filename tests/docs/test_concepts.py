"""The terms of docs/concepts.md: used ones are defined, and defined ones are used."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts.md"

NAMES = {
    "BucketSchedule": "schedule",
    "BurstPlan": "burst plan",
    "CachedPlan": "plan cache",
    "CalibratedModel": "calibration",
    "Claims": "claim",
    "ClusterKeeper": "keeper",
    "Collocation": "collocation",
    "DriftDetector": "drift",
    "Engine": "engine",
    "Gang": "gang",
    "InitialProfiler": "initial profile",
    "LayerProfile": "layer profile",
    "PlanCache": "plan cache",
    "RankKeeper": "keeper",
    "Slice": "slice",
    "StallDetector": "stall",
    "Supervisor": "supervisor",
    "Timeline": "timeline",
    "Trial": "trial",
    "TuningResult": "settled",
    "Window": "window",
    "Workload": "workload",
}
"""Classes, and the terms that explain them."""


def terms() -> list[str]:
    """Return the terms of all tables; a row may define several."""
    rows = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    return [word for row in rows if row != "word" for word in row.split(", ")]


def texts() -> str:
    """Return the other pages, and the package's prose and code."""
    paths = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    paths += (ROOT / "src").rglob("*.py")
    return "\n".join(path.read_text() for path in paths if path != PAGE)


@pytest.fixture(scope="module")
def used() -> str:
    return re.sub(r"[\s_]+", " ", texts()).lower()


@pytest.mark.parametrize("term", terms())
def test_a_defined_term_is_used_with_its_spelling(term: str, used: str) -> None:
    assert re.search(rf"\b{re.escape(term.lower())}(?:s|es)?\b", used)


def test_no_term_is_defined_twice() -> None:
    assert [term for term, count in Counter(terms()).items() if count > 1] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_class_s_term_is_defined(name: str) -> None:
    is_used = re.search(rf"^class {name}\b", texts(), flags=re.MULTILINE)
    assert is_used
    assert NAMES[name] in terms()


def test_the_text_of_each_row_ends_without_a_period() -> None:
    rows = re.findall(r"^\| [^|]+ \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert [row for row in rows if row.endswith(".")] == []
