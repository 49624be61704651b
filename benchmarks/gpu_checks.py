"""Questions that only a GPU answers, each run in processes with a time limit.

The last output of each check is JSON; all answers are stored
together. Needs one CUDA device and a torch with NCCL, otherwise it ends with 3.

  python benchmarks/gpu_checks.py            # all
  python benchmarks/gpu_checks.py ctas mps   # some
  python benchmarks/gpu_checks.py --list
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from _mps import mps_daemon
from _record import store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stretto.lab.ports import free_port
from support.shared_gpu import nccl_environment

HERE = Path(__file__)
LIMIT_S = 150


# Starting processes.


def ask(part: str, environment: dict, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(HERE), "--part", part, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def answers(processes: list[subprocess.Popen]) -> list:
    """Return each process's last line as JSON, or what went wrong."""
    deadline = time.perf_counter() + LIMIT_S
    found = []
    try:
        for process in processes:
            try:
                left_s = max(1.0, deadline - time.perf_counter())
                text, _ = process.communicate(timeout=left_s)
            except subprocess.TimeoutExpired:
                found.append({"failed": f"no end within {LIMIT_S} s"})
                continue
            lines = text.strip().splitlines()
            if process.returncode or not lines:
                found.append({"failed": process.returncode, "said": lines[-8:]})
            else:
                found.append(json.loads(lines[-1]))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found


def on_ranks(part: str, *arguments: str, size: int = 2, **environment: str) -> list:
    port = str(free_port())
    return answers(
        [
            ask(
                part,
                {
                    **nccl_environment(rank),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    **environment,
                },
                *arguments,
            )
            for rank in range(size)
        ]
    )


# The questions.


def mps() -> dict:
    """Can a separate daemon be started, and does a client of it run?"""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        return {"installed": False}
    with mps_daemon(program, check=False) as (environment, status):
        (client,) = answers([ask("client", environment)])
        shared = on_ranks("all_reduces", **environment)
    return {
        "installed": True,
        "started": status,
        "client": client,
        "all_reduces_of_ranks": shared,
    }


def all_reduces() -> dict:
    """Are sums of ranks on one device correct, and how long do they take?"""
    version = dist.ProcessGroupNCCL.get_runtime_nccl_version()
    found = {"host_ids": on_ranks("all_reduces")}
    if tuple(version) >= (2, 30, 0):
        found["multi_rank_variable"] = on_ranks(
            "all_reduces",
            NCCL_HOSTID="same",
            NCCL_MULTI_RANK_GPU_ENABLE="1",
            NCCL_MAX_CTAS="4",
        )
    return {"nccl": list(version), **found}


def ctas() -> dict:
    """Which grid does a kernel have if its communicator is limited to k CTAs?"""
    return {str(count): on_ranks("grids", str(count))[0] for count in (1, 2, 4, 8, 16)}


def overlap() -> dict:
    """Do two communicators' kernels overlap, with and without the launch order set?"""
    return {
        "unset": on_ranks("two_lanes")[0],
        "set": on_ranks("two_lanes", NCCL_LAUNCH_ORDER_IMPLICIT="1")[0],
    }


def contention() -> dict:
    """How much does backward slow beside a kernel of k CTAs, and does a line fit?"""
    (found,) = answers([ask("synthetic", {})])
    return found


def priorities() -> dict:
    """Which stream priorities exist, and is a green context available?"""
    (found,) = answers([ask("streams", {})])
    return found


def pacing() -> dict:
    """Can NCCL's sockets be paced after the first collective?"""
    return {"ranks": on_ranks("paced")}


CHECKS = {
    check.__name__: check
    for check in (mps, all_reduces, ctas, overlap, contention, priorities, pacing)
}


# What runs in the processes.


def rank_setup() -> tuple[int, int, torch.device]:
    from datetime import timedelta

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=LIMIT_S / 2)
    dist.init_process_group("nccl", device_id=device, timeout=limit)
    return dist.get_rank(), dist.get_world_size(), device


def lane_pool(device: torch.device):
    from stretto.runtime.lanes import LanePool
    from stretto.runtime.store import ranks_of

    ranks = ranks_of(dist.group.WORLD, timeout_s=LIMIT_S / 2)
    return LanePool(ranks, serial=1, backend="nccl", device=device)


def timed_s(work, count: int = 10) -> float:
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def nccl_kernels(work) -> list[dict]:
    work()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    path = Path(tempfile.mkdtemp()) / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [
        {
            "name": event["name"][:60],
            "grid": event["args"]["grid"][0],
            "block": event["args"]["block"][0],
            "begin_us": event["ts"],
            "end_us": event["ts"] + event["dur"],
        }
        for event in events
        if event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    ]


def part_client() -> dict:
    return {"sum": torch.ones(1000, device="cuda").sum().item()}


def part_all_reduces() -> dict:
    rank, size, device = rank_setup()
    found = {}
    for size_bytes in (4, 2**20, 2**26):
        message = torch.full((size_bytes // 4,), float(rank + 1), device=device)
        dist.all_reduce(message)
        right = bool((message == size * (size + 1) / 2).all().item())
        message.zero_()
        found[str(size_bytes)] = {
            "right": right,
            "s": timed_s(lambda m=message: dist.all_reduce(m)),
        }
    return found


def part_grids(count: str) -> dict:
    _, _, device = rank_setup()
    pool = lane_pool(device)  # a pool that is dropped ends its lanes
    lane = pool.lane(0, int(count))
    found = {}
    for size_bytes in (2**16, 2**20, 2**26):
        message = torch.zeros(size_bytes // 4, device=device)
        seen = nccl_kernels(lambda m=message: lane.allreduce([m]).wait())
        found[str(size_bytes)] = [(k["name"], k["grid"], k["block"]) for k in seen]
    return found


def part_two_lanes() -> dict:
    _, _, device = rank_setup()
    # NCCL reads the variable at its first launch: unset, it stays so.
    dist.all_reduce(torch.zeros(4, device=device))
    torch.cuda.synchronize()
    pool = lane_pool(device)  # a pool that is dropped ends its lanes
    opened = pool.open([(0, 4), (0, 8), (1, 8)])
    messages = [torch.zeros(2**24, device=device) for _ in range(2)]

    def both(first, second):
        works = [
            lane.allreduce([message])
            for lane, message in zip((first, second), messages, strict=True)
        ]
        for work in works:
            work.wait()

    found = {}
    for name, pair in {
        "lanes": (opened[0, 8], opened[1, 8]),
        "family": (opened[0, 4], opened[0, 8]),
    }.items():
        seen = nccl_kernels(lambda pair=pair: both(*pair))
        shared = min(k["end_us"] for k in seen) - max(k["begin_us"] for k in seen)
        found[name] = {"kernels": len(seen), "overlap_us": shared}
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            both(opened[0, 8], opened[1, 8])
        seen = nccl_kernels(graph.replay)
        shared = min(k["end_us"] for k in seen) - max(k["begin_us"] for k in seen)
        found["captured"] = {"kernels": len(seen), "overlap_us": shared}
    except RuntimeError as error:
        found["captured"] = {"failed": str(error).splitlines()[0]}
    return found


def part_synthetic() -> dict:
    from stretto._api.measuring import fit_compute, probe_device

    readings = probe_device(resources=(1, 2, 4, 8, 16, 32), budget_s=60)
    fit = fit_compute(readings)
    return {
        "alpha1": fit.value.alpha1,
        "alpha2": fit.value.alpha2,
        "std_errors": fit.std_errors,
        "slowdowns": {
            str(r.resource): r.compute_overlapped_s / r.compute_alone_s
            for r in readings.slowdowns
        },
        "residual_ratios": list(fit.residual_ratios),
        **readings.provenance,
    }


def part_streams() -> dict:
    found: dict = {"priority_range": list(torch.cuda.Stream.priority_range())}
    try:
        from torch.cuda.green_contexts import GreenContext

        found["green_context"] = [
            (count, str(GreenContext.create(num_sms=count, device_id=0)))
            for count in (8, 16, 64)
        ]
    except (ImportError, RuntimeError, TypeError) as error:
        found["green_context"] = str(error).splitlines()[0]
    return found


def part_paced() -> dict:
    _, _, device = rank_setup()
    message = torch.zeros(2**22, device=device)
    free_s = timed_s(lambda: dist.all_reduce(message), 5)
    paced = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.type == socket.SOCK_STREAM:
                    found.setsockopt(socket.SOL_SOCKET, 47, 20 * 10**6)
                    paced += 1
        except OSError:
            continue
    dist.barrier()
    paced_s = timed_s(lambda: dist.all_reduce(message), 2)
    return {"sockets": paced, "free_s": free_s, "paced_s": paced_s}


PARTS = {
    name.removeprefix("part_"): value
    for name, value in list(globals().items())
    if name.startswith("part_")
}


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--part"]:
        print(json.dumps(PARTS[arguments[1]](*arguments[2:])), flush=True)
        # Not at the interpreter's own end, which would wait for peers.
        if os.environ.get("RANK") == "0":
            time.sleep(1.0)  # the store lives here
        os._exit(0)
    if arguments == ["--list"]:
        for name, check in CHECKS.items():
            print(f"{name:12} {check.__doc__}")
        return
    unknown = [name for name in arguments if name not in CHECKS]
    if unknown:
        sys.exit(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        lacks = "NCCL in torch" if torch.cuda.is_available() else "CUDA device"
        print(f"gpu_checks: no {lacks} here, so nothing was checked", file=sys.stderr)
        sys.exit(3)
    found = {}
    for name in arguments or CHECKS:
        print(f"{name}: {CHECKS[name].__doc__}", file=sys.stderr)
        try:
            found[name] = CHECKS[name]()
        except Exception as error:  # noqa: BLE001 - the others are still worth asking
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
    store(
        "gpu_checks",
        {
            "what": "what NCCL, streams and the synthetic kernel do on this device",
            "device": torch.cuda.get_device_name(0),
            "checks": found,
        },
    )


if __name__ == "__main__":
    main()
