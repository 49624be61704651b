"""Start Gloo ranks on loopback for a benchmark, with a timeout."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stretto.lab.ports import free_port


def _main(rank: int, size: int, port: int, function: Any, arguments: tuple) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    function(rank, size, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def run(function: Any, size: int, *arguments: Any, timeout_s: float = 900) -> None:
    """Run ``function(rank, size, *arguments)`` as ``size`` processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    port = free_port()
    context = mp.start_processes(
        _main,
        args=(size, port, function, arguments),
        nprocs=size,
        join=False,
        start_method="spawn",
    )
    deadline = time.perf_counter() + timeout_s
    while not context.join(timeout=1.0):
        if time.perf_counter() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the ranks did not end within {timeout_s:g} s")
