"""What a program that sets up no logging sees of our log lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARN = "logging.getLogger('stretto.tune.auto').warning('a plan')"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "stretto: a plan\n"),
        ("logging.basicConfig(format='own %(message)s')", "own a plan\n"),
        (
            "logging.getLogger('stretto').addHandler(logging.NullHandler())",
            "",
        ),
    ],
)
def test_a_line_names_us_unless_the_program_formats_it(
    before: str, expected: str
) -> None:
    code = f"import logging, stretto\n{before}\n{WARN}"
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stderr == expected
