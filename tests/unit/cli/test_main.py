"""The group of commands: what becomes of output that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")

COMMANDS = (
    ["--help"],
    ["--version"],
    ["cluster", "start", "--help"],
    ["zoo", "--help"],
    ["zoo", "list"],
    ["doctor", "--help"],
)


def run(words: list[str], output: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto", *words],
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_output_on_a_full_disk_ends_with_one_line(words: list[str]) -> None:
    with FULL.open("w") as full:
        found = run(words, full)
    why = "the output cannot be written: No space left on device"
    assert (found.returncode, found.stderr) == (1, f"stretto: error: {why}\n")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_output_into_a_closed_pipe_ends_silently(words: list[str]) -> None:
    reader = subprocess.Popen(["/bin/true"], stdin=subprocess.PIPE)
    reader.wait()
    assert reader.stdin is not None
    assert run(words, reader.stdin).stderr == ""
    reader.stdin.close()
