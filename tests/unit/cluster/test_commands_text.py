"""How commands of a cluster print what a job file may hold."""

from __future__ import annotations

import json

import pytest

from stretto.cli._cluster_jobs import _command_text
from stretto.cli._cluster_options import json_text


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["train.py", "--name", "two words"], "train.py --name 'two words'"),
        (["echo", "a\nb\x1b[31m"], "echo 'a\\nb\\x1b[31m'"),
        (["echo", "\u00fc\u202e"], "echo '\u00fc\\u202e'"),
        (["echo", ""], "echo ''"),
    ],
)
def test_a_command_is_one_line_of_words_that_a_terminal_only_prints(command, text):
    assert _command_text(command) == text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("/data/\udcff", "/data/\ufffd"),
        ("\U0001f600", "\U0001f600"),
        ("C:\\ud800", "C:\\ud800"),
    ],
)
def test_json_has_no_lone_surrogate(text, printed):
    assert json.loads(json_text({"file": text})) == {"file": printed}
