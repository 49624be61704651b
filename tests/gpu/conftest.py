"""Several ranks on one GPU with real NCCL.

NCCL refuses two ranks of one host on one device. A host id of its own per rank
(``NCCL_HOSTID``) makes them hosts that reach each other by sockets, which serves for
correctness in every version; ranks' processes take turns on the device, so times say
nothing. NCCL 2.30 and newer have ``NCCL_MULTI_RANK_GPU_ENABLE`` too. A rank whose peer
is gone spins forever, so every rank has a time limit and is killed at it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stretto.lab.ports import free_port
from support.ranks import (
    PROGRAM,
    call_of,
    rank_environment,
    result_of,
    text_of,
    wait_or_kill,
)
from support.shared_gpu import nccl_environment

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP_S = 60.0
"""The timeout of a group's collectives."""


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _why_not()
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(300))
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=why))


class GpuRanks:
    """Runs a function on several ranks that share one device."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0

    def __call__(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        timeout_s: float = 180.0,
        group: str = "nccl",
        **environment: str,
    ) -> list[Any]:
        """What every rank returned, by rank; ``group`` is that of its collectives."""
        self._runs += 1
        outs = [self._folder / f"{self._runs}-{rank}" for rank in range(size)]
        logs = [out.with_suffix(".log") for out in outs]
        port = free_port()
        processes = []
        for rank, out in enumerate(outs):
            settings = {
                **rank_environment(rank, size, port),
                **nccl_environment(rank),
                **environment,
            }
            run = [*call_of(function, arguments, out, GROUP_S), group]
            with logs[rank].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-X", "faulthandler", str(PROGRAM), *run],
                        env=settings,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        late = _end_all(processes, timeout_s)
        text = text_of(logs)
        if late:
            pytest.fail(f"ranks {late} did not end within {timeout_s} s\n{text}")
        return [result_of(out, rank, text) for rank, out in enumerate(outs)]


def _end_all(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Wait for all; those that run on write their stacks to their logs, and end."""
    begin = time.perf_counter()
    while time.perf_counter() < begin + timeout_s:
        if all(process.poll() is not None for process in processes):
            return []
        time.sleep(0.05)
    late = [rank for rank, p in enumerate(processes) if p.poll() is None]
    for rank in late:
        processes[rank].send_signal(signal.SIGABRT)
    wait_or_kill(processes, 5.0)
    return late


@pytest.fixture
def gpu_ranks(tmp_path: Path) -> GpuRanks:
    return GpuRanks(tmp_path)
