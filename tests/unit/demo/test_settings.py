from __future__ import annotations

import pytest
from click.testing import CliRunner

from stretto.cli.demo import command


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--width", "-3"), "'--width': -3 is not in the range"),
        (("--width", "0"), "'--width': 0 is not in the range"),
        (("--model", "transformer", "--width", "7"), "7 is not a multiple of 5"),
        (("--steps", "0"), "'--steps': 0 is not in the range"),
        (("--batch", "0"), "'--batch': 0 is not in the range"),
        (("--seed", "-1"), "'--seed':"),
        (("--seed", "9" * 30), "'--seed':"),
    ],
)
def test_a_number_that_no_training_can_use_is_refused_first(options, reason, tmp_path):
    """It ended all ranks of the lab with a traceback, or counted as not given."""
    done = CliRunner().invoke(command, [*options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert reason in done.output
    assert not (tmp_path / "out").exists()
