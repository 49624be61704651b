"""Starts Gloo ranks as processes on loopback and gathers what they return.

A test passes a function of its own module; every rank loads that file anew, joins a
process group and calls it. Importing torch costs a second or two per process, so a
test groups several checks in one start.
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
    others = [out[: -len("0")] + str(r) for r in range(1, size)]
    deadline = time.perf_counter() + 2.0
    while not all(map(os.path.exists, others)) and time.perf_counter() < deadline:
        time.sleep(0.005)
sys.stdout.flush(); sys.stderr.flush()
# Not by the interpreter's own end: a peer may have died on purpose.
os._exit(0)
"""


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
            deadline = time.perf_counter() + timeout_s
            try:
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
