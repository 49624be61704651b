"""PyTorch's own tests of DDP, as `make conformance` runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PARTS = 6
MIN_PASSED = 60 // PARTS
FORMS = ("auto", "forced")
"""Without a plan, with one of three lanes, and overlapping with forward, given or
chosen, only if all is tested."""

if "STRETTO_TEST_ALL" in os.environ:
    FORMS = ("ours", "planned", "forward", "chosen", *FORMS)


def passed(found: dict[str, dict[str, list[str]]], form: str) -> set[str]:
    return {name for name, row in found.items() if row[form][0] == "passed"}


@pytest.mark.turns(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_passes_with_ddp_passes_with_ours(part: int, tmp_path: Path) -> None:
    """All but what ``known.json`` gives a reason for, which the command checks."""
    options = ["--part", f"{part}/{PARTS}"]
    options += [word for name in ("ddp", *FORMS) for word in ("--form", name)]
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(HERE), "--json", str(out), *options],
        capture_output=True,
        text=True,
        timeout=1750,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    known = json.loads((HERE / "known.json").read_text())["fails"]
    with_ddp = passed(found, "ddp")
    assert len(with_ddp) >= MIN_PASSED
    for form in FORMS:
        assert with_ddp - passed(found, form) <= set(known.get(form, {})), form
