"""The example of overlap with the next forward, on emulated hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto import variable_names
from stretto.tune.forced import FORCED_FORWARD

EXAMPLE = Path(__file__).parents[2] / "examples" / "forward_overlap.py"
STEPS = 20
"""With the forced schedule a forward plan is in use from the fifth step on."""

pytestmark = [
    pytest.mark.lab,
    pytest.mark.dist,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("namespaces"),
]


def test_the_example_is_equal_bit_for_bit(lab):
    done = lab.run(
        *["--hosts", 2, "--link", "300mbit", "--timeout", 100],
        *["--", "python", EXAMPLE, STEPS],
        env={variable_names.TUNE_SCHEDULE: FORCED_FORWARD},
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "equal bit for bit" in done.stdout
