"""What SIGTERM does to a process that trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from stretto.elastic.draining import Drain
drain = Drain()
assert drain.listen()
{}
"""


def run(code: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code)], check=False, timeout=100
    )
    return ended.returncode


WAIT = "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 22)"
TERM = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (f"{TERM}; {TERM}; sys.exit(7 if drain.is_wanted else 1)", 7),
        (f"{TERM}; drain._asked_s -= 2.0; {TERM}; sys.exit(1)", -15),
        (f"del drain; {TERM}; sys.exit(1)", -15),
        (
            f"child = os.fork()\nif not child: {TERM}; os._exit(1)\n{WAIT}",
            7,
        ),
    ],
    ids=["once", "again later", "training has ended", "a forked process"],
)
def test_sigterm(code: str, status: int) -> None:
    assert run(code) == status


def test_the_program_s_own_handler_stays() -> None:
    code = (
        "import sys, signal; from stretto.elastic.draining import Drain; "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
        "assert not Drain().listen(); signal.raise_signal(signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
