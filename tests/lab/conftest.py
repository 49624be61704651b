from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
STRETTO = [sys.executable, "-m", "stretto"]


def outside_state():
    """What a lab could leave on the machine, other than processes and files."""
    return {
        "links": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "named namespaces": sorted(Path("/run/netns").glob("*")),
        "pinned namespaces": sorted(
            line.split()[4]
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if " - nsfs " in line
        ),
        "qdiscs": subprocess.run(
            [shutil.which("tc", path="/usr/sbin:/sbin") or "true", "qdisc", "show"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout,
    }


def _hears_interrupts():
    """Let Ctrl-C reach it also where the tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Lab:
    """Runs `stretto lab run` as a person would, and looks for what it left."""

    def __init__(self, folder):
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.env = os.environ | {
            "STRETTO_TEST_MARK": self.mark,
            "TMPDIR": str(self.temporary),
            # DDP's constructor loads PyTorch's compiler, which makes this folder.
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiler"),
        }
        self.before = outside_state()

    def start(self, *arguments, prefix=(), **options):
        return subprocess.Popen(
            [*prefix, *STRETTO, "lab", "run", *map(str, arguments)],
            env=self.env | options.pop("env", {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hears_interrupts,
            **options,
        )

    def run(self, *arguments, timeout=60, **options):
        with self.start(*arguments, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def processes(self):
        """Process numbers and commands of everything this lab has alive."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"STRETTO_TEST_MARK={self.mark}".encode() in (
                    folder / "environ"
                ).read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes()
                    found[int(folder.name)] = command.decode().split("\0")
            except OSError:
                continue
        return found

    def wait_for(self, condition, seconds=20.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.05)
        return False

    def assert_nothing_left(self):
        assert self.wait_for(lambda: not self.processes(), 5.0), self.processes()
        assert list(self.temporary.iterdir()) == []
        assert outside_state() == self.before


@pytest.fixture
def lab(tmp_path):
    made = Lab(tmp_path)
    yield made
    made.assert_nothing_left()


@pytest.fixture(scope="session")
def namespaces():
    """Skips where no network namespaces can be had, and says why."""
    with tempfile.TemporaryFile("w+") as said:
        status = subprocess.run(
            [
                *STRETTO,
                "lab",
                "run",
                "--mode",
                "namespaces",
                "--hosts",
                "1",
                "--",
                "true",
            ],
            stderr=said,
            check=False,
            timeout=60,
        ).returncode
        said.seek(0)
        if status != 0:
            pytest.skip(said.read().strip())


@pytest.fixture
def programs():
    return PROGRAMS
