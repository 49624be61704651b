from __future__ import annotations

import pytest
from click.testing import CliRunner

from stretto.cli.demo import command
from stretto.errors import SpecError


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--width", "-3"), "width must be >= 1, got -3"),
        (("--width", "0"), "width must be >= 1, got 0"),
        (("--model", "transformer", "--width", "7"), "a multiple of 5, got 7"),
        (("--steps", "0"), "steps must be >= 6"),
        (("--batch", "0"), "batch_per_rank must be >= 1, got 0"),
        (("--seed", "-1"), "seed must be 0 to"),
        (("--seed", "9" * 30), "seed must be 0 to"),
    ],
)
def test_a_number_that_no_training_can_use_is_refused_first(options, reason, tmp_path):
    """It ended all ranks of the lab with a traceback, or counted as not given."""
    done = CliRunner().invoke(command, [*options, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, SpecError), done.exception
    assert reason in str(done.exception)
    assert not (tmp_path / "out").exists()
