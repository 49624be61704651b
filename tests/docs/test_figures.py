"""Stored figures can be read, and docs/figures.md says which version measured them."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


def no_constant(name):
    raise ValueError(f"{name} is not JSON")


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_are_valid_json(file):
    json.loads(file.read_text(), parse_constant=no_constant)


def test_figures_of_version_0_1_0_are_marked():
    text = (ROOT / "docs/figures.md").read_text()
    rows = re.findall(r"`(\w+\.json)`( \(0\.1\.0\))? \|$", text, flags=re.M)
    assert len(rows) > 50
    wrong = set()
    for name, mark in rows:
        stored = json.loads((ROOT / "benchmarks/results" / name).read_text())
        version = stored.get("machine", stored).get("stretto", stored.get("made_by"))
        if bool(mark) != (version == "0.1.0"):
            wrong.add((name, version))
    assert wrong == set()
