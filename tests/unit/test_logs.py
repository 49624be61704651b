"""What a program that sets up no logging sees of our log lines."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stretto.logs

WARN = "logging.getLogger('stretto.tune.controller').warning('a plan')"


def shown(before: str, line: str) -> str:
    """What a program that runs two lines after its imports writes to stderr."""
    found = subprocess.run(
        [sys.executable, "-c", f"import logging, stretto.logs\n{before}\n{line}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return found.stderr


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
    assert shown(before, WARN) == expected


RESULT = (
    "from stretto.logs import get_logger; get_logger('stretto.tune').show('a plan')"
)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "stretto: a plan\n"),
        ("logging.basicConfig()", ""),
        (
            "logging.basicConfig(level=logging.INFO, format='own %(message)s')",
            "own a plan\n",
        ),
    ],
)
def test_a_result_is_shown_unless_the_program_wants_warnings_alone(
    before: str, expected: str
) -> None:
    assert shown(before, RESULT) == expected


RAISES = """
def record(*args, **kwargs):
    raise LookupError("request_id")
logging.setLogRecordFactory(record)
"""


def test_a_program_s_logging_that_raises_ends_no_training() -> None:
    warning = RESULT.replace("show('a plan')", "warning('a %s', 'plan')")
    expected = "stretto: a plan (logging raised LookupError('request_id'))\n"
    assert shown(RAISES, warning) == expected
    assert shown(RAISES, RESULT) == expected


def test_no_message_repeats_the_name_that_the_handler_adds():
    package = Path(stretto.logs.__file__).parent
    repeated = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith("_log.")
        and node.args
        and ast.unparse(node.args[0]).lstrip("f'\"").startswith("stretto:")
    ]
    assert repeated == []
