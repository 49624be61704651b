"""Starts Gloo ranks as processes on loopback and gathers what they return.

A test passes a function of its own module; every rank loads that file anew, joins a
process group and calls it. Importing torch costs a second or two per process, so a
test groups several checks in one start. Time-outs count from when all have started.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from stretto.lab.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_RANK = """
import importlib.util, os, pickle, sys, time, traceback
path, name, out, arguments, group_s = sys.argv[1:6]
import torch
import torch.distributed as dist
from datetime import timedelta
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Importing torch may take a minute where much else runs: not within a time-out.
outs = [out[: -len(str(rank))] + str(r) for r in range(size)]
open(out + ".ready", "w").close()
while not all(os.path.exists(other + ".ready") for other in outs):
    time.sleep(0.02)
dist.init_process_group("gloo", timeout=timedelta(seconds=float(group_s)))
spec = importlib.util.spec_from_file_location("ranks_of_a_test", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
try:
    more = pickle.loads(bytes.fromhex(arguments))
    found = ("value", getattr(module, name)(rank, size, *more))
except Exception as exc:
    found = ("error", (type(exc).__name__, str(exc), traceback.format_exc()))
with open(out + ".part", "wb") as file:
    pickle.dump(found, file)
os.rename(out + ".part", out)
# Rank 0 holds the store: others may still read in it.
if rank == 0:
    deadline = time.perf_counter() + 2.0
    while not all(map(os.path.exists, outs)) and time.perf_counter() < deadline:
        time.sleep(0.005)
sys.stdout.flush(); sys.stderr.flush()
# Not by the interpreter's own end: a peer may have died on purpose.
os._exit(0)
"""


START_S = 300.0
"""Ranks have all started within this, however busy the machine is."""

BUSY = 2.0
"""A test's own time-outs are for a quiet machine; they only bound hangs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of ranks the time to start besides their own time-outs."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        if mark is not None and mark.args and "ranks" in getattr(item, "fixturenames", ()):
            longer = pytest.mark.timeout(BUSY * mark.args[0] + START_S)
            item.add_marker(longer, append=False)


@dataclass
class RankError:
    """The exception a rank ended with."""

    kind: str
    message: str
    traceback: str


class Ranks:
    """Runs a function on several ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0

    def __call__(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        timeout_s: float = 60.0,
        group_s: float = 30.0,
        errors: bool = False,
    ) -> list[Any]:
        """What every rank returned, by rank.

        With ``errors`` a rank's exception is a `RankError` in the list, and a rank
        that left nothing is ``None``; without, either fails the test.
        """
        self._runs += 1
        outs = [self._folder / f"{self._runs}-{rank}" for rank in range(size)]
        logs = [out.with_suffix(".log") for out in outs]
        port = free_port()
        processes = []
        with contextlib.ExitStack() as stack:
            for rank in range(size):
                log = stack.enter_context(logs[rank].open("wb"))
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                }
                command = [
                    sys.executable,
                    "-c",
                    _RANK,
                    function.__code__.co_filename,
                    function.__name__,
                    str(outs[rank]),
                    pickle.dumps(arguments).hex(),
                    str(group_s),
                ]
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )
            try:
                _wait_until_ready(processes, outs)
                deadline = time.perf_counter() + BUSY * timeout_s
                for process in processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.1, deadline - time.perf_counter()))
            finally:
                late = [r for r, p in enumerate(processes) if p.poll() is None]
                for process in processes:
                    if process.poll() is None:
                        process.kill()
                    process.wait()
        text = "\n".join(
            f"--- rank {rank}\n{log.read_text(errors='replace')[-3000:]}"
            for rank, log in enumerate(logs)
        )
        if late:
            pytest.fail(f"ranks {late} did not end within {timeout_s} s\n{text}")
        return [_result(out, rank, text, errors) for rank, out in enumerate(outs)]


def _wait_until_ready(processes: list[Any], outs: list[Path]) -> None:
    deadline = time.perf_counter() + START_S
    while not all(out.with_suffix(".ready").exists() for out in outs):
        if any(p.poll() is not None for p in processes):
            return  # what ended it is in its log
        if time.perf_counter() > deadline:
            return
        time.sleep(0.02)


def _result(out: Path, rank: int, text: str, errors: bool) -> Any:
    if not out.exists():
        if errors:
            return None
        pytest.fail(f"rank {rank} left no result\n{text}")
    kind, value = pickle.loads(out.read_bytes())
    if kind == "value":
        return value
    if errors:
        return RankError(*value)
    pytest.fail(f"rank {rank} raised\n{value[2]}\n{text}")


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)
