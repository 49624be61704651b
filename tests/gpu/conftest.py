"""Several ranks on one GPU with real NCCL. Not yet run on a GPU.

NCCL refuses two ranks of one host on one device. A host id of its own per rank
(``NCCL_HOSTID``) makes them hosts that reach each other by sockets, which serves for
correctness in every version; ranks' processes take turns on the device, so times say
nothing. NCCL 2.30 and newer have ``NCCL_MULTI_RANK_GPU_ENABLE`` too. A rank whose peer
is gone spins for ever, so every rank has a time limit and is killed at it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stretto.lab.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

_RANK = """
import importlib.util, os, pickle, sys, traceback
path, name, out, arguments = sys.argv[1:5]
import torch
import torch.distributed as dist
from datetime import timedelta
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
spec = importlib.util.spec_from_file_location("ranks_of_a_test", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
try:
    more = pickle.loads(bytes.fromhex(arguments))
    found = ("value", getattr(module, name)(rank, size, *more))
    torch.cuda.synchronize()
except Exception:
    found = ("error", traceback.format_exc())
with open(out + ".part", "wb") as file:
    pickle.dump(found, file)
os.rename(out + ".part", out)
if rank == 0:  # the store lives here and must not go first
    import time
    time.sleep(1.0)
sys.stdout.flush(); sys.stderr.flush()
os._exit(0)
"""

SHARED_DEVICE = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}


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
        **environment: str,
    ) -> list[Any]:
        """What every rank returned, by rank."""
        self._runs += 1
        outs = [self._folder / f"{self._runs}-{rank}" for rank in range(size)]
        port = free_port()
        processes = []
        with contextlib.ExitStack() as stack:
            for rank, out in enumerate(outs):
                log = stack.enter_context(out.with_suffix(".log").open("wb"))
                command = [
                    sys.executable,
                    "-c",
                    _RANK,
                    function.__code__.co_filename,
                    function.__name__,
                    str(out),
                    pickle.dumps(arguments).hex(),
                ]
                settings = {
                    **os.environ,
                    **SHARED_DEVICE,
                    "NCCL_HOSTID": f"rank{rank}",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    **environment,
                }
                processes.append(
                    subprocess.Popen(
                        command, env=settings, stdout=log, stderr=subprocess.STDOUT
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
        logs = "\n".join(
            f"--- rank {rank}\n{out.with_suffix('.log').read_text()[-3000:]}"
            for rank, out in enumerate(outs)
        )
        if late:
            pytest.fail(f"ranks {late} did not end within {timeout_s} s\n{logs}")
        return [_value(out, rank, logs) for rank, out in enumerate(outs)]


def _value(out: Path, rank: int, logs: str) -> Any:
    if not out.exists():
        pytest.fail(f"rank {rank} left no result\n{logs}")
    kind, value = pickle.loads(out.read_bytes())
    if kind == "error":
        pytest.fail(f"rank {rank} raised\n{value}\n{logs}")
    return value


@pytest.fixture
def gpu_ranks(tmp_path: Path) -> GpuRanks:
    return GpuRanks(tmp_path)
