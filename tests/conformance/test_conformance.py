"""PyTorch's own tests of DDP, as `make conformance` runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
LEAST_PASSED = 45
FORMS = ("ddp", "ours", "planned")


def test_what_passes_with_ddp_passes_with_ours(tmp_path: Path) -> None:
    # The forms "auto" and "forced" take half an hour: `make conformance` runs all.
    forms = [word for name in FORMS for word in ("--form", name)]
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(HERE), "--json", str(out), *forms],
        capture_output=True,
        text=True,
        timeout=1750,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    passed = {
        form: {name for name, row in found.items() if row[form][0] == "passed"}
        for form in FORMS
    }
    assert len(passed["ddp"]) >= LEAST_PASSED
    assert passed["ours"] == passed["ddp"]
    assert len(passed["ddp"] - passed["planned"]) <= 1
