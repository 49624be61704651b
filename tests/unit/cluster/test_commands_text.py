"""How commands of a cluster print what a job file may hold."""

from __future__ import annotations

import pytest

from stretto.cli._cluster_jobs import _command_text


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
